"""Answers: drawn rows on their way from a shard to a learner.

In:  rows that a shard's store found.  Out: one checked record of bytes; and back, ready for the loops that decode.
Invariant: every compressed unit is in an answer once, however many rows need it. Where compressing spares little, the
rows are decoded at the shard and sent as plain arrays beside the record, which Ray hands over without copying.
An answer costs little beside its rows, since a batch takes one from every shard: its small arrays stand in one part,
in the order of the schema, and whatever is the same in every answer is read once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.cluster.encode import column_leaves
from holdall.cluster.protocol import ShardCounters, whole
from holdall.delivery.host import Staging
from holdall.errors import DamageError
from holdall.json_state import dtype_name, dtype_of
from holdall.schema import Array, Bytes, Leaf, Schema
from holdall.storage.blocks import Coded, Extent, SealedSlices
from holdall.storage.codec import Codec, Dictionary
from holdall.storage.layout import Window
from holdall.storage.records import MOST_SEGMENT_ROWS, Buffer, codec_of, codec_words, pack, records_in
from holdall.storage.remote_file import bring_places
from holdall.storage.slices import NEXT_IS_WHOLE, RECORD_FIELDS, Cursors, Held, Kernels, Log, Places
from holdall.storage.store import Rows
from holdall.threads import ThreadPool

ANSWER = "answer"
_DECODED_FROM = 0.25
"""Share of the decoded bytes from which on compressed slices are decoded at the shard: to check and copy them costs
more than it spares, also between machines."""
_MOST_BYTES = 2**28
_ALIGNMENT = 8
_MOST_KNOWN_FORMS = 256
_IS_LITTLE = sys.byteorder == "little"
_PADDING = [bytes(-n % _ALIGNMENT) for n in range(_ALIGNMENT)]
_U1, _U4, _I4 = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.int32)
_I8, _F8 = np.dtype(np.int64), np.dtype(np.float64)
_BY_WIDTH: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: _U4}
_CUT = slice(RECORD_FIELDS.index("outer"), RECORD_FIELDS.index("shift") + 1)

Ids = NDArray[np.int64]
Payload = bytes | tuple[Any, ...]
"""A record, or a record and the arrays of decoded slices that it names."""
FindDictionary = Callable[[str], Dictionary]


class SliceForm(NamedTuple):
    """How the slices of some rows are cut, and their bytes: units that are all coded alike, or plain bytes."""

    window: Window
    slices: Coded | Bytes
    words: str = ""  # the cut and the codec as they are sent; nothing for plain bytes


@dataclass(frozen=True, slots=True)
class FoundField:
    """One sliced leaf of some rows: which slices make up its observations, and these."""

    form: NDArray[np.int32]  # (rows,): which of `forms` a row's slices have
    cursors: Cursors  # (rows,)
    log: Log  # slice numbers, each among the slices of its row's form
    forms: tuple[SliceForm, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of one shard, and what is known of each."""

    counters: ShardCounters
    rows: Ids  # row numbers of the shard
    scaled: NDArray[np.float64]  # what each was drawn in proportion to
    columns: dict[str, Array]
    fields: dict[int, FoundField]  # by observation leaf

    def part(self, first: int, end: int) -> Answer:
        """Return some of the rows; they refer to the slices of all."""
        if (first, end) == (0, len(self.rows)):
            return self
        rows = slice(first, end)
        columns = {name: column[rows] for name, column in self.columns.items()}
        fields = {
            i: replace(found, form=found.form[rows], cursors=found.cursors[rows]) for i, found in self.fields.items()
        }
        return Answer(self.counters, self.rows[rows], self.scaled[rows], columns, fields)


class RowFinder:
    """Finds what a learner needs of some rows of a shard's store; several threads may use it."""

    def __init__(self, schema: Schema, kernels: Kernels) -> None:
        self._leaves = schema.observation.leaves
        self._kernels = kernels
        self._threads = ThreadPool()
        self._staging = Staging()
        self._words: dict[tuple[int, ...], tuple[Codec, str]] = {}

    def columns(self, rows: Rows) -> dict[str, Array]:
        """Name the small fields as they are sent."""
        found = {f"obs.{i}": pair[0] for i, pair in rows.small.items()}
        found |= {f"next.{i}": pair[1] for i, pair in rows.small.items()}
        found |= {f"action.{i}": column for i, column in enumerate(rows.action)}
        found |= {f"extras.{i}": column for i, column in enumerate(rows.extras)}
        return found | {"reward.0": rows.reward, "terminated.0": rows.terminated, "truncated.0": rows.truncated}

    def fields(self, rows: Rows) -> dict[int, FoundField]:
        """Find the slices of the large fields; no lock is needed."""
        places = rows.places
        if places is None or not len(places.segment):
            nothing = FoundField(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint32), ())
            return dict.fromkeys(rows.large, nothing)
        found = {}
        for field, i in enumerate(rows.large):
            leaf = self._leaves[i]
            found[i] = self._compressed(places, field, leaf) or self._decoded(places, field, leaf)
        return found

    def _compressed(self, places: Places, field: int, leaf: Leaf) -> FoundField | None:
        """Put the units together that hold the slices of the rows; None where these are better decoded here.

        An array operation costs more here than what it does for the rows of one answer, so there are few.
        """
        touched, _, where = _unique(places.segment)
        found = _joinable(places.held[field], touched.tolist())
        if found is None:
            return None
        logs, coded = found
        cuts = places.records[field][touched, _CUT]
        form_of, forms, groups = self._forms(cuts.tolist(), coded)
        tables = [each.offsets for each in coded]
        cursors = places.cursors[field]
        flags = cursors & NEXT_IS_WHOLE
        count, shift = cuts[where, -2], cuts[where, -1]
        length = count + np.where(flags, count, shift)
        begin = length.cumsum()
        row = np.arange(len(where)).repeat(length)
        begin -= length
        start = _starts(logs)[where] + (cursors ^ flags) - begin
        number = np.concatenate(logs).take(np.arange(len(row)) + start[row])
        group, form = groups[form_of][where], form_of[where]
        nth, within = np.divmod(number, group[row])
        # Units are counted over all tables, and those of one form lie together.
        units, example, place = _unique(((form << 40) + _starts(tables)[where])[row] + nth)
        offsets = np.concatenate(tables)
        units &= (1 << 40) - 1
        begins, ends = offsets.take(units), offsets.take(units + 1)
        if int(ends.sum()) - int(begins.sum()) > _DECODED_FROM * 2 * len(where) * leaf.nbytes:
            return None
        data: list[Any] = [each.data for each in coded]
        segments = where[row[example]]
        cut = [
            data[segment][first:last].data
            for segment, first, last in zip(segments.tolist(), begins.tolist(), ends.tolist(), strict=True)
        ]
        bounds = np.searchsorted(form_of[segments], np.arange(len(forms) + 1))
        joined = tuple(
            _joined(each, cut[first:last], (ends - begins)[first:last])
            for each, (first, last) in zip(forms, pairwise(bounds.tolist()), strict=True)
        )
        numbers = (place - bounds[form][row]) * group[row] + within
        is_narrow = all(each.slices.count <= 1 << 16 for each in joined if isinstance(each.slices, Coded))
        return FoundField(
            form.astype(np.int32),
            begin.astype(np.uint32) | flags,
            numbers.astype(np.uint16 if is_narrow else np.uint32),
            joined,
        )

    def _forms(self, cuts: list[list[int]], coded: list[Coded]) -> tuple[Ids, list[SliceForm], Ids]:
        """Number the forms that the slices of some segments have; return the forms, too, and the slices of a unit.

        Units of one form can be put together.
        """
        keys: dict[tuple[Any, ...], int] = {}
        forms: list[SliceForm] = []
        numbers: list[int] = []
        for cut, each in zip(cuts, coded, strict=True):
            key = (id(each.codec), *cut, each.palette.tobytes() if each.palette.size else b"")
            number = keys.setdefault(key, len(forms))
            if number == len(forms):
                outer, run_bytes, count, shift = cut
                window = Window(0, 1, count, outer, run_bytes, shift)
                forms.append(SliceForm(window, each, self._described(each.codec, cut)))
            numbers.append(number)
        groups = [form.slices.codec.group for form in forms if isinstance(form.slices, Coded)]
        return np.array(numbers), forms, np.array(groups)

    def _described(self, codec: Codec, cut: list[int]) -> str:
        """Describe a cut and a codec; the same ones are sent over and over."""
        key = (id(codec), *cut)
        known = self._words.get(key)
        if known is None or known[0] is not codec:
            if len(self._words) >= _MOST_KNOWN_FORMS:
                self._words.clear()
            words = json.dumps({"cut": cut, "codec": codec_words(codec)}, sort_keys=True)
            known = self._words[key] = codec, words
        return known[1]

    def _decoded(self, places: Places, field: int, leaf: Leaf) -> FoundField:
        """Decode the rows here: every observation and next observation is one slice."""
        count = len(places.segment)
        nbytes = count * leaf.nbytes
        if places.awaits_files:
            bring_places(places)
        both = self._staging.take(2 * nbytes)
        obs, next_obs = both[:nbytes].reshape(count, -1), both[nbytes:].reshape(count, -1)
        self._kernels.gather(places, field, obs, next_obs, self._threads)
        numbers = np.arange(count, dtype=np.uint32)
        log = np.stack([numbers, numbers + np.uint32(count)], axis=1).reshape(-1)
        form = SliceForm(Window.whole(leaf), both)
        return FoundField(np.zeros(count, np.int32), 2 * numbers, log, (form,))


def _joinable(held: tuple[Held, ...], segments: list[int]) -> tuple[list[Array], list[Coded]] | None:
    """Return logs and coded slices of some segments; None unless all units are whole, and in memory."""
    logs: list[Array] = []
    found: list[Coded] = []
    for segment in segments:
        log, content = held[segment]
        if not isinstance(log, np.ndarray) or not isinstance(content, SealedSlices):
            return None
        coded = content.coded
        if isinstance(coded.data, Extent) or coded.count % coded.codec.group:
            return None
        logs.append(log)  # of one lane
        found.append(coded)
    return logs, found


def _starts(arrays: Sequence[Array]) -> Ids:
    """Say where each of some arrays begins if they stand one after another."""
    return np.array(list(accumulate((len(array) for array in arrays[:-1]), initial=0)))


def _joined(form: SliceForm, units: list[Any], sizes: NDArray[np.uint32]) -> SliceForm:
    """Return a form with these units."""
    like: Any = form.slices
    offsets = np.zeros(len(units) + 1, np.uint32)
    np.cumsum(sizes, out=offsets[1:])
    data = np.frombuffer(b"".join(units), np.uint8)
    return form._replace(slices=Coded(like.codec, len(units) * like.codec.group, offsets, like.palette, data))


def _unique(values: NDArray[Any]) -> tuple[Ids, Ids, Ids]:
    """Return each value once, in order; where it is first found; and where each of `values` is among them.

    np.unique takes twice as long for few of them.
    """
    order = values.argsort(kind="stable")
    ordered = values[order]
    is_new = np.empty(len(values), np.bool_)
    is_new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    place = np.empty(len(values), np.int64)
    place[order] = np.cumsum(is_new) - 1
    return ordered[is_new], order[is_new], place


def pack_answer(answer: Answer) -> Payload:
    """Return an answer as a record, and the arrays of decoded slices beside it."""
    arrays = [answer.rows, answer.scaled, *(answer.columns[name] for name in sorted(answer.columns))]
    beside: list[Bytes] = []
    fields = []
    for i, field in answer.fields.items():
        arrays += [field.form, field.cursors, field.log]
        forms: list[list[Any]] = []
        for form in field.forms:
            slices = form.slices
            if isinstance(slices, Coded):
                data = np.asarray(slices.data)
                arrays += [slices.palette, slices.offsets, data]
                forms.append([form.words, len(slices.offsets), slices.palette.size, data.size])
            else:
                beside.append(slices)
                forms.append([slices.size, f"{xxhash.xxh3_64_intdigest(slices.data):016x}"])
        fields.append({"leaf": i, "log": [field.log.itemsize, field.log.size], "forms": forms})
    reward = dtype_name(answer.columns["reward.0"].dtype)
    head = {"rows": len(answer.rows), "reward": reward, "fields": fields}
    body = b"".join([answer.counters.packed(), *_aligned(arrays)])
    record = b"".join(pack(ANSWER, head, {"body": body}, frozenset()))
    return (record, *beside) if beside else record


class AnswerReader:
    """Reads the answers of all shards of a memory."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._known: dict[tuple[int, str], tuple[Window, Codec]] = {}
        self._known_columns: dict[tuple[Any, ...], list[tuple[str, Leaf]]] = {}

    def read(self, payload: Payload, find: FindDictionary) -> Answer:
        """Read an answer that was received; DamageError if anything in it does not make sense.

        Where its rows point to is not checked here: the loops that decode hold every place against its bounds.
        """
        content, *beside = (payload,) if isinstance(payload, bytes) else payload
        try:
            (record,) = records_in(content)
            if record.kind != ANSWER:
                raise DamageError(f"a record of kind {record.kind!r} was received in place of an answer")
            head, body = record.head, _Body(record.part("body", lambda start, n: content[start : start + n]))
            count = whole(head["rows"], MOST_SEGMENT_ROWS)
            counters = ShardCounters.of(body.take(_U1, ShardCounters.NBYTES).tobytes())
            rows, scaled = body.take(_I8, count), body.take(_F8, count)
            columns = self._columns(head, count, body)
            fields = {
                whole(each["leaf"], 2**16): self._field(each, count, body, beside, find) for each in head["fields"]
            }
            body.require_end()
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DamageError(f"an answer makes no sense ({type(error).__name__}: {error})") from error
        return Answer(counters, rows, scaled, columns, fields)

    def _columns(self, head: dict[str, Any], count: int, body: _Body) -> dict[str, Array]:
        key = (head["reward"], *(field["leaf"] for field in head["fields"]))
        leaves = self._known_columns.get(key)
        if leaves is None:
            found = column_leaves(self._schema, key[1:]) | {"reward.0": Leaf("", (), dtype_of(head["reward"]))}
            leaves = self._known_columns[key] = sorted(found.items())
        return {name: body.take(leaf.dtype, count, leaf.shape) for name, leaf in leaves}

    def _field(self, words: Any, count: int, body: _Body, beside: list[Any], find: FindDictionary) -> FoundField:
        leaf = self._schema.observation.leaves[words["leaf"]]
        form, cursors = body.take(_I4, count), body.take(_U4, count)
        width, entries = words["log"]
        log = body.take(_BY_WIDTH[width], whole(entries, _MOST_BYTES))
        forms = []
        for described in words["forms"]:
            if len(described) == 2:
                forms.append(SliceForm(Window.whole(leaf), _plain(beside.pop(0), *described)))
                continue
            text, offsets, palette_bytes, data_bytes = described
            window, codec = self._form(words["leaf"], text, find)
            palette = body.take(_U1, whole(palette_bytes, _MOST_BYTES))
            begins = body.take(_U4, whole(offsets, _MOST_BYTES))
            data = body.take(_U1, whole(data_bytes, _MOST_BYTES))
            slices = (len(begins) - 1) * codec.group
            forms.append(SliceForm(window, Coded(codec, slices, begins, palette, data), text))
        if count and not 0 <= int(form.min()) <= int(form.max()) < len(forms):
            raise DamageError("an answer has rows of no form; nothing of it is used")
        return FoundField(form, cursors, log, tuple(forms))

    def _form(self, leaf: int, text: str, find: FindDictionary) -> tuple[Window, Codec]:
        """Return how slices are cut and coded; answers say it in the same words over and over."""
        known = self._known.get((leaf, text))
        if known is None:
            words = json.loads(text)
            outer, run_bytes, count, shift = (whole(number, _MOST_BYTES) for number in words["cut"])
            window, named = Window(0, 1, count, outer, run_bytes, shift), words["codec"]["dictionary"]
            codec = codec_of(words["codec"], {} if named is None else {named: find(named)})
            fits = codec.transform.slice_bytes == window.slice_bytes and 1 <= shift <= count
            if not fits or count * window.slice_bytes != self._schema.observation.leaves[leaf].nbytes:
                raise DamageError("an answer has slices that do not fit their window; nothing of it is used")
            if len(self._known) >= _MOST_KNOWN_FORMS:
                self._known.clear()
            known = self._known[leaf, text] = window, codec
        return known


def _plain(array: Any, nbytes: int, digest: str) -> Bytes:
    """Check decoded slices that were received."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != (nbytes,):
        raise DamageError("an answer lacks slices that it names; nothing of it is used")
    if f"{xxhash.xxh3_64_intdigest(array.data):016x}" != digest:
        raise DamageError("the slices beside an answer are damaged; nothing of it is used")
    return array


class _Body:
    """Arrays one after another, each where a machine likes to read it."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = 0

    def take(self, dtype: np.dtype[Any], count: int, shape: tuple[int, ...] = ()) -> Array:
        """Look at the next array, of so many rows."""
        rows = count
        for length in shape:
            rows *= length
        end = self._place + rows * dtype.itemsize
        if end > len(self._content):
            raise ValueError("it ends within an array")
        array: Array = np.ndarray((count, *shape), dtype.newbyteorder("<"), self._content, self._place)
        self._place = -(-end // _ALIGNMENT) * _ALIGNMENT
        return array if _IS_LITTLE else array.astype(dtype)

    def require_end(self) -> None:
        """Refuse what is longer than its arrays."""
        if self._place != len(self._content):
            raise ValueError("it is longer than its arrays")


def _aligned(arrays: Sequence[Array]) -> list[Buffer]:
    """Return arrays as the bytes that travel, little-endian, each filled up to where the next may begin."""
    buffers: list[Buffer] = []
    for array in arrays:
        little = array if _IS_LITTLE else array.astype(array.dtype.newbyteorder("<"))
        buffers.append(little.data if little.flags.c_contiguous else little.tobytes())
        if little.nbytes % _ALIGNMENT:
            buffers.append(_PADDING[little.nbytes % _ALIGNMENT])
    return buffers

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall import storage
from holdall.batch import Batch, Draw
from holdall.cluster.encode import column_leaves
from holdall.cluster.lent_arrays import LentArrays
from holdall.cluster.protocol import ShardCounters, ids_of, whole
from holdall.delivery import Delivery, DrawnRows, HostBatches, ObservationAssembler
from holdall.errors import DamageError
from holdall.json_state import dtype_name, dtype_of
from holdall.sampling import Hindsight, Sampler
from holdall.schema import Array, Bytes, Leaf, Schema

ANSWER = "answer"
_MOST_BYTES = 2**28
_ALIGNMENT = 8
MOST_KNOWN_FORMS = 256
_IS_LITTLE = sys.byteorder == "little"
_PADDING = [bytes(-n % _ALIGNMENT) for n in range(_ALIGNMENT)]
_U1, _U4, _I4 = np.dtype(np.uint8), np.dtype(np.uint32), np.dtype(np.int32)
_I8, _F8 = np.dtype(np.int64), np.dtype(np.float64)
_BY_WIDTH: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: _U4}

Ids = NDArray[np.int64]
Payload = bytes | tuple[Any, ...]
"""A record, or a record and the arrays of decoded slices that it names."""
_OWN = ("reward", "discount", "mask")
FindDictionary = Callable[[str], storage.Dictionary]


class SliceForm(NamedTuple):
    """How the slices of some rows are cut, and their bytes: units that are all coded alike, or plain bytes."""

    window: storage.Window
    slices: storage.Coded | Bytes
    words: str = ""  # the cut and the codec as they are sent; nothing for plain bytes


@dataclass(frozen=True, slots=True)
class FoundField:
    """One sliced leaf of some rows: which slices make up its observations, and these."""

    form: NDArray[np.int32]  # (rows,): which of `forms` a row's slices have
    cursors: storage.Cursors  # (rows,)
    log: storage.Log  # slice numbers, each among the slices of its row's form
    forms: tuple[SliceForm, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the slices, as they are sent."""
        found = [form.slices.data if isinstance(form.slices, storage.Coded) else form.slices for form in self.forms]
        return sum(np.asarray(slices).nbytes for slices in found)


NOBODY = np.empty(0, np.int32)


class RowDraw(NamedTuple):
    """What a shard's sampler drew: rows, and what else the sampler says of each."""

    rows: Ids  # of every drawn one its steps; behind all of these the rows that `others` names
    steps: int = 0  # rows of each that was drawn; 0: one, and no axis of time
    others: NDArray[np.int32] = NOBODY  # which drawn one each row behind them belongs to: its last step, or its goal
    own: Mapping[str, Array] = {}  # by name, of every drawn one: see `holdall.batch.Draw`

    @classmethod
    def of(cls, draws: Sequence[Draw]) -> RowDraw:
        """Lay the draws of some batches one behind another."""
        if len(draws) == 1 and draws[0].last_ids is None and draws[0].goals is None and draws[0].ids.ndim == 1:
            return cls(draws[0].ids)
        behind: list[Ids] = []
        others: list[Ids] = []
        begin = 0
        for draw in draws:
            if draw.last_ids is not None:
                behind.append(draw.last_ids)
                others.append(begin + np.arange(len(draw.ids)))
            elif draw.goals is not None:
                behind.append(draw.goals.ids)
                others.append(begin + draw.goals.rows)
            begin += len(draw.ids)
        ids = np.concatenate([draw.ids for draw in draws])
        own = {name: [getattr(draw, name) for draw in draws] for name in _OWN if getattr(draws[0], name) is not None}
        return cls(
            np.concatenate([ids.reshape(-1), *behind]),
            ids.shape[1] if ids.ndim == 2 else 0,
            np.concatenate(others).astype(np.int32) if others else NOBODY,
            {name: np.concatenate(arrays) for name, arrays in own.items()},
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of one shard, and what is known of each."""

    counters: ShardCounters
    draw: RowDraw
    scaled: NDArray[np.float64]  # what each drawn one was drawn in proportion to
    columns: dict[str, Array]
    fields: dict[int, FoundField]  # by observation leaf

    def part(self, first: int, end: int) -> Answer:
        """Return some of what was drawn; its rows refer to the slices of all."""
        drawn, (_, steps, others, own) = len(self.scaled), self.draw
        if (first, end) == (0, drawn):
            return self
        each = max(1, steps)
        rows: slice | Ids = slice(first * each, end * each)
        kept = np.flatnonzero((others >= first) & (others < end))
        if kept.size:
            rows = np.concatenate([np.arange(first * each, end * each), drawn * each + kept])
        draw = RowDraw(
            self.draw.rows[rows],
            steps,
            others[kept] - np.int32(first),
            {name: array[first:end] for name, array in own.items()},
        )
        columns = {name: column[rows] for name, column in self.columns.items()}
        fields = {
            i: replace(found, form=found.form[rows], cursors=found.cursors[rows]) for i, found in self.fields.items()
        }
        return Answer(self.counters, draw, self.scaled[first:end], columns, fields)


def pack_answer(answer: Answer, is_near: bool = False) -> Payload:
    """Return an answer as a record, and the arrays of decoded slices beside it.

    Args:
        is_near: Whether it stays on this machine, and arrays in shared memory need no checksum.
    """
    draw = answer.draw
    arrays = [draw.rows, answer.scaled, *(answer.columns[name] for name in sorted(answer.columns))]
    beside: list[Bytes] = []
    fields = []
    for i, field in answer.fields.items():
        arrays += [field.form, field.cursors, field.log]
        forms: list[list[Any]] = []
        for form in field.forms:
            slices = form.slices
            if isinstance(slices, storage.Coded):
                data = np.asarray(slices.data)
                arrays += [slices.palette, slices.offsets, data]
                forms.append([form.words, len(slices.offsets), slices.palette.size, data.size])
            else:
                beside.append(slices)
                forms.append([slices.size, "" if is_near else f"{xxhash.xxh3_64_intdigest(slices.data):016x}"])
        fields.append({"leaf": i, "log": [field.log.itemsize, field.log.size], "forms": forms})
    reward = dtype_name(answer.columns["reward.0"].dtype)
    head: dict[str, Any] = {"rows": len(draw.rows), "reward": reward, "fields": fields}
    if draw.others.size or draw.own:
        own = [[name, dtype_name(array.dtype), list(array.shape[1:])] for name, array in draw.own.items()]
        head["drawn"] = [len(answer.scaled), draw.steps, draw.others.size, own]
        arrays += [draw.others, *draw.own.values()]
    body = b"".join([answer.counters.packed(), *_aligned(arrays)])
    record = b"".join(storage.pack(ANSWER, head, {"body": body}, frozenset()))
    return (record, *beside) if beside else record


class AnswerReader:
    """Reads the answers of all shards of a memory."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._known: dict[tuple[int, str], tuple[storage.Window, storage.Codec]] = {}
        self._known_columns: dict[tuple[Any, ...], list[tuple[str, Leaf]]] = {}

    def read(self, payload: Payload, find: FindDictionary) -> Answer:
        """Read an answer that was received; DamageError if anything in it does not make sense.

        Where its rows point to is not checked here: the loops that decode hold every place against its bounds.
        """
        content, *beside = (payload,) if isinstance(payload, bytes) else payload
        try:
            (record,) = storage.records_in(content)
            if record.kind != ANSWER:
                raise DamageError(f"a record of kind {record.kind!r} was received in place of an answer")
            head, body = record.head, _Body(record.part("body", lambda start, n: content[start : start + n]))
            count = whole(head["rows"], storage.MOST_SEGMENT_ROWS)
            counters = ShardCounters.of(body.take(_U1, ShardCounters.LAYOUT.size).tobytes())
            words = head.get("drawn", [count, 0, 0, []])
            drawn, steps, behind = (whole(number, count) for number in words[:3])
            rows, scaled = body.take(_I8, count), body.take(_F8, drawn)
            columns = self._columns(head, count, body)
            fields = {
                whole(each["leaf"], 2**16): self._field(each, count, body, beside, find) for each in head["fields"]
            }
            others, own = body.take(_I4, behind), {}
            for name, dtype, shape in words[3]:
                own[_OWN[_OWN.index(name)]] = body.take(dtype_of(dtype), drawn, tuple(whole(n, 2**20) for n in shape))
            body.require_end()
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DamageError(f"an answer makes no sense ({type(error).__name__}: {error})") from error
        is_one_each = drawn * max(1, steps) + behind == count
        if not is_one_each or (behind and not 0 <= int(others.min()) <= int(others.max()) < drawn):
            raise DamageError("an answer has rows that belong to nothing that was drawn; nothing of it is used")
        return Answer(counters, RowDraw(rows, steps, others, own), scaled, columns, fields)

    def _columns(self, head: dict[str, Any], count: int, body: _Body) -> dict[str, Array]:
        key = (head["reward"], *(field["leaf"] for field in head["fields"]))
        leaves = self._known_columns.get(key)
        if leaves is None:
            found = column_leaves(self._schema, key[1:]) | {
                "reward.0": self._schema.reward_leaf(dtype_of(head["reward"]))
            }
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
                forms.append(SliceForm(storage.Window.whole(leaf), _plain(beside.pop(0), *described)))
                continue
            text, offsets, palette_bytes, data_bytes = described
            window, codec = self._form(words["leaf"], text, find)
            palette = body.take(_U1, whole(palette_bytes, _MOST_BYTES))
            begins = body.take(_U4, whole(offsets, _MOST_BYTES))
            data = body.take(_U1, whole(data_bytes, _MOST_BYTES))
            slices = (len(begins) - 1) * codec.group
            forms.append(SliceForm(window, storage.Coded(codec, slices, begins, palette, data), text))
        if count and not 0 <= int(form.min()) <= int(form.max()) < len(forms):
            raise DamageError("an answer has rows of no form; nothing of it is used")
        return FoundField(form, cursors, log, tuple(forms))

    def _form(self, leaf: int, text: str, find: FindDictionary) -> tuple[storage.Window, storage.Codec]:
        """Return how slices are cut and coded; answers say it in the same words over and over."""
        known = self._known.get((leaf, text))
        if known is None:
            words = json.loads(text)
            outer, run_bytes, count, shift = (whole(number, _MOST_BYTES) for number in words["cut"])
            window, named = storage.Window(0, 1, count, outer, run_bytes, shift), words["codec"]["dictionary"]
            codec = storage.codec_of(words["codec"], {} if named is None else {named: find(named)})
            fits = codec.transform.slice_bytes == window.slice_bytes and 1 <= shift <= count
            if not fits or count * window.slice_bytes != self._schema.observation.leaves[leaf].nbytes:
                raise DamageError("an answer has slices that do not fit their window; nothing of it is used")
            if len(self._known) >= MOST_KNOWN_FORMS:
                self._known.clear()
            known = self._known[leaf, text] = window, codec
        return known


def _plain(array: Any, nbytes: int, digest: str) -> Bytes:
    """Check decoded slices that were received."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.shape != (nbytes,):
        raise DamageError("an answer lacks slices that it names; nothing of it is used")
    if digest and f"{xxhash.xxh3_64_intdigest(array.data):016x}" != digest:
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


def _aligned(arrays: Sequence[Array]) -> list[storage.Buffer]:
    """Return arrays as the bytes that travel, little-endian, each filled up to where the next may begin."""
    buffers: list[storage.Buffer] = []
    for array in arrays:
        little = array if _IS_LITTLE else array.astype(array.dtype.newbyteorder("<"))
        buffers.append(little.data if little.flags.c_contiguous else little.tobytes())
        if little.nbytes % _ALIGNMENT:
            buffers.append(_PADDING[little.nbytes % _ALIGNMENT])
    return buffers


class _Share(NamedTuple):
    """Rows of one answer, and where they go."""

    answer: Answer
    rows: slice  # of the answer
    positions: Ids
    ids: Ids


_FIRST, _NEXT, _BOTH = (True, False), (False, True), (True, True)
"""Which of observations and next observations are wanted."""


def _ids(shares: Sequence[_Share]) -> Ids:
    return _merged([share.ids for share in shares], shares)


def _merged(parts: Sequence[Array], shares: Sequence[_Share]) -> Array:
    """Bring rows of some answers together."""
    if len(parts) == 1:
        return _own(parts[0])
    merged = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for part, share in zip(parts, shares, strict=True):
        merged[share.positions] = part
    return merged


class Deliverer:
    """Decodes the rows of answers, and makes batches of them as a local memory does of its own."""

    def __init__(self, schema: Schema, kernels: storage.Kernels, device: str | None) -> None:
        self._schema = schema
        self._kernels = kernels
        self.assembler = ObservationAssembler(kernels, 1 << 62)
        self._store = LentArrays()
        self.batches = HostBatches(schema, self.assembler, Delivery(device, schema.leaves))

    def batch(
        self, answers: Sequence[Answer], where: Sequence[Ids], shards: Sequence[int], weights: NDArray[np.float32],
        sampler: Sampler | None = None,
    ) -> Batch:  # fmt: skip
        """Make a batch.

        Args:
            where: For every answer, the positions in the batch of what was drawn.
            sampler: Makes something else of rows behind those drawn than last steps: goals.
        """
        steps, count = answers[0].draw.steps, len(weights)
        each = max(1, steps)
        drawn, behind = [], []
        for shard, answer, rows in zip(shards, answers, where, strict=True):
            first, ids = len(rows) * each, ids_of(shard, answer.draw.rows)
            positions = rows if each == 1 else (rows[:, None] * each + np.arange(each)).reshape(-1)
            drawn.append(_Share(answer, slice(0, first), positions, ids[:first]))
            behind.append(_Share(answer, slice(first, None), rows[answer.draw.others], ids[first:]))
        draw = Draw(
            _ids(drawn).reshape((count, steps) if steps else count),
            _own(weights),
            **self._own_arrays(answers, where, count),
        )
        if isinstance(sampler, Hindsight):
            found = DrawnRows(self._rows(drawn, _BOTH), None, self._rows(behind, _NEXT))
            return self.batches.make(replace(draw, goals=sampler.goals(_ids(behind))), found)
        if any(len(share.ids) for share in behind):
            found = DrawnRows(self._rows(drawn, _FIRST), self._rows(behind, _NEXT), None)
            return self.batches.make(replace(draw, last_ids=_ids(behind)), found)
        return self.batches.make(draw, DrawnRows(self._rows(drawn, _BOTH), None, None))

    @staticmethod
    def _own_arrays(answers: Sequence[Answer], where: Sequence[Ids], count: int) -> dict[str, Any]:
        """Merge what the samplers say of what they drew."""
        found: dict[str, Any] = {}
        for name, first in answers[0].draw.own.items():
            merged = found[name] = np.empty((count, *first.shape[1:]), first.dtype)
            for answer, rows in zip(answers, where, strict=True):
                merged[rows] = answer.draw.own[name]
        return found

    def _rows(self, shares: Sequence[_Share], wanted: tuple[bool, bool]) -> storage.Rows:
        """Bring rows of some answers together; of observations and next observations those that are wanted."""

        def column(name: str) -> Array:
            return _merged([share.answer.columns[name][share.rows] for share in shares], shares)

        schema, pairs = self._schema, {}
        for i, leaf in enumerate(schema.observation.leaves):
            if i in shares[0].answer.fields:
                pair = self._borrowed(shares, i, leaf)
                pairs[i] = pair or self.assembler.assemble(self._places(i, shares), 0, leaf, wanted)
            else:
                pairs[i] = column(f"obs.{i}"), column(f"next.{i}")
        action = [column(f"action.{i}") for i in range(len(schema.action.leaves))]
        extras = [column(f"extras.{i}") for i in range(len(schema.extras.leaves))]
        reward, terminated, truncated = (column(f"{name}.0") for name in ("reward", "terminated", "truncated"))
        ended = (terminated > truncated).astype(np.float32)
        return storage.Rows(pairs, (), None, action, reward, terminated, truncated, extras, ended)

    def _borrowed(self, shares: Sequence[_Share], i: int, leaf: Leaf) -> tuple[Array, Array] | None:
        """Return the arrays of one answer as they are, if the batch is all of it, or None; nothing is copied."""
        share, found = shares[0], shares[0].answer.fields[i]
        count, total, slices = len(share.ids), found.log.size // 2, found.forms[0].slices if found.forms else None
        if len(shares) > 1 or len(found.forms) > 1 or not isinstance(slices, np.ndarray) or not count:
            return None
        cursors = found.cursors[share.rows]
        first = int(cursors[0]) // 2
        in_order = np.arange(count, dtype=np.uint32)
        log = np.arange(2 * total, dtype=np.uint32).reshape(2, total).T.reshape(-1)
        if not all(
            np.array_equal(*pair)
            for pair in ((share.positions, in_order), (cursors, 2 * (first + in_order)), (found.log, log))
        ):
            return None
        owned = self._store.writable(slices)
        if owned is None:
            return None
        pair = owned.reshape(2, total, leaf.nbytes)[:, first : first + count]
        obs, next_obs = (side.reshape(-1).view(leaf.dtype).reshape(count, *leaf.shape) for side in pair)
        return obs, next_obs

    def _places(self, leaf: int, shares: Sequence[_Share]) -> storage.Places:
        """Describe where the slices of a leaf lie, to the loops that decode them."""
        count = sum(len(share.ids) for share in shares)
        segment, cursors = np.zeros(count, np.int32), np.zeros(count, np.uint32)
        parts: list[storage.ClosedPart] = []
        for share in shares:
            found, where = share.answer.fields[leaf], share.positions
            segment[where] = found.form[share.rows] + np.int32(len(parts))
            cursors[where] = found.cursors[share.rows]
            log = found.log.reshape(-1, 1)
            for form in found.forms:
                block = self._block(form)
                parts.append(storage.ClosedPart(form.window, log, len(log), block, block.used, len(where), block.used))
        records = np.array([part.record() for part in parts], np.int64).reshape(len(parts), len(storage.RECORD_FIELDS))
        return storage.Places(
            records=[records],
            segment=segment,
            cursors=[cursors],
            lane=np.zeros(count, np.int32),
            lanes=1,
            held=(tuple(part.held for part in parts),),
        )

    def _block(self, form: SliceForm) -> storage.KeptBlock:
        slice_bytes, slices = form.window.slice_bytes, form.slices
        if isinstance(slices, storage.Coded):
            return storage.KeptBlock(slice_bytes, slices.count, self._kernels.coder.adopt(slices))
        return storage.KeptBlock(slice_bytes, slices.size // slice_bytes, slices)


def _own(array: Array) -> Array:
    """Return an array that may be written to: a batch belongs to the caller."""
    return array if array.flags.writeable and array.flags.owndata else array.copy()

"""What a learner needs of drawn rows: the compressed units that hold their slices, or the rows decoded.

In:  where rows lie in a shard's store.  Out: fields of an answer.
Invariant: every unit is in an answer once, however many rows need it. Which of the two is sent is decided by the bytes
that it takes, and by where the learner is.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import storage
from holdall.cluster.answer import MOST_KNOWN_FORMS, FoundField, SliceForm
from holdall.delivery import host_pool
from holdall.schema import Array, Bytes, Leaf, Schema

_DECODED_FROM = 0.9
"""Share of the decoded bytes from which on a shard decodes what it sends to another machine."""
_DECODED_NEAR_FROM = 0.05
"""The same for a learner on the shard's machine, who has arrays at once; measured, see decision 076."""
_MEASURE_AGAIN = 64
"""Answers after which a field's share is measured again."""
_NEWLY_DECODED = 16
"""Segments that one answer decodes and keeps so."""
_SLICES, _SEALED = (storage.RECORD_FIELDS.index(name) for name in ("slices", "sealed"))
_CUT = slice(storage.RECORD_FIELDS.index("outer"), storage.RECORD_FIELDS.index("shift") + 1)

Ids = NDArray[np.int64]


class DecodedSegments:
    """Decoded slices of segments that are drawn from: as an ordinary memory leaves what it has room for uncompressed.

    Those of a segment go with it. Where there is no room left, others are decoded for every batch.

    Args:
        most_bytes: Kept at most.
    """

    def __init__(self, coder: storage.Coder, most_bytes: int) -> None:
        self._coder = coder
        self._room = most_bytes
        self._slices: weakref.WeakKeyDictionary[storage.SealedSlices, Bytes] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def instead(self, places: storage.Places, field: int) -> storage.Places:
        """Return the places of one field, as that of a batch of one, with decoded slices where these are kept."""
        touched, _, where = _unique(places.segment)
        records, held = places.records[field][touched], list[storage.Held]()
        newly = _NEWLY_DECODED
        for i, segment in enumerate(touched.tolist()):
            log, content = places.held[field][segment]
            if isinstance(content, storage.SealedSlices) and not places.reads_files:
                slices = self._slices.get(content)
                if slices is None and newly:
                    slices, newly = self._decode(content), newly - 1
                if slices is not None:
                    records[i, _SLICES], records[i, _SEALED], content = slices.ctypes.data, 0, slices
            held.append((log, content))
        return replace(
            places, records=[records], segment=where.astype(np.int32), cursors=[places.cursors[field]],
            held=(tuple(held),),
        )  # fmt: skip

    def _decode(self, sealed: storage.SealedSlices) -> Bytes | None:
        """Decode slices and keep them, if there is room."""
        nbytes = sealed.count * sealed.codec.transform.slice_bytes
        with self._lock:
            if nbytes > self._room:
                return None
            self._room -= nbytes
        slices = np.empty((sealed.count, sealed.codec.transform.slice_bytes), np.uint8)
        self._coder.decode(sealed, np.arange(sealed.count), slices)
        self._slices[sealed] = slices
        weakref.finalize(sealed, self._free, nbytes).atexit = False
        return slices

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self._room += nbytes


class RowFinder:
    """Finds what a learner needs of some rows of a shard's store; several threads may use it."""

    def __init__(self, schema: Schema, kernels: storage.Kernels, decoded_bytes: int = 0) -> None:
        self._leaves = schema.observation.leaves
        self._kernels = kernels
        self._threads = self._kernels.new_pool()
        self._staging = host_pool()
        self._words: dict[tuple[int, ...], tuple[storage.Codec, str]] = {}
        self._shares: dict[int, tuple[float, int]] = {}  # of a field: coded bytes over decoded, and answers since
        self._kept = DecodedSegments(kernels.coder, decoded_bytes)

    def columns(self, rows: storage.Rows) -> dict[str, Array]:
        """Name the small fields as they are sent."""
        found = {f"obs.{i}": pair[0] for i, pair in rows.small.items()}
        found |= {f"next.{i}": pair[1] for i, pair in rows.small.items()}
        found |= {f"action.{i}": column for i, column in enumerate(rows.action)}
        found |= {f"extras.{i}": column for i, column in enumerate(rows.extras)}
        return found | {"reward.0": rows.reward, "terminated.0": rows.terminated, "truncated.0": rows.truncated}

    def fields(self, rows: storage.Rows, is_near: bool = False) -> dict[int, FoundField]:
        """Find the slices of the large fields; no lock is needed.

        Args:
            is_near: Whether the learner is on this machine.
        """
        places = rows.places
        if places is None or not len(places.segment):
            nothing = FoundField(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint32), ())
            return dict.fromkeys(rows.large, nothing)
        found = {}
        for field, i in enumerate(rows.large):
            leaf, limit = self._leaves[i], _DECODED_NEAR_FROM if is_near else _DECODED_FROM
            share, answers = self._shares.get(field, (0.0, 0))
            coded = None
            if share <= limit or answers % _MEASURE_AGAIN == 0:
                coded = self._compressed(places, field, leaf)
                share = 1.0 if coded is None else coded.nbytes / (2 * len(places.segment) * leaf.nbytes)
            self._shares[field] = share, answers + 1
            found[i] = self._decoded(places, field, leaf) if coded is None or share > limit else coded
        return found

    def _compressed(self, places: storage.Places, field: int, leaf: Leaf) -> FoundField | None:
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
        flags = cursors & storage.NEXT_IS_WHOLE
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
        data = [np.asarray(each.data).data for each in coded]
        segments = where[row[example]]
        cut = [
            data[segment][first:last]
            for segment, first, last in zip(segments.tolist(), begins.tolist(), ends.tolist(), strict=True)
        ]
        bounds = np.searchsorted(form_of[segments], np.arange(len(forms) + 1))
        joined = tuple(
            _joined(each, cut[first:last], (ends - begins)[first:last])
            for each, (first, last) in zip(forms, pairwise(bounds.tolist()), strict=True)
        )
        numbers = (place - bounds[form][row]) * group[row] + within
        is_narrow = all(each.slices.count <= 1 << 16 for each in joined if isinstance(each.slices, storage.Coded))
        log: storage.Log = numbers.astype(np.uint16) if is_narrow else numbers.astype(np.uint32)
        return FoundField(form.astype(np.int32), begin.astype(np.uint32) | flags, log, joined)

    def _forms(self, cuts: list[list[int]], coded: list[storage.Coded]) -> tuple[Ids, list[SliceForm], Ids]:
        """Number the forms that the slices of some segments have; return the forms, too, and the slices of a unit.

        Units of one form can be put together.
        """
        keys: dict[tuple[Any, ...], int] = {}
        forms: list[SliceForm] = []
        numbers: list[int] = []
        number, codec, last = -1, None, [0]
        for cut, each in zip(cuts, coded, strict=True):
            if codec is each.codec and last == cut and not each.palette.size:  # most are coded like the one before
                numbers.append(number)
                continue
            codec, last = each.codec, cut
            key = (id(each.codec), *cut, each.palette.tobytes() if each.palette.size else b"")
            number = keys.setdefault(key, len(forms))
            if number == len(forms):
                outer, run_bytes, count, shift = cut
                window = storage.Window(0, 1, count, outer, run_bytes, shift)
                forms.append(SliceForm(window, each, self._described(each.codec, cut)))
            numbers.append(number)
        groups = [form.slices.codec.group for form in forms if isinstance(form.slices, storage.Coded)]
        return np.array(numbers), forms, np.array(groups)

    def _described(self, codec: storage.Codec, cut: list[int]) -> str:
        """Describe a cut and a codec; the same ones are sent over and over."""
        key = (id(codec), *cut)
        known = self._words.get(key)
        if known is None or known[0] is not codec:
            if len(self._words) >= MOST_KNOWN_FORMS:
                self._words.clear()
            words = json.dumps({"cut": cut, "codec": storage.codec_words(codec)}, sort_keys=True)
            known = self._words[key] = codec, words
        return known[1]

    def _decoded(self, places: storage.Places, field: int, leaf: Leaf) -> FoundField:
        """Decode the rows here: every observation and next observation is one slice."""
        count = len(places.segment)
        nbytes = count * leaf.nbytes
        if places.awaits_files:
            storage.bring_places(places)
        both = self._staging.take(2 * nbytes)
        obs, next_obs = both[:nbytes].reshape(count, -1), both[nbytes:].reshape(count, -1)
        self._kernels.gather(self._kept.instead(places, field), 0, obs, next_obs, self._threads)
        numbers = np.arange(count, dtype=np.uint32)
        log = np.stack([numbers, numbers + np.uint32(count)], axis=1).reshape(-1)
        form = SliceForm(storage.Window.whole(leaf), both)
        return FoundField(np.zeros(count, np.int32), 2 * numbers, log, (form,))


def _joinable(held: tuple[storage.Held, ...], segments: list[int]) -> tuple[list[Array], list[storage.Coded]] | None:
    """Return logs and coded slices of some segments; None unless all units are whole, in memory, and can be moved."""
    logs: list[Array] = []
    found: list[storage.Coded] = []
    for segment in segments:
        log, content = held[segment]
        if not isinstance(log, np.ndarray) or not isinstance(content, storage.SealedSlices):
            return None
        coded = content.coded
        codec = coded.codec
        if isinstance(coded.data, storage.Extent) or coded.count % codec.group or codec.key or len(coded.places):
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
    return form._replace(slices=storage.Coded(like.codec, len(units) * like.codec.group, offsets, like.palette, data))


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

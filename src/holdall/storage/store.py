"""The store, whole: what it adopts and hands out, and what it accounts for.

    adopt(segment)   ticks that were sealed elsewhere; `segment_at` hands such out
    report()         where the bytes of every field are

A shard is a store of one lane that only adopts: a transition's id is the number of its row there. A segment that
travels, over the network or to a journal, is bytes: the records that a checkpoint has of it, one after another.
Invariant: a segment refers to nothing outside of itself but dictionaries, by name. Nothing that was received is
trusted: every checksum is computed, and every number is held against the others before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError
from holdall.json_state import counted, dtype_of, malformed_refused
from holdall.report import FieldReport
from holdall.schema import Array, Leaf, Schema
from holdall.storage.blocks import CarriedSlices, Coder, KeptBlock
from holdall.storage.codec import Dictionary, stored
from holdall.storage.records import Record, pack_slices, unpack, unpack_slices_whole
from holdall.storage.rings import CURSOR_BYTES, field_name
from holdall.storage.saved_store import (
    ROWS,
    Like,
    SavedStore,
    pack_logs,
    pack_rows,
    require_kind,
    unpack_logs,
    unpack_rows,
)
from holdall.storage.segment import Segments
from holdall.storage.slices import NEXT_IS_WHOLE, AnyPart, ClosedPart, Segment, Window
from holdall.storage.snapshot import RowChunk, rows_of

_MOST_SEGMENT_ROWS = 2**20


class Store(SavedStore):
    """All fields of a memory. Not locked: the memory that owns it is."""

    def forget_before(self, tick: int) -> None:
        """Drop the ticks before one."""
        self._not_before = max(self._not_before, min(tick, self.next_tick))
        self._evict_before(self._not_before)

    def require(self, segment: SealedSegment) -> None:
        """Refuse a segment that `adopt` would refuse."""
        segment.require(self._lanes, self._large, self.reward_dtype)

    def adopt(self, segment: SealedSegment) -> int:
        """Take over a segment that was sealed elsewhere as the newest ticks; return the number of its first one.

        A store of one lane takes over the lanes of a segment one after another, tick by tick: row r of it becomes tick
        first + r. Its slices stay as they came. The oldest ticks leave if the store is full.
        """
        self.require(segment)
        if segment.lanes != self._lanes:
            segment = segment.in_one_lane()
        rings, first, ticks = self._rings, self.next_tick, segment.rows.ticks
        self.fast_tick.end()
        self.forget_before(min(first, first + ticks - self._capacity_ticks))  # before anything is written over it
        for frozen in self._snapshots.pending:
            frozen.before_ticks(first, first + ticks)
        rings.pair(max(self.first_tick, first + 2 - self._ring_ticks), first)
        staying = max(self.first_tick, first + ticks - self._capacity_ticks)
        rings.count_invalid(staying, first)  # while the ticks that leave are still there
        held = min(ticks, self._capacity_ticks)
        columns = {name: column[ticks - held :] for name, column in segment.rows.columns.items()}
        rings.begin(columns["reward.0"].dtype, has_invalid="invalid.0" in columns)
        rings.put(first + ticks - held, columns, {})
        restore = self._restoring()
        self.repair.begin(lambda: restore() if self.next_tick == first else None)
        if self._large:
            self.large_segments.adopt(first, ticks, segment.parts, [columns[f"cursors.{i}"] for i in self._large])
        self._writer.next_tick = first + ticks
        self.repair.end()
        self._settle(may_evict=True)
        self._evict_before(self.next_tick - self._capacity_ticks)
        return first

    def segment_at(self, tick: int) -> SealedSegment:
        """Return the segment that holds a tick, from its first tick that is held on, as one that another can adopt.

        Walk over all of them by asking for `first_tick`, and then for the tick behind the last of each.
        """
        first, end = tick, min(self.next_tick, tick + self.chunk_ticks)
        parts: list[ClosedPart] = []
        if self._large:
            found = self._segment_at(tick)
            first, end = max(found.first_tick, self.first_tick), found.first_tick + found.ticks
            fields = sorted(range(len(found.parts)), key=lambda field: self._large[field])
            parts = [_travelling(found.parts[field], self._kernels.coder) for field in fields]
        columns = self._rings.copy(first, end)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            columns[f"cursors.{i}"] = rows_of(cursors, first, end)
        return SealedSegment(RowChunk(first, end - first, columns, {}), tuple(parts))

    def _segment_at(self, tick: int) -> Segment[ClosedPart]:
        """Return the segment of large fields that holds a tick, as it stands."""
        segments = self.large_segments
        number = int(np.searchsorted(segments.index.first_ticks, tick, side="right")) - 1
        if number < len(segments.closed):
            return segments.closed[number]
        parts, first = [part.closed() for part in segments.open.parts], segments.open.first_tick
        return Segment(first, self.next_tick - first, parts)

    @property
    def segments(self) -> int:
        """Segments held, the open one among them."""
        return len(self.large_segments.closed) + 1 if self._large else 0

    @property
    def backlog(self) -> int:
        """Blocks that wait to be sealed or spilled."""
        return 0 if self.sealer is None else self.sealer.backlog

    @property
    def failure(self) -> str:
        """What went wrong last when blocks were sealed or spilled."""
        return "" if self.sealer is None else self.sealer.failure

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(_disk_bytes(self.large_segments, field) for field in range(len(self._large)))

    def report(self) -> list[FieldReport]:
        """Account for every field."""
        held, observed = (self.next_tick - self.first_tick) * self._lanes, []
        touched = min(self.next_tick - self._begun_at, self._ring_ticks) * self._lanes
        kept = min(self.next_tick, self._capacity_ticks) * self._lanes  # also of ticks that left early
        for i, leaf in enumerate(self._schema.observation.leaves):
            name, plain, ring = field_name("obs", leaf), 2 * held * leaf.nbytes, self._rings.small.get(i)
            if ring is None:
                field = self._large.index(i)
                found = _field_report(self.large_segments, field, name, plain, touched)
                why = "" if self.sealer is None else self.sealer.reason(field)
                observed.append(replace(found, finding=f"{found.finding}: {why}") if why else found)
            else:
                observed.append(FieldReport(name, 0, 0, ring.bytes_of(touched), plain, ring.describe(kept)))
        return observed + self._rings.report(held, touched)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, under the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            small = self._rings.small.get(i)
            held = _field_arrays(self.large_segments, self._large.index(i)) if small is None else small.arrays()
            found += [(field_name("obs", leaf), array) for array in held]
        return found + self._rings.arrays() + [("spare", array) for array in self.large_segments.arenas.spare]


def _disk_bytes(segments: Segments, field: int) -> int:
    """Count the bytes of one field on disk; a block counts once, however many segments name it."""
    blocks = {id(s.parts[field].block): s.parts[field].block for s in segments.closed}
    return sum(block.sealed.disk_bytes for block in blocks.values() if block.sealed is not None)


def _field_report(segments: Segments, field: int, name: str, plain_bytes: int, cursors: int) -> FieldReport:
    """Say where the bytes of one large field are."""
    closed = {id(s.parts[field].block): s.parts[field].block for s in segments.closed}
    part, parts = segments.open.parts[field], segments.parts(field)
    blocks = [block for key, block in closed.items() if key != id(part.block)]
    raw = part.used_bytes + sum(block.used_bytes for block in blocks if block.sealed is None)
    sealed = sum(block.used_bytes for block in blocks if block.sealed is not None)
    log = sum(part.log_bytes for part in parts) + cursors * CURSOR_BYTES
    newest = part.window if part.steps or not segments.closed else segments.closed[-1].parts[field].window
    finding = describe_parts(parts, newest)
    return FieldReport(name, raw + sealed, log, 0, plain_bytes, finding, sealed, _disk_bytes(segments, field))


def _field_arrays(segments: Segments, field: int) -> list[Array]:
    """Return the arrays that one large field lies in; an arena that two segments name comes once."""
    parts, direct = segments.parts(field), segments.open.parts[field]
    logs: list[Array] = [part.log for part in parts if part.log is not None]
    blocks = {id(part.block): part.block for part in parts if part.block is not None}
    slices = [array for block in blocks.values() for array in block.arrays()]
    return [*slices, *logs, segments.cursors[field], *([direct.slices] if direct.block is None else [])]


def describe_parts(parts: Sequence[AnyPart], window: Window) -> str:
    """Say what was found about a field by its parts, the open one last, for people."""
    found = window.describe()
    fitting = [part for part in parts if part.window == window]
    steps = sum(part.steps for part in fitting)
    if window.count > 1 and steps:
        shared = max(window.count - sum(part.new_slices for part in fitting) / steps, 0.0)
        found = f"{found}; {shared:.1f} of {window.count} slices shared"
    closed = [part for part in parts if isinstance(part, ClosedPart)]
    sealed = [part.block.sealed for part in closed if part.block.sealed is not None]
    if not sealed:
        return found
    kinds = sorted({each.codec.describe() for each in sealed})
    return f"{found}; {len(sealed)} of {len(closed)} segments sealed by {', '.join(kinds)}"


# ---------------------------------------------------------------- segments that travel


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A run of ticks that can be moved: to another machine, to a journal, to another store.

    It refers to nothing outside of itself but the dictionaries of its codecs. `Store.segment_at` and writers make it,
    `pack_segment` and `unpack_segment` turn it into bytes and back, `Store.adopt` takes it over.

    The columns of `rows` are named as a store names its own, each (ticks, lanes, ...): `action.0`, `extras.0`,
    `reward.0`, `terminated.0`, `truncated.0`; `invalid.0` only if a lane made no transition; `cursors.3` for an
    observation leaf that lies in slices, `obs.0` and `next.0` for one that does not. Nothing is kept apart.
    """

    rows: RowChunk
    parts: tuple[ClosedPart, ...]  # by large leaf, in the order of the leaves: window, log (entries, lanes), block

    @property
    def lanes(self) -> int:
        """Lanes that advanced together."""
        return int(self.rows.columns["terminated.0"].shape[1])

    @property
    def large(self) -> tuple[int, ...]:
        """The observation leaves that lie in slices."""
        return _large_leaves(self.rows.columns)

    def require(self, lanes: int, large: Sequence[int], reward_dtype: np.dtype[Any] | None) -> None:
        """Refuse to be adopted by a store of other fields; one of a single lane takes any number of lanes."""
        dtype = self.rows.columns["reward.0"].dtype
        if reward_dtype is not None and reward_dtype != dtype:
            raise ArgumentError(
                f"reward has dtype {dtype}, the first add had {reward_dtype}; holdall never casts, so have every "
                f"writer pass np.asarray(reward, dtype=np.{reward_dtype.name})"
            )
        if self.large != tuple(large) or lanes not in (1, self.lanes):
            raise ArgumentError(
                f"a segment of {self.lanes} lanes whose leaves {self.large} are large came to a store of {lanes} lanes "
                f"whose leaves {tuple(large)} are; make both of the same schema"
            )

    def in_one_lane(self) -> SealedSegment:
        """Return the same transitions one after another: row r was tick r // lanes in lane r % lanes."""
        rows, lanes = self.rows.ticks * self.lanes, self.lanes
        columns = {name: column.reshape(rows, 1, *column.shape[2:]) for name, column in self.rows.columns.items()}
        parts = []
        for i, part in zip(self.large, self.parts, strict=True):
            log: Any = part.log
            entries = np.arange(lanes, dtype=np.uint32) * np.uint32(len(log))
            columns[f"cursors.{i}"] = (self.rows.columns[f"cursors.{i}"] + entries).reshape(rows, 1)
            parts.append(replace(part, log=np.ascontiguousarray(log.T).reshape(-1, 1), log_rows=log.size))
        return SealedSegment(RowChunk(self.rows.first_tick * lanes, rows, columns, {}), tuple(parts))


def _travelling(part: ClosedPart, coder: Coder) -> ClosedPart:
    """Return a part with a log and with sealed slices in memory, whatever it has."""
    block, log = part.block, part.log
    if log is None:
        lanes = part.slice_count // max(part.log_rows, 1)
        log = np.arange(part.slice_count, dtype=np.uint32).reshape(part.log_rows, lanes)
    sealed = block.sealed
    if sealed is None:
        raw = block.arena[: part.slice_count * block.slice_bytes].reshape(part.slice_count, block.slice_bytes)
        sealed = coder.seal(raw, stored(block.slice_bytes))
    if sealed is None:
        raise DamageError("slices could not be stored as they are; report this")
    carried = CarriedSlices(sealed.coded.in_memory())
    return replace(part, log=log, block=KeptBlock(block.slice_bytes, carried.count, carried))


def pack_segment(segment: SealedSegment, coder: Coder) -> bytes:
    """Return a segment as bytes: the records that a checkpoint has of it, one after another.

    These are its rows, its logs, and the slices of every large leaf. Dictionaries are records of their own, by name.
    """
    records = [pack_rows(segment.rows, compresses=False), pack_logs(segment.parts, compresses=False)]
    for part in segment.parts:
        if part.block.sealed is None:
            raise TypeError("the slices of a segment that travels are sealed")
        coded = part.block.sealed.coded
        records.append(pack_slices(coded, coder.checksums(np.asarray(coded.data), coded.offsets)))
    return b"".join(buffer for record in records for buffer in record)


def unpack_segment(
    payload: bytes, schema: Schema, dictionaries: Mapping[str, Dictionary], coder: Coder
) -> SealedSegment:
    """Read a segment that was received; DamageError if anything in it does not make sense.

    Every checksum is computed and every number held against the others, so whatever was sent, reading the result
    stays within it. Its lanes may be any number, whatever the schema says of its own.
    """

    def read(start: int, nbytes: int) -> bytes:
        return payload[start : start + nbytes]

    with malformed_refused("a segment"):
        rows, logs, *slices = records_in(payload)
        require_kind(rows, ROWS, read)
        like = _columns_like(rows.head["columns"], schema)
        ticks, first_tick = rows.head["ticks"], counted(rows.head["first_tick"])
        lanes = like["terminated.0"][0][0]
        if type(ticks) is not int or not 1 <= ticks * lanes <= _MOST_SEGMENT_ROWS:
            raise DamageError(f"a segment claims {ticks!r} ticks of {lanes} lanes; nothing of it is used")
        chunk = unpack_rows(rows, read, first_tick, ticks, like)
        leaves = [schema.observation.leaves[i] for i in _large_leaves(like)]
        coded = [unpack_slices_whole(record, read, dictionaries, coder) for record in slices]
        blocks = [KeptBlock(each.codec.transform.slice_bytes, each.count, CarriedSlices(each)) for each in coded]
        segment = SealedSegment(chunk, tuple(unpack_logs(logs, read, lanes, leaves, blocks)))
        for i, part in zip(segment.large, segment.parts, strict=True):
            _require_within(part, chunk.columns[f"cursors.{i}"])
    return segment


def records_in(payload: bytes) -> Iterator[Record]:
    """Read the heads of records that stand one after another."""
    start = 0
    while start < len(payload):
        record = unpack(lambda first, nbytes: payload[first : first + nbytes], start, len(payload))
        yield record
        start += record.nbytes


def _columns_like(described: Any, schema: Schema) -> Like:
    """Return what the columns of a segment must be, where only lanes, large leaves and the reward's dtype are free."""
    found = {name: (dtype_of(dtype), shape) for name, dtype, shape in described}
    (lanes,) = {counted(shape[0]) for _, shape in found.values()}
    large = _large_leaves(found)
    flag, cursor = Leaf("", (), np.dtype(np.bool_)), Leaf("", (), np.dtype(np.uint32))
    leaves = {f"action.{i}": leaf for i, leaf in enumerate(schema.action.leaves)}
    leaves |= {f"extras.{i}": leaf for i, leaf in enumerate(schema.extras.leaves)}
    leaves |= {"reward.0": schema.reward_leaf(found["reward.0"][0]), "terminated.0": flag, "truncated.0": flag}
    leaves |= {"invalid.0": flag} if "invalid.0" in found else {}
    for i, leaf in enumerate(schema.observation.leaves):
        leaves |= {f"cursors.{i}": cursor} if i in large else {f"obs.{i}": leaf, f"next.{i}": leaf}
    return {name: ((lanes, *leaf.shape), leaf.dtype) for name, leaf in leaves.items()}


def _large_leaves(columns: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(int(name.removeprefix("cursors.")) for name in columns if name.startswith("cursors.")))


def _require_within(part: ClosedPart, cursors: NDArray[np.uint32]) -> None:
    """Refuse cursors that point outside the log, and a log that points outside the block."""
    window, log = part.window, part.log
    start = (cursors & ~NEXT_IS_WHOLE).astype(np.int64)
    end = start + window.count + np.where(cursors & NEXT_IS_WHOLE, window.count, window.shift)
    if log is None or log.size >= NEXT_IS_WHOLE or end.max() > len(log) or int(log.max()) >= part.slice_count:
        raise DamageError("a segment points outside itself; nothing of it is used")

"""All that a store holds at once: taken over from elsewhere, handed out, rewritten, accounted for.

    freeze()         all of it at one moment, for checkpoints and pickles; `thaw` and `take_rows` take it over
    adopt(segment)   ticks that were sealed elsewhere; `segment_at` hands such out

A shard is a store of one lane that only adopts: a transition's id is the number of its row there. A segment that
travels, over the network or to a journal, is bytes: the records that a checkpoint has of it, one after another.
Invariant: a segment refers to nothing outside of itself but dictionaries, by name. Nothing that was received is
trusted: every checksum is computed, and every number is held against the others before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError
from holdall.json_state import counted, dtype_of, malformed_refused
from holdall.report import FieldReport
from holdall.schema import Array, Leaf, Schema
from holdall.storage.blocks import CarriedSlices, Coder, KeptBlock, SliceBlock
from holdall.storage.codec import Dictionary, stored
from holdall.storage.layout import field_layouts
from holdall.storage.records import (
    ROWS,
    Like,
    pack_logs,
    pack_rows,
    pack_slices,
    records_in,
    require_kind,
    unpack_logs,
    unpack_rows,
    unpack_slices_whole,
)
from holdall.storage.rings import field_name
from holdall.storage.slices import NEXT_IS_WHOLE, ClosedPart
from holdall.storage.snapshot import (
    FrozenRows,
    FrozenStore,
    FullBlock,
    Ring,
    RowChunk,
    StoreContent,
    chunk_ticks_of,
    chunks_of,
    last_rows,
    put_rows,
    rows_of,
)
from holdall.storage.tick_store import TickStore

_MOST_SEGMENT_ROWS = 2**20


class Store(TickStore):
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
            found = self.large_segments.segment_at(tick, self.next_tick)
            first, end = max(found.first_tick, self.first_tick), found.first_tick + found.ticks
            fields = sorted(range(len(found.parts)), key=lambda field: self._large[field])
            parts = [_travelling(found.parts[field], self._kernels.coder) for field in fields]
        columns = self._rings.copy(first, end)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            columns[f"cursors.{i}"] = rows_of(cursors, first, end)
        return SealedSegment(RowChunk(first, end - first, columns, {}), tuple(parts))

    def set_flags(self, ids: NDArray[np.int64], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Overwrite how transitions ended."""
        self.flags_changed += 1
        self.rewrite(*last_rows(ids, {"terminated.0": terminated, "truncated.0": truncated}))

    def rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        """Write rows of some columns again; they are copies, see `last_rows`, since the next call may have to do so."""
        self.rewrites += 1
        self.repair.do(partial(self._rewrite, ids, columns))

    def _rewrite(self, ids: NDArray[np.int64], columns: Mapping[str, Any]) -> None:
        self._snapshots.before_rewrite(ids, tuple(columns), self.chunk_ticks)
        self._rings.rewrite(ids, columns)

    def content(self) -> StoreContent:
        """Return all but the rows, sharing memory with the store; what is added later does not change it."""
        segments = self.large_segments.freeze(self.next_tick)
        held = [segment for segment in (*segments.closed, segments.open) if segment.ticks and self._large]
        return StoreContent(**self._described(), windows=segments.windows, segments=held, searches=segments.searches)

    def _described(self) -> dict[str, Any]:
        """All that is neither rows nor segments."""
        shared = {i: ring for i, ring in self._rings.small.items() if ring.is_shared}
        return {
            "first_tick": self.first_tick, "next_tick": self.next_tick, "large": list(self._large),
            "newest": {i: ring.newest_next(self.next_tick) for i, ring in shared.items() if self.next_tick},
            "paired": [i for i in self._rings.small if i not in shared],
            "scouts": {str(i): scout.state() for i, scout in self._rings.scouts.items()},
            "reward_dtype": self.reward_dtype, "has_invalid": self._rings.invalid is not None,
        }  # fmt: skip

    def rows(self) -> list[RowChunk]:
        """Return the rows of all ticks held, in order, sharing memory with the rings."""
        return chunks_of(self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self._lanes)

    def freeze(self, saved: Mapping[int, tuple[int, tuple[str, ...]]]) -> FrozenStore:
        """Return what is held now; `release` when its rows were read.

        Args:
            saved: Chunks of rows that are not needed, by number: the version and the columns in which they were saved.
        """
        rows, versions = self._snapshots.freeze(
            self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self.chunk_ticks, saved
        )
        if rows.is_pending:
            self.fast_tick.end()
        segments = self.large_segments.freeze(self.next_tick) if self._large else None
        held = self._described() | {"transitions": self.transitions}
        return FrozenStore(**held, rows=rows, versions=versions, segments=segments)

    def take_again(self, rows: FrozenRows, number: int, version: int) -> RowChunk | None:
        """Return a chunk of a snapshot's rows that was thought to be saved; None if it was written over since."""
        return self._snapshots.take_again(rows, number, version, self.next_tick)

    def release(self, rows: FrozenRows) -> None:
        """Forget a snapshot whose rows were read, or are not wanted any more."""
        self._snapshots.release(rows)

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks of large fields that are not known yet nor about to be sealed, newest first."""
        full = self.large_segments.full_blocks(is_known) if self._large else []
        return [block for block in full if not self._tiers.is_changing(block.block)]

    def thaw(self, content: StoreContent, rows: Iterable[RowChunk] = ()) -> None:
        """Take over what was frozen, in a store as it was made; more rows may follow with `take_rows`, oldest first."""
        leaves = self._schema.observation.leaves
        self._not_before = self._begun_at = content.first_tick
        self._large = list(content.large)
        self._writer = self._new_writer(content.first_tick, content.next_tick)
        rings = self._rings
        rings.keep(i for i in range(len(leaves)) if i not in self._large)
        self._budget.choose(field_layouts(self._schema, self._ring_ticks, self._large))  # it may be another than here
        sliced = [leaves[i] for i in self._large]
        self.large_segments.thaw(self.next_tick, sliced, content.windows, content.segments, content.searches)
        self._settle(may_evict=True)
        rings.thaw(self.next_tick, self.first_tick, content.newest, content.paired, content.scouts)
        if content.reward_dtype is not None:
            rings.begin(content.reward_dtype, has_invalid=content.has_invalid)
        for chunk in rows:
            self.take_rows(chunk)

    def take_rows(self, chunk: RowChunk) -> None:
        """Take over the rows of some ticks; those that this store would not hold any more are passed over."""
        held = chunk.since(self.first_tick, self._lanes)
        if held is None:
            return
        self.batch_reader.end()
        self._rings.put(held.first_tick, held.columns, held.apart)
        for i, cursors in zip(self._large, self.large_segments.cursors, strict=True):
            put_rows(cursors, held.first_tick, held.columns[f"cursors.{i}"])
        self._pack(held.first_tick + held.ticks)

    @property
    def chunk_ticks(self) -> int:
        """Ticks whose rows are written to a checkpoint as one chunk."""
        return chunk_ticks_of(sum(prod(ring.shape[1:]) * ring.dtype.itemsize for ring in self._columns().values()))

    def columns_like(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Return the shape and dtype of one tick of every column."""
        return {name: (ring.shape[1:], ring.dtype) for name, ring in self._columns().items()}

    def _columns(self) -> dict[str, Ring]:
        """All rings by name, those of cursors too: what a chunk of rows consists of."""
        cursors = zip(self._large, self.large_segments.cursors, strict=True)
        return self._rings.columns() | {f"cursors.{i}": ring for i, ring in cursors}

    @property
    def segments(self) -> int:
        """Segments held, the open one among them."""
        return self.large_segments.count if self._large else 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(self.large_segments.disk_bytes(field) for field in range(len(self._large)))

    def report(self) -> list[FieldReport]:
        """Account for every field."""
        held, observed = (self.next_tick - self.first_tick) * self._lanes, []
        touched = min(self.next_tick - self._begun_at, self._ring_ticks) * self._lanes
        kept = min(self.next_tick, self._capacity_ticks) * self._lanes  # also of ticks that left early
        for i, leaf in enumerate(self._schema.observation.leaves):
            name, plain, ring = field_name("obs", leaf), 2 * held * leaf.nbytes, self._rings.small.get(i)
            if ring is None:
                field = self._large.index(i)
                found, why = self.large_segments.report(field, name, plain, touched), self.sealer.reason(field)
                observed.append(replace(found, finding=f"{found.finding}: {why}") if why else found)
            else:
                observed.append(FieldReport(name, 0, 0, ring.bytes_of(touched), plain, ring.describe(kept)))
        return observed + self._rings.report(held, touched)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, under the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            small = self._rings.small.get(i)
            held = self.large_segments.arrays(self._large.index(i)) if small is None else small.arrays()
            found += [(field_name("obs", leaf), array) for array in held]
        return found + self._rings.arrays() + [("spare", array) for array in self.large_segments.arenas.spare]


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

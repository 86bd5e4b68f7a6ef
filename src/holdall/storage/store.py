"""The store, whole: how rows are read and written again, what it adopts and hands out, and what it accounts for.

    read(ids)        rows of small fields, and places of large ones
    rewrite(ids)     flags and extras of transitions that are held
    content()        all of it, for pickles, sharing memory with the store
    adopt(segment)   ticks that were sealed elsewhere; `segment_at` hands such out
    report()         where the bytes of every field are

A shard is a store of one lane that only adopts: a transition's id is the number of its row there. A segment that
travels, over the network or to a journal, is a `SealedSegment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError, HoldallError
from holdall.report import FieldReport, field_name
from holdall.schema import Array, Bytes
from holdall.storage.batch_source import BatchReader, BatchSource, Places, Rows, RowSources, RowTable, fresh_bytes
from holdall.storage.blocks import KeptBlock, SliceBlock
from holdall.storage.codec import describe
from holdall.storage.rings import CURSOR_BYTES
from holdall.storage.sealed_segment import SealedSegment, travelling
from holdall.storage.segment import Segments
from holdall.storage.slices import AnyPart, ClosedPart, Cursors, FrozenBlock, Segment, Window
from holdall.storage.snapshot import Apart, FrozenRows, LiveRows, Ring, RowChunk, StoreContent, put_rows, rows_of
from holdall.storage.tick_store import TickStore
from holdall.storage.ticks import StepsLeft
from holdall.storage.tiers import NO_LIMIT


class FullBlock(NamedTuple):
    """A block that takes no more slices, in the form in which it stays for now."""

    block: SliceBlock
    is_direct: bool  # its slices lie in memory in place of a log


class StoreSegments(Segments):
    """The segments of a whole store: others are adopted, and runs of ticks written."""

    @property
    def ticks_in_a_piece(self) -> int:
        """How many ticks of an `extend` are written before one looks whether the sealer keeps up."""
        return max(1, self._limit_bytes // (16 * self.most_in_a_tick))

    def adopting(
        self, tick: int, ticks: int, parts: Sequence[ClosedPart], cursors: list[Cursors], *, lists_blocks: bool
    ) -> Callable[[], None]:
        """Return what takes a segment over that was sealed elsewhere, as the newest, from `tick` on.

        What may fail comes before. The action gives the same however often it is run, and copies nothing that grows.

        Args:
            cursors: Of its last ticks, field by field: as many as are still needed.
            lists_blocks: Whether its blocks, which are its own, are among those that `take_frozen` returns.
        """
        if tick > self.open.first_tick:
            self._repair.begin(self._repair.restoring(*self.changing()))
            self._roll(tick)
            self._repair.end()
        adopted = []
        for part in parts:
            if part.block.sealed is None:
                raise DamageError("a segment came whose slices are not sealed; report this")
            sealed = self._kernels.coder.adopt(part.block.sealed.coded)
            adopted.append(replace(part, block=KeptBlock(part.block.slice_bytes, part.block.used, sealed)))
        frozen = [self._as_frozen(field, part.window, part.block) for field, part in enumerate(adopted)]
        frozen = [*self.frozen, *frozen] if lists_blocks else self.frozen
        overhead = self.overhead_bytes + sum(part.overhead_bytes for part in adopted)
        return partial(self._append, len(self.closed), Segment(tick, ticks, adopted), cursors, frozen, overhead)

    def _append(
        self, number: int, adopted: Segment[ClosedPart], cursors: list[Cursors], frozen: list[FrozenBlock],
        overhead_bytes: int,
    ) -> None:  # fmt: skip
        """Have an adopted segment behind the first `number` closed ones, whatever is there."""
        end = adopted.first_tick + adopted.ticks
        for ring, rows in zip(self.cursors, cursors, strict=True):
            put_rows(ring, end - len(rows), rows)
        self.closed[number:] = [adopted]
        for part in adopted.parts:
            self._naming[id(part.block)] = [adopted]
        self.frozen, self.overhead_bytes, self._sure_until = frozen, overhead_bytes, 0
        self.open = Segment(end, 0, self.open.parts)
        self.index.put_behind(number, end, adopted.parts, self.open.parts)


class Store(TickStore):
    """All fields of a memory. Not locked: the memory that owns it is."""

    _table: RowTable | None = None
    segments_kind = StoreSegments
    large_segments: StoreSegments

    @cached_property
    def batch_reader(self) -> BatchReader:
        """A short way to draw batches; made with the first one."""
        staging = self._budget.staging_bytes // 2  # the rest: other batches
        threads = self._budget.threads
        return self._kernels.new_batch_reader(self._lock, self.repair, self.large_segments.index, staging, threads)

    @property
    def held(self) -> tuple[int, int]:
        """The first id that is held, and the one behind the last."""
        return self.first_tick * self._lanes, self.next_tick * self._lanes

    @property
    def row_table(self) -> RowTable:
        """How rows are copied from rings: another object when fields lie elsewhere."""
        table, cursors = self._table, self.large_segments.cursors
        if table is None or not table.fits(self._rings, cursors):
            table = self._table = RowTable(self._rings, cursors)
        return table

    def read(self, ids: NDArray[np.int64], take: Callable[[int], Bytes] = fresh_bytes) -> Rows:
        """Copy the small fields of `ids`, all of them held, and find the large ones.

        Args:
            take: Returns memory for the copies, from an aligned address on; see `BlockPool.take`.
        """
        held, large, table = self.held, tuple(self._large), self.row_table
        segments, wanted = self.large_segments, ids if ids.flags.carray else ids.copy()
        columns = table.read(self._kernels, wanted, held, take)
        found = partial(Places.found, self._kernels, segments, wanted)
        places = found(columns[-len(large) :], self._lanes) if large else None
        return table.rows(columns, large, places)

    def offer_batches(self, rows: int) -> None:
        """Have batches of up to so many rows drawn in one call from now on, if there is such a way."""
        segments, reader = self.large_segments, self.batch_reader
        if segments.blocks_on_disk or self._rings.reward is None or not reader.needs(rows):
            return
        ticks = max(self._not_before, self._first_large), self._capacity_ticks
        reader.offer(BatchSource.of(self.sources(), self._rings, self._writer, ticks), rows)

    def sources(self) -> RowSources:
        """Return what batches are read from, as it is now."""
        held, segments, table = self.held, self.large_segments, self.row_table
        cursors, index = segments.cursors, segments.index
        rows, large, kept = self._ring_ticks * self._lanes, tuple(self._large), tuple(index.held)
        return RowSources(table, held, rows, large, cursors, index.first_ticks, index.records, kept)

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell real transitions from lanes that made none."""
        return self._rings.are_valid(ids)

    def are_ends(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell the last transitions of episodes."""
        return np.asarray(np.logical_or(*self._rings.flags(ids)))

    def rewards(self, ids: NDArray[np.int64]) -> Array:
        """Copy the rewards of `ids`, of any shape."""
        return self._rings.rewards(ids)

    def outcomes(self, ids: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy rewards and flags of `ids`, of any shape."""
        return self._rings.rewards(ids), *self._rings.flags(ids)

    def extra(self, number: int, ids: NDArray[np.int64]) -> Array:
        """Copy one extra of `ids`, of any shape."""
        return self._rings.extra(number, ids)

    @property
    def all_valid(self) -> bool:
        """Whether every lane made a transition in every tick held."""
        return self._rings.invalid is None or self._rings.count_invalid(self.first_tick, self.next_tick) == 0

    def write_steps(self, left: StepsLeft, first: int) -> None:
        """Write the step `first`, and those behind it that need nothing done in between."""
        (written, sliced), segments, writer = (0, None), self.large_segments, self._writer
        if writer.has_runs and left.steps.valid is None and not (self._snapshots.pending or segments.searches.scouts):
            most = segments.ticks_in_a_piece if self.sealer is not None and self.sealer.waiting else NO_LIMIT
            written, sliced = left.write_run(first, writer, self._rings, segments, self._large, most)
        if not written:
            self.write(left.steps.cut(first))
        elif sliced is not None:
            self.after_write(sliced)
        self._pack(self.next_tick)

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits for the sealer that no tick should come."""
        return self.sealer is not None and self.sealer.is_crowded(self.large_segments.open_bytes())

    def relieve(self, nbytes: int) -> None:
        """Hold that much less as the worker gets to it: raw blocks are sealed and spilled, and nothing is evicted."""
        if self.large_segments.frozen:  # a load left it for later
            self._settle(may_evict=False)
        self._change(lambda: self._tiers.relieve(nbytes))
        self._settle(may_evict=False)

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
        return StoreContent(**self._content([part.closed() for part in self.large_segments.open.parts]))

    def rows(self) -> list[RowChunk]:
        """Return the rows of all ticks held, in order, sharing memory with the rings."""
        return chunks_of(self._columns(), self._rings.apart(), self.first_tick, self.next_tick, self._lanes)

    def take_again(self, rows: FrozenRows, number: int, version: int) -> RowChunk | None:
        """Return a chunk of a snapshot's rows that was thought to be saved; None if it was written over since."""
        return self._snapshots.take_again(rows, number, version, self.next_tick)

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks of large fields that are not known yet nor about to be sealed, newest first."""
        full = _full_blocks(self.large_segments, is_known) if self._large else []
        return [block for block in full if not self._tiers.is_changing(block.block)]

    def forget_before(self, tick: int) -> None:
        """Drop the ticks before one."""
        self._end_batches()
        self._not_before = max(self._not_before, min(tick, self.next_tick))
        self._evict_before(self._not_before)

    def require(self, segment: SealedSegment) -> None:
        """Refuse a segment that `adopt` would refuse."""
        segment.require(self._lanes, self._large, self.reward_dtype)

    def adopt(self, segment: SealedSegment) -> int:
        """Take over a segment that was sealed elsewhere as the newest ticks; return the number of its first one.

        A store of one lane takes over the lanes of a segment one after another, tick by tick: row r of it becomes tick
        first + r. Its slices stay as they came. The oldest ticks leave if the store is full. After an interrupt,
        `repair.run` or the next call ends what was begun, and `next_tick` says whether the segment is there.
        """
        self.repair.run()
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
        take_over, may_leave = (lambda: None), self._budget.limit is not None or self._folder is not None
        if self._large:
            cursors = [columns[f"cursors.{i}"] for i in self._large]
            take_over = self.large_segments.adopting(first, ticks, segment.parts, cursors, lists_blocks=may_leave)
        self.repair.do(partial(self._take_over, take_over, first + ticks))
        if may_leave:  # to disk, or early; otherwise nothing becomes of blocks that are sealed
            self._settle(may_evict=True)
        self._evict_before(self.next_tick - self._capacity_ticks)
        return first

    def _take_over(self, take_over: Callable[[], None], next_tick: int) -> None:
        take_over()
        self._writer.next_tick = next_tick

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
            parts = [travelling(found.parts[field], self._kernels.coder) for field in fields]
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
        kept = [max(0, self.next_tick - self._capacity_ticks), self.next_tick]  # also ticks that left early
        for i, leaf in enumerate(self._schema.observation.leaves):
            name, plain, ring = field_name("obs", leaf.name), 2 * held * leaf.nbytes, self._rings.small.get(i)
            if ring is None:
                field = self._large.index(i)
                found = _field_report(self.large_segments, field, name, plain, touched)
                why = "" if self.sealer is None else self.sealer.reason(field)
                observed.append(replace(found, finding=f"{found.finding}: {why}") if why else found)
            else:
                observed.append(FieldReport(name, 0, 0, ring.bytes_of(touched), plain, ring.describe(*kept)))
        return observed + self._rings.report(held, touched)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, under the name that `report` gives its field."""
        found: list[tuple[str, Array]] = []
        for i, leaf in enumerate(self._schema.observation.leaves):
            small = self._rings.small.get(i)
            held = _field_arrays(self.large_segments, self._large.index(i)) if small is None else small.arrays()
            found += [(field_name("obs", leaf.name), array) for array in held]
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
    kinds = sorted({describe(each.codec) for each in sealed})
    return f"{found}; {len(sealed)} of {len(closed)} segments sealed by {', '.join(kinds)}"


def _full_blocks(segments: Segments, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
    """Return the blocks that are full, newest first, back to a segment that is known."""
    found: dict[int, FullBlock] = {}
    filling = {id(part.block) for part in segments.open.parts}
    for segment in reversed(segments.closed):
        new = [part for part in segment.parts if id(part.block) not in filling and not is_known(part.block)]
        if not new:
            break
        found |= {id(part.block): FullBlock(part.block, part.log is None) for part in new}
    return list(found.values())


def chunks_of(
    columns: Mapping[str, Ring], apart: Mapping[str, Apart], first_tick: int, next_tick: int, lanes: int
) -> list[RowChunk]:
    """Return the rows of ticks [first_tick, next_tick) as views of rings, where they stand there: one or two chunks."""
    ring_ticks = len(next(iter(columns.values())))
    wrap = min(next_tick, first_tick - first_tick % ring_ticks + ring_ticks)
    return [
        RowChunk(
            first,
            end - first,
            {name: _view(ring, first, end) for name, ring in columns.items()},
            {name: rows.between(first * lanes, end * lanes) for name, rows in apart.items()},
        )
        for first, end in ((first_tick, wrap), (wrap, next_tick))
        if end > first
    ]


def _view(ring: Ring, first: int, end: int) -> Array:
    return ring.view(first, end) if isinstance(ring, LiveRows) else ring[first % len(ring) :][: end - first]


def last_rows(ids: NDArray[np.int64], columns: Mapping[str, Any]) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return every id once, and copies of the last rows that each has."""
    unique, from_the_end = np.unique(ids[::-1], return_index=True)
    last = len(ids) - 1 - from_the_end
    return unique, {name: rows[last] for name, rows in columns.items()}


class UnchangedStore:
    """Refuses to be pickled once its store was written to: what was written before is not of one moment then."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._next_tick, self._rewrites = store.next_tick, store.rewrites

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        store = self._store
        if (store.next_tick, store.rewrites) != (self._next_tick, self._rewrites):
            raise HoldallError(
                f"the memory was added to while it was pickled ({store.next_tick - self._next_tick} ticks, and "
                f"{store.rewrites - self._rewrites} updates), so what was written is not one moment; throw it away, "
                "hold the threads that write, and save again"
            )
        return bool, ()

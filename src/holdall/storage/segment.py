"""Segments: the large observation fields of all ticks, one run of ticks after another.

In:  observations and next observations of all lanes, tick by tick, and segments that another process compressed.
Out: locations from which kernels read observations, detected windows, and blocks that are full or evicted.
Guarantee: a closed segment never changes, except for the form of its blocks. A location that was handed out keeps
referring to the form that the block had then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.report import FieldReport
from holdall.schema import Array, Bytes, Leaf
from holdall.storage.batch_source import RECORD_FIELDS, Held, read_tick
from holdall.storage.blocks import CarriedSlices, KeptBlock, SealedSlices, SegmentFile, SliceBlock, reserve
from holdall.storage.codec import describe
from holdall.storage.repair import Repair
from holdall.storage.rings import CURSOR_BYTES
from holdall.storage.slices import (
    AnyPart,
    ClosedPart,
    FrozenBlock,
    OpenPart,
    Segment,
    Window,
    WindowSearches,
    lies_direct,
)
from holdall.storage.snapshot import put_rows
from holdall.storage.ticks import Kernels, SlicedTick

if TYPE_CHECKING:
    from holdall.storage.slices import Cursors

SEGMENT_BYTES = 16 * 2**20
"""Bytes of unique slices after which a segment closes."""
_CONTEXT_FACTOR = 8
"""A segment stores the slices that its first windows reach back to again. It holds at least this many times as many."""
_SEGMENTS_OF_A_MEMORY = 16
"""A segment is evicted as a whole, so it takes at most this fraction of the capacity."""
_FEWEST_TICKS = 16
_TABLE_BYTES = 32
"""Bytes that an open segment stores for each slice in addition to the slice: a hash, table slots and a log entry."""
_REPLAYED_TICKS = 64
"""A window that is detected within this many ticks is applied to the open segment, later ones to the next segment."""


class FullBlock(NamedTuple):
    """A block that takes no more slices, in its current form."""

    block: SliceBlock
    is_direct: bool  # its slices are stored in tick order, without a log


class _SpareArena(NamedTuple):
    memory: Any
    nbytes: int
    seen: weakref.ref[NDArray[Any]]  # the array that every view of the memory refers to


class ArenaPool:
    """Released arenas that can be written to again, which saves the cost of fresh pages.

    A batch that is being built may still read a released arena, so the pool hands an arena out only when nothing refers
    to it any more.

    Args:
        most: Maximum number of spare arenas.
        most_raw: Bytes that may stay raw. If the memory needs more, new arenas are compressed soon, and the pool
            reserves them in small pages: a large page can delay `add` by milliseconds. Large pages make reading raw
            slices faster by a sixth.
    """

    def __init__(self, most: int = 1, most_raw: int = 1 << 62) -> None:
        self._most = most
        self._most_raw = most_raw
        self._spare: list[_SpareArena] = []

    def take(self, nbytes: int, all_bytes: int = 0) -> Bytes:
        """Return a spare or new arena of `nbytes`. `all_bytes` is the most that the slices of all arenas can take."""
        for position, spare in enumerate(self._spare):
            if spare.nbytes == nbytes and spare.seen() is None:
                del self._spare[position]
                return np.frombuffer(spare.memory, np.uint8)[:nbytes]
        return reserve(nbytes, in_small_pages=all_bytes > self._most_raw)

    def give_up(self, arena: Bytes) -> None:
        """Add a released arena, which came from `reserve`, to the pool. The oldest spare arenas are dropped."""
        whole = arena.base  # every view refers to the array over the whole memory
        if arena.nbytes and isinstance(whole, np.ndarray):
            others = [spare for spare in self._spare if spare.memory is not whole.base]
            self._spare = [*others, _SpareArena(whole.base, arena.nbytes, weakref.ref(whole))][-self._most :]

    def clear(self) -> None:
        """Drop all spare arenas."""
        self._spare = []

    @property
    def spare(self) -> list[Bytes]:
        """The spare arenas. An arena is handed out again once its array here is no longer referenced."""
        arrays = []
        for position, spare in enumerate(self._spare):
            whole = spare.seen()
            if whole is None:
                whole = np.frombuffer(spare.memory, np.uint8)
                self._spare[position] = spare._replace(seen=weakref.ref(whole))
            arrays.append(whole[: spare.nbytes])
        return arrays


class SegmentIndex:
    """First tick of every segment, and for each field one record per segment. The open segment comes last."""

    def __init__(self) -> None:
        self.version = 0  # increases when segments or their blocks change
        self.is_changed = bytearray(b"\x01")  # set to 1 by every change, and to 0 by the reader that has seen it
        self.in_use: list[object] = []  # keeps alive what that reader refers to, until the next change
        self.first_ticks: NDArray[np.int64] = np.empty(0, np.int64)
        self.records: list[NDArray[np.int64]] = []  # per field: (segments, len(RECORD_FIELDS))
        self.held: list[list[Held]] = []  # per field and segment: keeps alive the arrays that the record points into

    def rebuild(self, first_ticks: list[int], fields: list[list[OpenPart | ClosedPart]]) -> None:
        """Replace the whole index. `fields` has the parts of each field, segment by segment."""
        self._mark_changed()
        self.first_ticks = np.array(first_ticks, np.int64)
        tables = [np.array([part.record() for part in parts], np.int64) for parts in fields]
        self.records = [table.reshape(-1, len(RECORD_FIELDS)) for table in tables]
        self.held = [[part.held for part in parts] for parts in fields]

    def open_next(self, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """Replace the open segment by `closed` and append the open segment `following`.

        The tables are copied, because readers may still use the record of the segment that was open.
        """
        self.records = [rows.copy() for rows in self.records]
        self.held = [held.copy() for held in self.held]
        self.append_segment(len(self.first_ticks) - 1, first_tick, closed, following)

    def append_segment(self, kept: int, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """Keep the first `kept` segments, then write the closed and the open segment. Idempotent.

        The open segment that this overwrites is empty, so no reader uses its record.
        """
        self._mark_changed()
        self.first_ticks = _append_rows(self.first_ticks, kept + 1, np.array([first_tick]))
        for field, (old, new) in enumerate(zip(closed, following, strict=True)):
            rows = np.array([old.record(), new.record()], np.int64)
            self.records[field] = _append_rows(self.records[field], kept, rows)
            self.held[field][kept:] = [old.held, new.held]

    def prepare_drop(self, segments: int) -> Callable[[], None]:
        """Return an idempotent action that removes the oldest `segments` segments."""
        records = [rows[segments:] for rows in self.records]
        held = [held[segments:] for held in self.held]
        return partial(self._set, self.first_ticks[segments:], records, held)

    def _set(self, first_ticks: NDArray[np.int64], records: list[NDArray[np.int64]], held: list[list[Held]]) -> None:
        self._mark_changed()
        self.first_ticks = first_ticks
        self.records = records
        self.held = held

    def _mark_changed(self) -> None:
        self.version += 1
        self.is_changed[0] = 1
        self.in_use.clear()

    def update(self, field: int, segment: int, part: OpenPart | ClosedPart) -> None:
        """Replace the record of one part whose slices or log moved."""
        self._mark_changed()
        records = self.records[field].copy()
        held = self.held[field].copy()
        records[segment] = part.record()
        held[segment] = part.held
        self.records[field] = records
        self.held[field] = held


def _append_rows(rows: NDArray[np.int64], kept: int, appended: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first `kept` rows followed by `appended`.

    The rows are written in place while the memory under `rows` has room, so a growing table is not copied every time.
    The next copy drops the rows that were cut off at the beginning.
    """
    room: NDArray[np.int64] = rows if rows.base is None else rows.base
    first = (rows.ctypes.data - room.ctypes.data) // rows.strides[0]
    end = first + kept + len(appended)
    if room.shape[1:] != rows.shape[1:] or end > len(room):
        first = 0
        end = kept + len(appended)
        room = np.empty((2 * end, *rows.shape[1:]), np.int64)
        room[:kept] = rows[:kept]
    room[first + kept : end] = appended
    return room[first:end]


class Segments:
    """All segments of a memory's large fields: the closed ones, and one open segment that ticks are written to.

    Not thread-safe: callers hold the memory's lock.

    Args:
        most_bytes: Maximum bytes of unique slices in one segment.
        first_tick: Number of the first tick that will be written.
        most_raw: Bytes of slices that may stay raw.
    """

    def __init__(
        self,
        kernels: Kernels,
        leaves: list[Leaf],
        lanes: int,
        capacity_ticks: int,
        repair: Repair,
        most_bytes: int = 1 << 62,
        first_tick: int = 0,
        most_raw: int = 1 << 62,
    ) -> None:
        self._kernels = kernels
        self._repair = repair
        self._lanes = lanes
        self.arenas = ArenaPool(most_raw=most_raw)
        self.recycles = False  # whether arenas of compressed blocks are kept for new blocks
        self._ring_ticks = capacity_ticks + 1
        self._most_bytes = most_bytes
        self.frozen: list[FrozenBlock] = []  # full blocks that `take_frozen` has not returned yet
        self.index = SegmentIndex()
        self.blocks_on_disk = 0
        self.awaited: list[SegmentFile] = []
        self.overhead_bytes = 0  # logs of closed segments, slices that are stored in logs, indexes of blocks on disk
        self._most_ticks = max(capacity_ticks // _SEGMENTS_OF_A_MEMORY, _FEWEST_TICKS)
        self._leaves: list[Leaf] = []
        self.windows: list[Window] = []
        self.cursors: list[Cursors] = []  # per field: (ring_ticks, lanes)
        self.searches = WindowSearches(lanes)
        self._limit_bytes = SEGMENT_BYTES
        self._reserved_until = 0  # every tick before this one fits into the open segment, whatever it contains
        self.closed: list[Segment[ClosedPart]] = []
        self._segments_by_block: dict[int, list[Segment[ClosedPart]]] = {}  # closed segments, by `id` of their blocks
        self.open: Segment[OpenPart] = Segment(first_tick, 0, [])
        for field, leaf in enumerate(leaves):
            self._admit(leaf, Window.whole(leaf))
            self.searches.begin(field, leaf)
        self._rebuild_index()

    # ---------------------------------------------------------------- writing ticks

    def prepare_tick(self, tick: int, obs: list[Array], next_obs: list[Array]) -> SlicedTick:
        """Return the destination of the next tick. A full open segment is closed first."""
        if tick >= self._reserved_until:
            self.reserve_ticks(tick)
        return SlicedTick(self.open.parts, self.cursors, obs, next_obs)

    def reserve_ticks(self, tick: int) -> int:
        """Return how many ticks, starting with `tick`, fit into the open segment whatever they contain.

        If none fits, the open segment is closed and a new one is opened first.
        """
        if tick >= self._reserved_until:
            is_long = tick - self.open.first_tick >= self._most_ticks or self.open_bytes() >= self._limit_bytes
            if is_long or not all(part.has_room() for part in self.open.parts):
                self._repair.begin(self._repair.restoring(*self.rollback_targets()))
                self._roll(tick)
                self._repair.end()
            self._reserved_until = tick + self._count_fitting_ticks(tick)
        return self._reserved_until - tick

    @property
    def ticks_in_a_piece(self) -> int:
        """Ticks of an `extend` that are written before the caller checks whether the sealer keeps up."""
        return max(1, self._limit_bytes // (16 * self.most_in_a_tick))

    def pause_tick(self, capacity_ticks: int) -> int:
        """Return the first tick that may fill a segment, evict a segment, or be searched for windows."""
        if self.searches.scouts:
            return 0
        evictions = [segment.first_tick + segment.ticks + capacity_ticks - 1 for segment in self.closed[:1]]
        return min([self._reserved_until, *evictions])

    def lengthen_logs(self) -> None:
        """Make room for one more tick in the logs of the open segment."""
        self._repair.do(self._lengthen_logs)

    def _lengthen_logs(self) -> None:
        for field, part in enumerate(self.open.parts):
            part.lengthen_log()
            if self.index.held[field][-1][0] is not part.log:
                self.index.update(field, -1, part)

    def look(self, tick: int, obs: list[Array], next_obs: list[Array]) -> None:
        """Search for windows in a tick that was written."""
        if not self.searches.scouts:
            return
        for field in self.searches.look(obs, next_obs):
            self._repair.begin(self._repair.restoring(*self.rollback_targets()))
            window = self.searches.end(field) or Window.whole(self._leaves[field])
            if window != self.windows[field]:
                self._apply(field, window, tick)
            self._repair.end()

    def rollback_targets(self) -> tuple[object, ...]:
        """Return the objects whose attributes change with anything but the write of a tick, for `Repair.restoring`."""
        return self, self.index, self.arenas, self.searches

    def take_frozen(self) -> list[FrozenBlock]:
        """Return the blocks that became full since the last call, and release the tables that find their slices."""
        frozen = self.frozen
        self.frozen = []
        # The tables are released only here: an interrupt may cause another tick to be written to the closed segment.
        for each in frozen:
            each.block.freeze()
        return frozen

    # ---------------------------------------------------------------- evicting

    def has_before(self, tick: int) -> bool:
        """Return whether the last tick of the oldest segment is older than `tick`."""
        return bool(self.closed) and self.closed[0].first_tick + self.closed[0].ticks <= tick

    def prepare_eviction(self, tick: int) -> tuple[list[SliceBlock], Callable[[], None]]:
        """Return the blocks that only segments before `tick` use, and an idempotent action that evicts these segments.

        A segment is evicted when its last tick is older than `tick`.
        """
        count = 0
        while count < len(self.closed) and self.closed[count].first_tick + self.closed[count].ticks <= tick:
            count += 1
        return self._prepare_eviction(count)

    def evict_oldest(self) -> list[SliceBlock] | None:
        """Evict the oldest segment and return the blocks that only it used. Return None if no segment is closed."""
        if not self.closed:
            return None
        gone, evict = self._prepare_eviction(1)
        evict()
        return gone

    def _prepare_eviction(self, count: int) -> tuple[list[SliceBlock], Callable[[], None]]:
        """Prepare the eviction of the `count` oldest segments."""
        leaving = self.closed[:count]
        parts = [part for segment in leaving for part in segment.parts]
        remaining: dict[int, list[Segment[ClosedPart]]] = {}  # segments that stay, by `id` of their blocks
        for part in parts:
            key = id(part.block)
            remaining[key] = remaining.get(key, self._segments_by_block[key])[1:]
        in_use = {id(part.block) for part in self.open.parts}
        blocks = {id(part.block): part.block for part in parts}
        gone = [block for key, block in blocks.items() if not remaining[key] and key not in in_use]
        on_disk = [block.used_bytes for block in gone if block.is_on_disk]
        overhead_bytes = self.overhead_bytes - sum(part.overhead_bytes for part in parts) - sum(on_disk)
        blocks_on_disk = self.blocks_on_disk - len(on_disk)
        drop = self.index.prepare_drop(count)
        return gone, partial(self._evict, leaving, remaining, gone, overhead_bytes, blocks_on_disk, drop)

    def _evict(
        self,
        leaving: list[Segment[ClosedPart]],
        remaining: Mapping[int, list[Segment[ClosedPart]]],
        gone: list[SliceBlock],
        overhead_bytes: int,
        blocks_on_disk: int,
        drop: Callable[[], None],
    ) -> None:
        """Evict the segments `leaving`, unless an interrupted call already did."""
        del self.closed[: sum(segment.first_tick <= leaving[-1].first_tick for segment in self.closed[: len(leaving)])]
        for key, segments in remaining.items():
            if segments:
                self._segments_by_block[key] = segments
            else:
                self._segments_by_block.pop(key, None)
        for block in gone:
            self.arenas.give_up(block.arena)
        self.overhead_bytes = overhead_bytes
        self.blocks_on_disk = blocks_on_disk
        keys = {id(block) for block in gone}
        self.frozen = [frozen for frozen in self.frozen if id(frozen.block) not in keys]
        drop()

    # ---------------------------------------------------------------- adding fields and whole segments

    def can_admit(self, first_tick: int, next_tick: int) -> bool:
        """Return whether a field that has been in a ring since `first_tick` can still move to the open segment."""
        reaches = not self.closed and (not self._leaves or self.open.first_tick <= first_tick)
        return reaches and next_tick <= _REPLAYED_TICKS

    def admit(self, leaf: Leaf, window: Window, first_tick: int, ticks: list[tuple[Array, Array]]) -> None:
        """Add a field that was stored elsewhere, with its ticks from `first_tick` on."""
        if not self._leaves:
            self.open = Segment(first_tick, 0, [])
        self._admit(leaf, window, len(ticks))
        for tick, (obs, next_obs) in enumerate(ticks, first_tick):
            self.open.parts[-1].append(obs, next_obs, self.cursors[-1][tick % self._ring_ticks])
        self._rebuild_index()

    def _admit(self, leaf: Leaf, window: Window, replayed_ticks: int = 0) -> None:
        self._reserved_until = 0
        self._leaves = [*self._leaves, leaf]
        self.windows = [*self.windows, window]
        context = self._lanes * sum(leaf.nbytes for leaf in self._leaves)
        self._limit_bytes = min(max(SEGMENT_BYTES, _CONTEXT_FACTOR * context), self._most_bytes)
        ring = reserve(self._ring_ticks * self._lanes * CURSOR_BYTES)
        self.cursors = [*self.cursors, ring.view(np.uint32).reshape(-1, self._lanes)]
        part = self._new_part(len(self._leaves) - 1, window, replayed_ticks=replayed_ticks)
        self.open = Segment(self.open.first_tick, 0, [*self.open.parts, part])

    def prepare_adoption(
        self, tick: int, ticks: int, parts: Sequence[ClosedPart], cursors: list[Cursors], *, lists_blocks: bool
    ) -> Callable[[], None]:
        """Return an idempotent action that appends a segment which another process compressed.

        Everything that can fail happens before this method returns. The action copies no table that grows.

        Args:
            tick: Number of the segment's first tick here.
            ticks: Number of its ticks.
            parts: Its parts, one per field.
            cursors: Cursors of its last ticks, one array per field.
            lists_blocks: Whether `take_frozen` returns its blocks.
        """
        if tick > self.open.first_tick:
            self._repair.begin(self._repair.restoring(*self.rollback_targets()))
            self._roll(tick)
            self._repair.end()
        adopted = []
        for part in parts:
            if part.block.sealed is None:
                raise DamageError("a segment came whose slices are not sealed; report this")
            sealed = self._kernels.coder.adopt(part.block.sealed.coded)
            adopted.append(replace(part, block=KeptBlock(part.block.slice_bytes, part.block.used, sealed)))
        frozen = self.frozen
        if lists_blocks:
            frozen = [*frozen, *(self._as_frozen(field, part.window, part.block) for field, part in enumerate(adopted))]
        overhead_bytes = self.overhead_bytes + sum(part.overhead_bytes for part in adopted)
        segment = Segment(tick, ticks, adopted)
        return partial(self._append_adopted, len(self.closed), segment, cursors, frozen, overhead_bytes)

    def _append_adopted(
        self,
        kept: int,
        adopted: Segment[ClosedPart],
        cursors: list[Cursors],
        frozen: list[FrozenBlock],
        overhead_bytes: int,
    ) -> None:
        """Keep the first `kept` closed segments, then write `adopted` and an empty open segment. Idempotent."""
        end = adopted.first_tick + adopted.ticks
        for ring, rows in zip(self.cursors, cursors, strict=True):
            put_rows(ring, end - len(rows), rows)
        self.closed[kept:] = [adopted]
        for part in adopted.parts:
            self._segments_by_block[id(part.block)] = [adopted]
        self.frozen = frozen
        self.overhead_bytes = overhead_bytes
        self._reserved_until = 0
        self.open = Segment(end, 0, self.open.parts)
        self.index.append_segment(kept, end, adopted.parts, self.open.parts)

    def thaw(
        self,
        next_tick: int,
        leaves: list[Leaf],
        windows: Sequence[Window],
        segments: Sequence[Segment[ClosedPart]],
        searches: dict[str, Any],
    ) -> None:
        """Replace everything by the segments of a checkpoint. The next tick opens a segment.

        The cursors are not part of the segments: the caller writes them afterwards, as columns of rows.
        """
        self._leaves = []
        self.windows = []
        self.cursors = []
        self.closed = list(segments)
        self._segments_by_block = {}
        for segment in self.closed:
            self._register_blocks(segment)
        self.open = Segment(next_tick, 0, [])
        for leaf, window in zip(leaves, windows, strict=True):
            self._admit(leaf, window)
        self.searches.restore(searches, leaves)
        self._take_over_blocks()

    def _take_over_blocks(self) -> None:
        """Make the blocks of a loaded memory readable here, and list those that can be compressed or spilled."""
        parts = [each for segment in self.closed for each in enumerate(segment.parts)]
        frozen: dict[int, FrozenBlock] = {}
        self.overhead_bytes = sum(part.overhead_bytes for _, part in parts)
        for field, part in parts:
            block = part.block
            carried = block.sealed
            if isinstance(carried, CarriedSlices):
                block.sealed = self._kernels.coder.adopt(carried.coded)
            if part.log is not None and not block.is_on_disk:
                frozen[id(block)] = self._as_frozen(field, part.window, block)
        blocks = {id(part.block): part.block for _, part in parts}
        on_disk = [block for block in blocks.values() if block.is_on_disk]
        self.blocks_on_disk = len(on_disk)
        extents = [block.extent for block in on_disk]
        files = {id(extent.file): extent.file for extent in extents if extent is not None}
        self.awaited = [file for file in files.values() if file.is_awaited]
        self.overhead_bytes += sum(block.used_bytes for block in on_disk)
        self._rebuild_index()
        self.frozen = list(frozen.values())

    # ---------------------------------------------------------------- open and closed segments

    def open_bytes(self) -> int:
        """Return the bytes of the open segment's unique slices."""
        return sum(part.added_bytes for part in self.open.parts)

    @property
    def segment_bytes(self) -> int:
        """Maximum bytes of an open segment, with the tables that find its slices by content."""
        smallest = min((window.slice_bytes for window in self.windows), default=1)
        whole = self._limit_bytes + 2 * self.most_in_a_tick
        return whole + whole * _TABLE_BYTES // max(smallest, _TABLE_BYTES)

    @property
    def most_in_a_tick(self) -> int:
        """Maximum bytes of slices in one tick."""
        return max(1, 2 * self._lanes * sum(leaf.nbytes for leaf in self._leaves))

    def _count_fitting_ticks(self, tick: int) -> int:
        """Count the ticks from `tick` on that fit into the open segment whatever they contain, and at least 1."""
        by_bytes = (self._limit_bytes - self.open_bytes()) // self.most_in_a_tick
        by_room = min((part.ticks_that_fit() for part in self.open.parts), default=0)
        return max(1, min(self._most_ticks - (tick - self.open.first_tick), by_bytes, by_room))

    def _roll(self, tick: int) -> None:
        """Close the open segment and open the next one at `tick`."""
        full = self.open
        following = []
        for field, part in enumerate(full.parts):
            does_not_fit = part.window.count == 1 or part.broken_steps * 2 >= part.steps
            if does_not_fit:
                self.searches.consider(field, self._leaves[field])
            following.append(self._next_part(field, part))
        self.open = Segment(tick, 0, following)
        self._reserved_until = 0
        closed = Segment(full.first_tick, tick - full.first_tick, [part.closed() for part in full.parts])
        self.closed.append(closed)
        self._register_blocks(closed)
        self.overhead_bytes += sum(part.overhead_bytes for part in closed.parts)
        self.index.open_next(tick, closed.parts, following)

    def _register_blocks(self, closed: Segment[ClosedPart]) -> None:
        for key in [id(part.block) for part in closed.parts]:
            self._segments_by_block[key] = [*self._segments_by_block.get(key, []), closed]

    def _new_part(
        self, field: int, window: Window, block: SliceBlock | None = None, replayed_ticks: int = 0
    ) -> OpenPart:
        most_in_a_tick = 2 * self._lanes * self._leaves[field].nbytes
        arena_bytes = self._limit_bytes + (2 + replayed_ticks) * most_in_a_tick
        if block is None and not lies_direct(window):
            arena = self.arenas.take(arena_bytes, window.slice_bytes * self._ring_ticks * self._lanes)
            block = self._kernels.new_block(window.slice_bytes, arena)
        return self._kernels.new_part(window, self._lanes, block, arena_bytes)

    def _next_part(self, field: int, part: OpenPart) -> OpenPart:
        """Open the part that follows `part`. It shares the block of `part` where this avoids repeated slices."""
        window = self.windows[field]
        block = part.block_to_go_on_in() if part.window == window else None
        steps = part.steps_before + part.steps
        # A block is freed with its last part. A block that never ended would keep evicted slices for ever.
        is_evicting = steps >= (self._ring_ticks - 1) * self._lanes
        if block is not None and (is_evicting or block.used_bytes >= self._limit_bytes):
            block = None
        if block is None and part.block is not None:
            self._freeze(field, part.window, part.block)
        following = self._new_part(field, window, block)
        following.steps_before = 0 if block is None else steps
        return following

    def _freeze(self, field: int, window: Window, block: SliceBlock) -> None:
        """Record that a block takes no more slices and may be compressed."""
        if all(frozen.block is not block for frozen in self.frozen):
            self.frozen.append(self._as_frozen(field, window, block))

    def _as_frozen(self, field: int, window: Window, block: SliceBlock) -> FrozenBlock:
        # The closure refers to the block by `id`, because it must not keep the block alive.
        def logs(key: int = id(block)) -> list[NDArray[Any]]:
            parts = [segment.parts[field] for segment in self._segments_by_block.get(key, [])]
            return [part.log for part in parts if part.log is not None]

        return FrozenBlock(field, self._leaves[field], window, block, self._lanes, logs)

    def seal(self, block: SliceBlock, sealed: SealedSlices) -> None:
        """Replace the form of a block. Locations that were handed out keep the previous form."""
        if self.recycles:
            self.arenas.give_up(block.arena)
        else:
            self.arenas.clear()
        block.replace_by(sealed)
        segments = self._segments_by_block.get(id(block), [])
        for segment in segments:
            number = int(np.searchsorted(self.index.first_ticks, segment.first_tick))
            for field, part in enumerate(segment.parts):
                if part.block is block:
                    self.index.update(field, number, part)
        is_held = bool(segments)  # the block may have been evicted while it was written to disk
        if is_held and block.is_on_disk:
            self.blocks_on_disk += 1
            self.overhead_bytes += block.used_bytes

    def _apply(self, field: int, window: Window, tick: int) -> None:
        """Use a new window for a field, from the open segment's first tick on or from the next tick on."""
        first = self.open.first_tick
        ticks = tick + 1 - first
        if ticks > _REPLAYED_TICKS:
            self.windows[field] = window
            self._roll(tick + 1)
            return
        old = self.open.parts[field]
        part = self._new_part(field, window, replayed_ticks=ticks)
        first = max(first, tick + 2 - self._ring_ticks)  # cursors of older ticks were overwritten
        cursors = np.zeros((tick + 1 - first, self._lanes), np.uint32)
        for past, places in enumerate(cursors, first):
            part.append(*read_tick(self._kernels, old, self.cursors[field][past % self._ring_ticks]), places)
        self._repair.do(partial(self._replace_part, field, part, first, cursors))

    def _replace_part(self, field: int, part: OpenPart, first: int, cursors: Cursors) -> None:
        """Replace a field's open part by `part`, to which the ticks of the open segment were written again."""
        old = self.open.parts[field]
        parts = [*self.open.parts[:field], part, *self.open.parts[field + 1 :]]
        self.windows[field] = part.window
        self._reserved_until = 0
        put_rows(self.cursors[field], first, cursors)
        # An earlier segment may have begun the block of the old part.
        if old.block is not None and any(segment.parts[field].block is old.block for segment in self.closed):
            self._freeze(field, old.window, old.block)
        self.index.update(field, -1, part)
        self.open = Segment(self.open.first_tick, 0, parts)

    def parts(self, field: int) -> list[OpenPart | ClosedPart]:
        """Return one field's parts of all segments, oldest first."""
        return [*(segment.parts[field] for segment in self.closed), self.open.parts[field]]

    def _rebuild_index(self) -> None:
        first_ticks = [*(segment.first_tick for segment in self.closed), self.open.first_tick]
        self.index.rebuild(first_ticks, [self.parts(field) for field in range(len(self._leaves))])

    # ---------------------------------------------------------------- accounting

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the full blocks, newest first, back to the first segment whose blocks are all known."""
        found: dict[int, FullBlock] = {}
        filling = {id(part.block) for part in self.open.parts}
        for segment in reversed(self.closed):
            new = [part for part in segment.parts if id(part.block) not in filling and not is_known(part.block)]
            if not new:
                break
            found |= {id(part.block): FullBlock(part.block, part.log is None) for part in new}
        return list(found.values())

    def disk_bytes(self, field: int) -> int:
        """Return the bytes of one field on disk. A block that several segments use counts once."""
        blocks = self._closed_blocks(field).values()
        return sum(block.sealed.disk_bytes for block in blocks if block.sealed is not None)

    def report(self, field: int, name: str, plain_bytes: int, cursors: int) -> FieldReport:
        """Account for the bytes of one field.

        Args:
            name: Name of the field in the report.
            plain_bytes: Bytes of the plain layout.
            cursors: Number of cursors that were written so far.
        """
        opened = self.open.parts[field]
        parts = self.parts(field)
        blocks = [block for key, block in self._closed_blocks(field).items() if key != id(opened.block)]
        raw = opened.used_bytes + sum(block.used_bytes for block in blocks if block.sealed is None)
        sealed = sum(block.used_bytes for block in blocks if block.sealed is not None)
        log = sum(part.log_bytes for part in parts) + cursors * CURSOR_BYTES
        newest = opened.window if opened.steps or not self.closed else self.closed[-1].parts[field].window
        finding = _describe_parts(parts, newest)
        return FieldReport(name, raw + sealed, log, 0, plain_bytes, finding, sealed, self.disk_bytes(field))

    def arrays(self, field: int) -> list[Array]:
        """Return the arrays that store one field. An arena that two segments use is listed once."""
        parts = self.parts(field)
        opened = self.open.parts[field]
        blocks = {id(part.block): part.block for part in parts if part.block is not None}
        found: list[Array] = [array for block in blocks.values() for array in block.arrays()]
        found += [part.log for part in parts if part.log is not None]
        found.append(self.cursors[field])
        if opened.block is None:
            found.append(opened.slices)
        return found

    def _closed_blocks(self, field: int) -> dict[int, SliceBlock]:
        """Return one field's blocks of all closed segments, by `id`."""
        return {id(segment.parts[field].block): segment.parts[field].block for segment in self.closed}


def _describe_parts(parts: Sequence[AnyPart], window: Window) -> str:
    """Describe the newest window of a field and its codecs for people. The open part comes last."""
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

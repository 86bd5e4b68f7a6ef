"""Segments: the large observation fields of all ticks, one run of ticks after another.

In:  observations and next observations of all lanes, tick by tick, and segments that were sealed elsewhere.
Out: places, from which kernels read observations; windows that were found; blocks that are full, or were dropped.
Invariant: a segment that was closed never changes but for the form of its blocks, and places that were handed out keep
the form that they were given.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Bytes, Leaf
from holdall.storage.batch_source import RECORD_FIELDS, Held, read_tick
from holdall.storage.blocks import CarriedSlices, SealedSlices, SegmentFile, SliceBlock, reserve
from holdall.storage.rings import CURSOR_BYTES
from holdall.storage.slices import ClosedPart, FrozenBlock, OpenPart, Segment, Window, WindowSearches, lies_direct
from holdall.storage.snapshot import put_rows
from holdall.storage.ticks import Kernels, SlicedTick

if TYPE_CHECKING:
    from holdall.storage.slices import Cursors
    from holdall.storage.tick_store import Repair

SEGMENT_BYTES = 16 * 2**20
"""Unique slices after which a segment closes."""
_CONTEXT_FACTOR = 8
"""A segment repeats what its first windows reach back to; it holds this many times as much."""
_SEGMENTS_OF_A_MEMORY = 16
"""A segment is freed as a whole, so it is never more than this share of the capacity."""
_FEWEST_TICKS = 16
_TABLE_BYTES = 32
"""What an open segment keeps of each slice beside its bytes: a hash, slots of a table, an entry of the log."""
_REPLAYED_TICKS = 64
"""A window found this early is applied to the open segment; later, from the next one on."""


class _SpareArena(NamedTuple):
    memory: Any
    nbytes: int
    seen: weakref.ref[NDArray[Any]]  # the array that every view of the memory refers to


class ArenaPool:
    """Arenas that were given up and can be written to again, without the cost of fresh pages.

    An arena may still be read by a batch that is being built: it is handed out when nothing refers to it any more.

    Args:
        most: How many are kept.
        most_raw: Bytes that may stay raw. If all that is held takes more, new arenas are sealed soon: then they are in
            small pages. Who adds may wait milliseconds for a large one, and who reads raw slices gains a sixth by them.
    """

    def __init__(self, most: int = 1, most_raw: int = 1 << 62) -> None:
        self._most, self._most_raw = most, most_raw
        self._spare: list[_SpareArena] = []

    def take(self, nbytes: int, all_bytes: int = 0) -> Bytes:
        """Return an arena of `nbytes`, used before or new, for slices that take up to `all_bytes` in all arenas."""
        for position, spare in enumerate(self._spare):
            if spare.nbytes == nbytes and spare.seen() is None:
                del self._spare[position]
                return np.frombuffer(spare.memory, np.uint8)[:nbytes]
        return reserve(nbytes, in_small_pages=all_bytes > self._most_raw)

    def give_up(self, arena: Bytes) -> None:
        """Keep an arena from `reserve` that its owner no longer needs, if there is room for it."""
        whole = arena.base  # NumPy lets every view refer to the array over the whole memory
        if arena.nbytes and isinstance(whole, np.ndarray):
            others = [spare for spare in self._spare if spare.memory is not whole.base]
            self._spare = [*others, _SpareArena(whole.base, arena.nbytes, weakref.ref(whole))][-self._most :]

    def clear(self) -> None:
        """Keep none."""
        self._spare = []

    @property
    def spare(self) -> list[Bytes]:
        """Arenas kept; they are handed out again once nobody looks at these arrays any more."""
        arrays = []
        for position, spare in enumerate(self._spare):
            whole = spare.seen()
            if whole is None:
                whole = np.frombuffer(spare.memory, np.uint8)
                self._spare[position] = spare._replace(seen=weakref.ref(whole))
            arrays.append(whole[: spare.nbytes])
        return arrays


class SegmentIndex:
    """First tick of every segment, and per field a record of every part; the open segment's come last."""

    def __init__(self) -> None:
        self.version = 0  # another one when segments or their blocks are others
        self.is_changed = bytearray(b"\x01")  # 1 with every change; read by C, and set to 0 by who has seen it
        self.in_use: list[object] = []  # what that one refers to until the next change: then blocks that left are freed
        self.first_ticks: NDArray[np.int64] = np.empty(0, np.int64)
        self.records: list[NDArray[np.int64]] = []  # per field: (segments, len(RECORD_FIELDS))
        self.held: list[list[Held]] = []  # per field and segment: what its record points into

    def rebuild(self, first_ticks: list[int], fields: list[list[OpenPart | ClosedPart]]) -> None:
        """Start over, field by field and segment by segment."""
        self._changes()
        self.first_ticks = np.array(first_ticks, np.int64)
        tables = [np.array([part.record() for part in parts], np.int64) for parts in fields]
        self.records = [table.reshape(-1, len(RECORD_FIELDS)) for table in tables]
        self.held = [[part.held for part in parts] for parts in fields]

    def open_next(self, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """The open segment was closed, and another one follows; who reads it goes by the record that it had."""
        self.records, self.held = [rows.copy() for rows in self.records], [held.copy() for held in self.held]
        self.put_behind(len(self.first_ticks) - 1, first_tick, closed, following)

    def put_behind(self, kept: int, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """Have a closed segment behind the oldest ones, so many, and the open one behind it; again gives the same.

        What was there behind those is written over: the open segment, in which nobody reads while it is empty.
        """
        self._changes()
        self.first_ticks = _put_behind(self.first_ticks, kept + 1, np.array([first_tick]))
        for field, (old, new) in enumerate(zip(closed, following, strict=True)):
            rows = np.array([old.record(), new.record()], np.int64)
            self.records[field] = _put_behind(self.records[field], kept, rows)
            self.held[field][kept:] = [old.held, new.held]

    def dropping(self, segments: int) -> Callable[[], None]:
        """Return what forgets the oldest segments, however often it is run."""
        records, held = [rows[segments:] for rows in self.records], [held[segments:] for held in self.held]
        return partial(self._set, self.first_ticks[segments:], records, held)

    def _set(self, first_ticks: NDArray[np.int64], records: list[NDArray[np.int64]], held: list[list[Held]]) -> None:
        self._changes()
        self.first_ticks, self.records, self.held = first_ticks, records, held

    def _changes(self) -> None:
        self.version, self.is_changed[0] = self.version + 1, 1
        self.in_use.clear()

    def update(self, field: int, segment: int, part: OpenPart | ClosedPart) -> None:
        """A part lies elsewhere now."""
        self._changes()
        records, held = self.records[field].copy(), self.held[field].copy()
        records[segment], held[segment] = part.record(), part.held
        self.records[field], self.held[field] = records, held


def _put_behind(rows: NDArray[np.int64], kept: int, behind: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first rows of a table, so many, and others behind them; in place, as long as its memory has room.

    So a table that grows is not copied every time. What was cut off at its beginning goes with the next copy.
    """
    room: NDArray[np.int64] = rows if rows.base is None else rows.base
    first = (rows.ctypes.data - room.ctypes.data) // rows.strides[0]
    end = first + kept + len(behind)
    if room.shape[1:] != rows.shape[1:] or end > len(room):
        first, end = 0, kept + len(behind)
        room = np.empty((2 * end, *rows.shape[1:]), np.int64)
        room[:kept] = rows[:kept]
    room[first + kept : end] = behind
    return room[first:end]


class Segments:
    """All segments of a memory's large fields: one open, the rest closed.

    Args:
        most_bytes: Most that the unique slices of one segment may take.
        first_tick: Number of the first tick that will be written.
        most_raw: Bytes of slices that may stay raw.
    """

    def __init__(
        self, kernels: Kernels, leaves: list[Leaf], lanes: int, capacity_ticks: int, repair: Repair,
        most_bytes: int = 1 << 62, first_tick: int = 0, most_raw: int = 1 << 62,
    ) -> None:  # fmt: skip
        self._kernels, self._repair, self._lanes = kernels, repair, lanes
        self.arenas = ArenaPool(most_raw=most_raw)
        self.recycles = False  # whether arenas of blocks that are sealed are filled again
        self._ring_ticks, self._most_bytes = capacity_ticks + 1, most_bytes
        self.frozen: list[FrozenBlock] = []  # blocks that are full, and were not asked for yet
        self.index = SegmentIndex()
        self.blocks_on_disk = 0
        self.awaited: list[SegmentFile] = []
        self.overhead_bytes = 0  # closed logs, slices that lie in logs, and the indexes of blocks on disk
        self._most_ticks = max(capacity_ticks // _SEGMENTS_OF_A_MEMORY, _FEWEST_TICKS)
        self._leaves, self.windows = list[Leaf](), list[Window]()
        self.cursors: list[Cursors] = []  # per field: (ring_ticks, lanes)
        self.searches = WindowSearches(lanes)
        self._limit_bytes = SEGMENT_BYTES
        self._sure_until = 0  # ticks before this one fit into the open segment whatever they bring
        self.closed: list[Segment[ClosedPart]] = []
        self._naming: dict[int, list[Segment[ClosedPart]]] = {}  # closed segments that name a block, by its identity
        self.open: Segment[OpenPart] = Segment(first_tick, 0, [])
        for field, leaf in enumerate(leaves):
            self._admit(leaf, Window.whole(leaf))
            self.searches.begin(field, leaf)
        self._rebuild_index()

    def sliced(self, tick: int, obs: list[Array], next_obs: list[Array]) -> SlicedTick:
        """Say where the tick to come goes; close the open segment first if it is full."""
        if tick >= self._sure_until:
            self.sure_ticks(tick)
        return SlicedTick(self.open.parts, self.cursors, obs, next_obs)

    def sure_ticks(self, tick: int) -> int:
        """Count the ticks from one on that fit into the open segment, whatever they bring; close it first if none."""
        if tick >= self._sure_until:
            is_long = tick - self.open.first_tick >= self._most_ticks or self.open_bytes() >= self._limit_bytes
            if is_long or not all(part.has_room() for part in self.open.parts):
                self._repair.begin(self._repair.restoring(*self.changing()))
                self._roll(tick)
                self._repair.end()
            self._sure_until = tick + self._ticks_that_fit(tick)
        return self._sure_until - tick

    def pause_tick(self, capacity_ticks: int) -> int:
        """Return the first tick before which no segment is full, none leaves, and nobody looks for windows."""
        leaves = [segment.first_tick + segment.ticks + capacity_ticks - 1 for segment in self.closed[:1]]
        return 0 if self.searches.scouts else min([self._sure_until, *leaves])

    def lengthen_logs(self) -> None:
        """Make room for one more tick in the logs of the open segment."""
        self._repair.do(self._lengthen_logs)

    def _lengthen_logs(self) -> None:
        for field, part in enumerate(self.open.parts):
            part.lengthen_log()
            if self.index.held[field][-1][0] is not part.log:
                self.index.update(field, -1, part)

    def look(self, tick: int, obs: list[Array], next_obs: list[Array]) -> None:
        """Look for windows in a tick that was written."""
        if not self.searches.scouts:
            return
        for field in self.searches.look(obs, next_obs):
            self._repair.begin(self._repair.restoring(*self.changing()))
            window = self.searches.end(field) or Window.whole(self._leaves[field])
            if window != self.windows[field]:
                self._apply(field, window, tick)
            self._repair.end()

    def changing(self) -> tuple[object, ...]:
        """Return the objects whose attributes change with anything but a tick that is written."""
        return self, self.index, self.arenas, self.searches

    def take_frozen(self) -> list[FrozenBlock]:
        """Return the blocks that are full, each once, and let go of what finds their slices."""
        frozen, self.frozen = self.frozen, []
        for each in frozen:  # not before: an interrupt may have another tick written to the segment that was closed
            each.block.freeze()
        return frozen

    def has_before(self, tick: int) -> bool:
        """Whether the last tick of the oldest segment is older than `tick`."""
        return bool(self.closed) and self.closed[0].first_tick + self.closed[0].ticks <= tick

    def evicting(self, tick: int) -> tuple[list[SliceBlock], Callable[[], None]]:
        """Return what drops the segments whose last tick is older than `tick`, and the blocks that go with them.

        The action gives the same however often it is run.
        """
        stale = 0
        while stale < len(self.closed) and self.closed[stale].first_tick + self.closed[stale].ticks <= tick:
            stale += 1
        return self._evicting(stale)

    def evict_oldest(self) -> list[SliceBlock] | None:
        """Drop the oldest segment and return the blocks that went with it; None if none is closed."""
        if not self.closed:
            return None
        gone, evict = self._evicting(1)
        evict()
        return gone

    def _evicting(self, stale: int) -> tuple[list[SliceBlock], Callable[[], None]]:
        leaving = self.closed[:stale]
        parts = [part for segment in leaving for part in segment.parts]
        naming: dict[int, list[Segment[ClosedPart]]] = {}  # of the segments that stay
        for part in parts:
            name = id(part.block)
            naming[name] = naming.get(name, self._naming[name])[1:]
        in_use = {id(part.block) for part in self.open.parts}
        blocks = {id(part.block): part.block for part in parts}
        gone = [block for name, block in blocks.items() if not naming[name] and name not in in_use]
        on_disk = [block.used_bytes for block in gone if block.is_on_disk]
        counts = (
            self.overhead_bytes - sum(part.overhead_bytes for part in parts) - sum(on_disk),
            self.blocks_on_disk - len(on_disk),
        )
        return gone, partial(self._evict, leaving, naming, gone, counts, self.index.dropping(stale))

    def _evict(
        self, leaving: list[Segment[ClosedPart]], naming: Mapping[int, list[Segment[ClosedPart]]],
        gone: list[SliceBlock], counts: tuple[int, int], drop: Callable[[], None],
    ) -> None:  # fmt: skip
        """Drop the oldest segments, as far as they are still there."""
        del self.closed[: sum(segment.first_tick <= leaving[-1].first_tick for segment in self.closed[: len(leaving)])]
        for name, segments in naming.items():
            if segments:
                self._naming[name] = segments
            else:
                self._naming.pop(name, None)
        for block in gone:
            self.arenas.give_up(block.arena)
        self.overhead_bytes, self.blocks_on_disk = counts
        names = {id(block) for block in gone}
        self.frozen = [frozen for frozen in self.frozen if id(frozen.block) not in names]
        drop()

    def can_admit(self, first_tick: int, next_tick: int) -> bool:
        """Whether the open segment reaches back to `first_tick`, the oldest held, and few ticks came so far."""
        reaches = not self.closed and (not self._leaves or self.open.first_tick <= first_tick)
        return reaches and next_tick <= _REPLAYED_TICKS

    def admit(self, leaf: Leaf, window: Window, first_tick: int, ticks: list[tuple[Array, Array]]) -> None:
        """Take a field on that was kept elsewhere so far, with its ticks from `first_tick` on."""
        if not self._leaves:
            self.open = Segment(first_tick, 0, [])
        self._admit(leaf, window, len(ticks))
        for tick, (obs, next_obs) in enumerate(ticks, first_tick):
            self.open.parts[-1].append(obs, next_obs, self.cursors[-1][tick % self._ring_ticks])
        self._rebuild_index()

    @property
    def segment_bytes(self) -> int:
        """Most that an open segment takes, with the tables that find its slices by their bytes."""
        smallest = min((window.slice_bytes for window in self.windows), default=1)
        whole = self._limit_bytes + 2 * self.most_in_a_tick
        return whole + whole * _TABLE_BYTES // max(smallest, _TABLE_BYTES)

    def thaw(
        self, next_tick: int, leaves: list[Leaf], windows: Sequence[Window], segments: Sequence[Segment[ClosedPart]],
        searches: dict[str, Any],
    ) -> None:  # fmt: skip
        """Take over what was frozen elsewhere; the cursors follow, as columns, and the next tick opens a segment."""
        self._leaves, self.windows, self.cursors = [], [], []
        self.closed, self._naming = list(segments), {}
        for segment in self.closed:
            self._name(segment)
        self.open = Segment(next_tick, 0, [])
        for leaf, window in zip(leaves, windows, strict=True):
            self._admit(leaf, window)
        self.searches.restore(searches, leaves)
        self._take_over_blocks()

    def _take_over_blocks(self) -> None:
        """Make the blocks of a loaded memory readable here, and list them."""
        parts, frozen = [each for segment in self.closed for each in enumerate(segment.parts)], dict[int, FrozenBlock]()
        self.overhead_bytes = sum(part.overhead_bytes for _, part in parts)
        for field, part in parts:
            block, carried = part.block, part.block.sealed
            if isinstance(carried, CarriedSlices):
                block.sealed = self._kernels.coder.adopt(carried.coded)
            if part.log is not None and not block.is_on_disk:
                frozen[id(block)] = self._as_frozen(field, part.window, block)
        blocks = {id(part.block): part.block for _, part in parts}
        on_disk = [block for block in blocks.values() if block.is_on_disk]
        self.blocks_on_disk = len(on_disk)
        files = {id(extent.file): extent.file for block in on_disk if (extent := block.extent) is not None}
        self.awaited = [file for file in files.values() if file.is_awaited]
        self.overhead_bytes += sum(block.used_bytes for block in on_disk)
        self._rebuild_index()
        self.frozen = list(frozen.values())

    def _admit(self, leaf: Leaf, window: Window, replayed_ticks: int = 0) -> None:
        self._sure_until = 0
        self._leaves = [*self._leaves, leaf]
        self.windows = [*self.windows, window]
        context = self._lanes * sum(leaf.nbytes for leaf in self._leaves)
        self._limit_bytes = min(max(SEGMENT_BYTES, _CONTEXT_FACTOR * context), self._most_bytes)
        ring = reserve(self._ring_ticks * self._lanes * CURSOR_BYTES)
        self.cursors = [*self.cursors, ring.view(np.uint32).reshape(-1, self._lanes)]
        part = self._new_part(len(self._leaves) - 1, window, replayed_ticks=replayed_ticks)
        self.open = Segment(self.open.first_tick, 0, [*self.open.parts, part])

    def _new_part(
        self, field: int, window: Window, block: SliceBlock | None = None, replayed_ticks: int = 0
    ) -> OpenPart:
        most_in_a_tick = 2 * self._lanes * self._leaves[field].nbytes
        arena_bytes = self._limit_bytes + (2 + replayed_ticks) * most_in_a_tick
        if block is None and not lies_direct(window):
            arena = self.arenas.take(arena_bytes, window.slice_bytes * self._ring_ticks * self._lanes)
            block = self._kernels.new_block(window.slice_bytes, arena)
        return self._kernels.new_part(window, self._lanes, block, arena_bytes)

    def open_bytes(self) -> int:
        """What the open segment's unique slices take."""
        return sum(part.added_bytes for part in self.open.parts)

    @property
    def most_in_a_tick(self) -> int:
        """Bytes of slices that a tick may bring."""
        return max(1, 2 * self._lanes * sum(leaf.nbytes for leaf in self._leaves))

    def _ticks_that_fit(self, tick: int) -> int:
        """Count the ticks from one on that fit whatever they bring, so that nobody has to look at each."""
        by_bytes = (self._limit_bytes - self.open_bytes()) // self.most_in_a_tick
        by_room = min((part.ticks_that_fit() for part in self.open.parts), default=0)
        return max(1, min(self._most_ticks - (tick - self.open.first_tick), by_bytes, by_room))

    def _roll(self, tick: int) -> None:
        """Close the open segment and open the next one at `tick`."""
        full = self.open
        following = []
        for field, part in enumerate(full.parts):
            if part.window.count == 1 or part.broken_steps * 2 >= part.steps:  # it does not fit
                self.searches.consider(field, self._leaves[field])
            following.append(self._next_part(field, part))
        self.open, self._sure_until = Segment(tick, 0, following), 0
        closed = Segment(full.first_tick, tick - full.first_tick, [part.closed() for part in full.parts])
        self.closed.append(closed)
        self._name(closed)
        self.overhead_bytes += sum(part.overhead_bytes for part in closed.parts)
        self.index.open_next(tick, closed.parts, following)

    def _name(self, closed: Segment[ClosedPart]) -> None:
        for name in [id(part.block) for part in closed.parts]:
            self._naming[name] = [*self._naming.get(name, []), closed]

    def _next_part(self, field: int, part: OpenPart) -> OpenPart:
        """Open a part after `part`, in its block where that spares repeating slices."""
        window = self.windows[field]
        block = part.block_to_go_on_in() if part.window == window else None
        steps = part.steps_before + part.steps
        # A block goes with its last part: one that went on for ever would keep what was evicted.
        evicting = steps >= (self._ring_ticks - 1) * self._lanes
        if block is not None and (evicting or block.used_bytes >= self._limit_bytes):
            block = None
        if block is None and part.block is not None:
            self._freeze(field, part.window, part.block)
        following = self._new_part(field, window, block)
        following.steps_before = 0 if block is None else steps
        return following

    def _freeze(self, field: int, window: Window, block: SliceBlock) -> None:
        """Note that a block takes no more slices: it may be sealed from now on."""
        if all(frozen.block is not block for frozen in self.frozen):
            self.frozen.append(self._as_frozen(field, window, block))

    def _as_frozen(self, field: int, window: Window, block: SliceBlock) -> FrozenBlock:
        def logs(name: int = id(block)) -> list[NDArray[Any]]:  # not the block itself, which this must not keep
            parts = [segment.parts[field] for segment in self._naming.get(name, [])]
            return [part.log for part in parts if part.log is not None]

        return FrozenBlock(field, self._leaves[field], window, block, self._lanes, logs)

    def seal(self, block: SliceBlock, sealed: SealedSlices) -> None:
        """Change over to a block's next form; places that were handed out keep the one before."""
        self.arenas.give_up(block.arena) if self.recycles else self.arenas.clear()
        block.replace_by(sealed)
        naming = self._naming.get(id(block), [])
        for segment in naming:
            number = int(np.searchsorted(self.index.first_ticks, segment.first_tick))
            for field, part in enumerate(segment.parts):
                if part.block is block:
                    self.index.update(field, number, part)
        if naming and block.is_on_disk:  # it may have been evicted while it was written
            self.blocks_on_disk += 1
            self.overhead_bytes += block.used_bytes

    def _apply(self, field: int, window: Window, tick: int) -> None:
        """Cut a field in a new way: from now on, or from the open segment's first tick on."""
        first, ticks = self.open.first_tick, tick + 1 - self.open.first_tick
        if ticks > _REPLAYED_TICKS:
            self.windows[field] = window
            self._roll(tick + 1)
            return
        old, part = self.open.parts[field], self._new_part(field, window, replayed_ticks=ticks)
        first = max(first, tick + 2 - self._ring_ticks)  # cursors of older ticks were overwritten
        cursors = np.zeros((tick + 1 - first, self._lanes), np.uint32)
        for past, places in enumerate(cursors, first):
            part.append(*read_tick(self._kernels, old, self.cursors[field][past % self._ring_ticks]), places)
        self._repair.do(partial(self._replace_part, field, part, first, cursors))

    def _replace_part(self, field: int, part: OpenPart, first: int, cursors: Cursors) -> None:
        """Go on in a part to which the ticks of the open segment were written again."""
        old = self.open.parts[field]
        parts = [*self.open.parts[:field], part, *self.open.parts[field + 1 :]]
        self.windows[field], self._sure_until = part.window, 0
        put_rows(self.cursors[field], first, cursors)
        # The segments before may have begun the block that is left here.
        if old.block is not None and any(segment.parts[field].block is old.block for segment in self.closed):
            self._freeze(field, old.window, old.block)
        self.index.update(field, -1, part)
        self.open = Segment(self.open.first_tick, 0, parts)

    def parts(self, field: int) -> list[OpenPart | ClosedPart]:
        """Return what all segments hold of one field, oldest first."""
        return [*(segment.parts[field] for segment in self.closed), self.open.parts[field]]

    def _rebuild_index(self) -> None:
        first_ticks = [*(segment.first_tick for segment in self.closed), self.open.first_tick]
        self.index.rebuild(first_ticks, [self.parts(field) for field in range(len(self._leaves))])

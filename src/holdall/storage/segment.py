"""The index: which segment a tick lies in, and where its parts are, for readers without a lock.

In:  segments as they are opened, closed, sealed and dropped.  Out: tables that `Places` name.
Invariant: a table that was handed out never changes. A change makes a new one, and copies no more than numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Array, Bytes, Leaf
from holdall.storage.blocks import (
    ArenaPool,
    CarriedSlices,
    KeptBlock,
    SealedSlices,
    SegmentFile,
    SliceBlock,
    reserve,
)
from holdall.storage.layout import Window, WindowSearches
from holdall.storage.sealer import FrozenBlock
from holdall.storage.slices import (
    RECORD_FIELDS,
    ClosedPart,
    Cursors,
    Held,
    Kernels,
    OpenPart,
    Places,
    lies_direct,
)
from holdall.storage.snapshot import FrozenSegments, FullBlock, OpenSlices, StoreContent, put_rows
from holdall.storage.tiers import NO_LIMIT, Allowance, Budget, Tiers
from holdall.threads import ThreadPool

AnyPart = OpenPart | ClosedPart


class SegmentIndex:
    """First tick of every segment, and per field a record of every part; the open segment's come last."""

    def __init__(self) -> None:
        self.version = 0
        self.first_ticks: NDArray[np.int64] = np.empty(0, np.int64)
        self.records: list[NDArray[np.int64]] = []  # per field: (segments, len(RECORD_FIELDS))
        self.held: list[tuple[Held, ...]] = []  # per field and segment: what its record points into

    def rebuild(self, first_ticks: list[int], fields: list[list[AnyPart]]) -> None:
        """Start over, field by field and segment by segment."""
        self.version += 1
        self.first_ticks = np.array(first_ticks, np.int64)
        self.records = [
            np.array([part.record() for part in parts], np.int64).reshape(-1, len(RECORD_FIELDS)) for parts in fields
        ]
        self.held = [tuple(part.held for part in parts) for parts in fields]

    def open_next(self, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """The open segment was closed, and another one follows."""
        self.version += 1
        self.first_ticks = np.append(self.first_ticks, first_tick)
        for field, (old, new) in enumerate(zip(closed, following, strict=True)):
            rows = np.array([old.record(), new.record()], np.int64)
            self.records[field] = np.concatenate([self.records[field][:-1], rows])
            self.held[field] = (*self.held[field][:-1], old.held, new.held)

    def drop(self, segments: int) -> None:
        """Forget the oldest segments."""
        self.version += 1
        self.first_ticks = self.first_ticks[segments:]
        self.records = [records[segments:] for records in self.records]
        self.held = [held[segments:] for held in self.held]

    def update(self, field: int, segment: int, part: AnyPart) -> None:
        """A part lies elsewhere now."""
        self.version += 1
        records = self.records[field].copy()
        records[segment] = part.record()
        self.records[field] = records
        held = list(self.held[field])
        held[segment] = part.held
        self.held[field] = tuple(held)


SEGMENT_BYTES = 16 * 2**20
"""Unique slices after which a segment closes."""
_CONTEXT_FACTOR = 8
"""A segment repeats what its first windows reach back to; it holds this many times as much."""
_SEGMENTS_OF_A_MEMORY = 16
"""A segment is freed as a whole, so it is never more than this share of the capacity."""
_FEWEST_TICKS = 16
_TABLE_BYTES = 32
"""What an open segment keeps of each slice beside its bytes: a hash, slots of a table, an entry of the log."""
_SPARED_WHILE_STUCK = 2
"""Segments that a budget sets aside for writing to disk, and that may be used while the disk takes nothing."""
_REPLAYED_TICKS = 64
"""A window found this early is applied to the open segment; later, from the next one on."""

_ALONE = ThreadPool(hands=1)

PartT = TypeVar("PartT", OpenPart, ClosedPart)


@dataclass(slots=True)
class Segment(Generic[PartT]):
    """The parts of all large fields over a run of ticks."""

    first_tick: int
    ticks: int
    parts: list[PartT]


class FieldBytes(NamedTuple):
    """Where the bytes of one field are."""

    raw: int
    sealed: int  # in memory: compressed slices, and the indexes of those on disk
    disk: int
    log: int


class Segments:
    """All segments of a memory's large fields: one open, the rest closed."""

    cursor_bytes = 4

    def __init__(
        self,
        kernels: Kernels,
        leaves: list[Leaf],
        lanes: int,
        capacity_ticks: int,
        tiers: Tiers | None = None,
        budget: Budget | None = None,
        first_tick: int = 0,
    ) -> None:
        self._kernels = kernels
        self._lanes = lanes
        self._tiers = tiers
        self._arenas = ArenaPool()
        self._ring_ticks = capacity_ticks + 1
        self._budget = budget
        self._most_raw = self._most_closed = NO_LIMIT  # what is left of the budget after `relieve`
        self.fixed_bytes = 0  # what the store's rings take, for the budget
        self._index = SegmentIndex()
        self._blocks_on_disk = 0
        self._awaited: list[SegmentFile] = []
        self._overhead_bytes = 0  # closed logs, slices that lie in logs, and the indexes of blocks on disk
        self._most_ticks = max(capacity_ticks // _SEGMENTS_OF_A_MEMORY, _FEWEST_TICKS)
        self._leaves: list[Leaf] = []
        self._windows: list[Window] = []
        self._cursors: list[Cursors] = []  # per field: (ring_ticks, lanes)
        self._searches = WindowSearches(lanes)
        self._limit_bytes = SEGMENT_BYTES
        self._sure_ticks = 0  # ticks that fit into the open segment whatever they bring
        self._closed: list[Segment[ClosedPart]] = []
        self._naming: dict[int, list[Segment[ClosedPart]]] = {}  # closed segments that name a block, by its identity
        self._open: Segment[OpenPart] = Segment(first_tick, 0, [])
        for field, leaf in enumerate(leaves):
            self._admit(leaf, Window.whole(leaf))
            self._searches.begin(field, leaf)
        self._rebuild_index()

    def append(self, tick: int, obs: list[Array], next_obs: list[Array]) -> None:
        """Write one tick of every field; close the open segment first if it is full."""
        if self._sure_ticks == 0:
            if self._is_full():
                self._roll(tick)
            self._sure_ticks = self._ticks_that_fit()
        self._sure_ticks -= 1
        for field in range(len(self._leaves)):
            self._append_field(field, tick, obs[field], next_obs[field])
        self._open.ticks += 1
        if not self._searches.under_way:
            return
        for field in self._searches.look(obs, next_obs):
            window = self._searches.end(field) or Window.whole(self._leaves[field])
            if window != self._windows[field]:
                self._apply(field, window, tick)

    def append_one(self, tick: int, obs: Array, next_obs: Array) -> None:
        """Write one tick where there is one field only."""
        if self._sure_ticks == 0 or self._searches.under_way:
            self.append(tick, [obs], [next_obs])
            return
        self._sure_ticks -= 1
        self._append_field(0, tick, obs, next_obs)
        self._open.ticks += 1

    @property
    def first_tick(self) -> int:
        """Oldest tick that any segment holds."""
        return self._closed[0].first_tick if self._closed else self._open.first_tick

    def evict_before(self, tick: int) -> None:
        """Drop the segments whose last tick is older than `tick`."""
        stale = 0
        for segment in self._closed:
            if segment.first_tick + segment.ticks > tick:
                break
            stale += 1
        if stale:
            self._evict(stale)

    def evict_oldest(self) -> int | None:
        """Drop the oldest segment and return the bytes that it had on disk; None if none is closed."""
        return self._evict(1) if self._closed else None

    def _evict(self, stale: int) -> int:
        """Drop the oldest segments and return the bytes that they had on disk."""
        leaving = [part for segment in self._closed[:stale] for part in segment.parts]
        del self._closed[:stale]
        self._index.drop(stale)
        gone: dict[int, SliceBlock] = {}
        for part in leaving:
            naming = self._naming[id(part.block)]
            del naming[0]
            if not naming:
                del self._naming[id(part.block)]
                gone[id(part.block)] = part.block
        for open_part in self._open.parts:
            gone.pop(id(open_part.block), None)
        self._overhead_bytes -= sum(part.overhead_bytes for part in leaving)
        disk_bytes = 0
        for block in gone.values():
            self._arenas.give_up(block.arena)
            self._blocks_on_disk -= block.is_on_disk
            self._overhead_bytes -= block.used_bytes if block.is_on_disk else 0
            disk_bytes += block.sealed.disk_bytes if block.sealed is not None else 0
        if self._tiers is not None:
            self._tiers.forget(gone.values())
        return disk_bytes

    def places(self, ticks: NDArray[np.int64], lane: NDArray[np.int64]) -> Places:
        """Find the observations of the given ticks and lanes."""
        slot = (ticks % self._ring_ticks) * self._lanes + lane
        segment = np.searchsorted(self._index.first_ticks, ticks, side="right") - 1
        return Places(
            records=list(self._index.records),
            segment=segment.astype(np.int32),
            cursors=[cursors.reshape(-1)[slot] for cursors in self._cursors],
            lane=lane.astype(np.int32),
            lanes=self._lanes,
            held=tuple(self._index.held),
            reads_files=self._blocks_on_disk > 0,
            awaits_files=self._awaits_files(),
        )

    def _awaits_files(self) -> bool:
        """Whether blocks lie in files that are not all here yet."""
        if self._awaited:
            self._awaited = [file for file in self._awaited if file.is_awaited]
        return bool(self._awaited)

    def adopt(self, tick: int, ticks: int, parts: Sequence[ClosedPart], cursors: list[Cursors]) -> None:
        """Take over a segment that was sealed elsewhere as the newest, from `tick` on; its blocks are its own.

        Args:
            cursors: Of its last ticks, field by field: as many as are still needed.
        """
        if self._open.ticks:
            self._roll(tick)
        coder, end = self._kernels.coder, tick + ticks
        adopted = []
        for field, (part, rows) in enumerate(zip(parts, cursors, strict=True)):
            if part.block.sealed is None:
                raise DamageError("a segment came whose slices are not sealed; report this")
            block = KeptBlock(part.block.slice_bytes, part.block.used, coder.adopt(part.block.sealed.coded))
            adopted.append(replace(part, block=block))
            put_rows(self._cursors[field], end - len(rows), rows)
        self._open.first_tick = end
        self._close(Segment(tick, ticks, adopted), self._open.parts, end)
        for field, part in enumerate(adopted):
            self._keep(field, part.window, part.block)
        self._settle(self.evict_oldest)

    def segment_at(self, tick: int) -> Segment[ClosedPart]:
        """Return the segment that holds a tick, as it stands."""
        number = int(np.searchsorted(self._index.first_ticks, tick, side="right")) - 1
        if number < len(self._closed):
            return self._closed[number]
        return Segment(self._open.first_tick, self._open.ticks, [part.closed() for part in self._open.parts])

    def can_admit(self, ticks: int) -> bool:
        """Whether the open segment still reaches back to the first of `ticks` ticks."""
        return not self._closed and ticks <= _REPLAYED_TICKS

    def admit(self, leaf: Leaf, window: Window, ticks: int) -> int:
        """Take a field on that was kept elsewhere so far; the caller then replays its ticks."""
        self._open.ticks = ticks
        self._admit(leaf, window)
        self._rebuild_index()
        return len(self._leaves) - 1

    def replay(self, field: int, tick: int, obs: Array, next_obs: Array) -> None:
        """Write a past tick of one field into the open segment; ticks come in order."""
        self._append_field(field, tick, obs, next_obs)

    @property
    def count(self) -> int:
        """Segments held, the open one among them."""
        return len(self._closed) + 1

    @property
    def overhead_bytes(self) -> int:
        """Bytes of closed segments that are neither sealed nor spilled: logs and indexes."""
        return self._overhead_bytes

    @property
    def segment_bytes(self) -> int:
        """Most that an open segment takes, with the tables that find its slices by their bytes."""
        most_in_a_tick = 2 * self._lanes * sum(leaf.nbytes for leaf in self._leaves)
        smallest = min((window.slice_bytes for window in self._windows), default=1)
        whole = self._limit_bytes + 2 * most_in_a_tick
        return whole + whole * _TABLE_BYTES // max(smallest, _TABLE_BYTES)

    @property
    def slice_bytes_per_tick(self) -> float:
        """Bytes of unique slices that a tick brings, as they come; nan before a segment was closed."""
        ticks = sum(segment.ticks for segment in self._closed)
        parts = [part for segment in self._closed for part in segment.parts if part.log is not None]
        return sum(part.new_slices * part.window.slice_bytes for part in parts) / ticks if ticks else float("nan")

    def field_bytes(self, field: int) -> FieldBytes:
        """Say where the bytes of one field are; a block counts once, whoever names it."""
        closed = {id(s.parts[field].block): s.parts[field].block for s in self._closed}
        part = self._open.parts[field]
        blocks = [block for key, block in closed.items() if key != id(part.block)]
        return FieldBytes(
            raw=part.used_bytes + sum(block.used_bytes for block in blocks if block.sealed is None),
            sealed=sum(block.used_bytes for block in blocks if block.sealed is not None),
            disk=sum(block.sealed.disk_bytes for block in blocks if block.sealed is not None),
            log=sum(part.log_bytes for part in self._parts(field)),
        )

    def arrays(self, field: int) -> list[Array]:
        """Return the arrays that one field lies in; an arena that two segments name comes once."""
        parts = self._parts(field)
        logs: list[Array] = [part.log for part in parts if part.log is not None]
        blocks = {id(part.block): part.block for part in parts if part.block is not None}
        slices = [array for block in blocks.values() for array in block.arrays()]
        direct = self._open.parts[field]
        return [*slices, *logs, self._cursors[field], *([direct.slices] if direct.block is None else [])]

    def spare_arrays(self) -> list[Array]:
        """Return arenas kept for the next segments."""
        return self._arenas.spare

    def describe(self, field: int) -> str:
        """Say what was found about a field, for people."""
        found = self._describe_window(field)
        sealed = [p.block.sealed for s in self._closed if (p := s.parts[field]).block.sealed is not None]
        if not sealed:
            return found
        kinds = sorted({s.codec.describe() for s in sealed})
        return f"{found}; {len(sealed)} of {len(self._closed)} segments sealed by {', '.join(kinds)}"

    def _describe_window(self, field: int) -> str:
        newest = [self._open] if self._open.ticks or not self._closed else self._closed[-1:]
        window = newest[0].parts[field].window
        fitting = [part for part in self._parts(field) if part.window == window]
        steps = sum(part.steps for part in fitting)
        if window.count == 1 or steps == 0:
            return window.describe()
        new = sum(part.new_slices for part in fitting)
        shared = max(window.count - new / steps, 0.0)
        return f"{window.describe()}; {shared:.1f} of {window.count} slices shared"

    def state(self) -> dict[str, Any]:
        """Return all that is held, as plain arrays that share memory with the segments."""
        open_parts = [part.closed() for part in self._open.parts]
        segments = [*self._closed, Segment(self._open.first_tick, self._open.ticks, open_parts)]
        return {
            "windows": self._windows,
            "cursors": [cursors[: self._touched_ticks] for cursors in self._cursors],
            "segments": [segment for segment in segments if segment.ticks],
        }

    def freeze(self) -> FrozenSegments:
        """Return what is held now; closed segments by reference, since they never change."""
        parts = [part.closed() for part in self._open.parts]
        return FrozenSegments(
            windows=list(self._windows),
            closed=list(self._closed),
            open=Segment(self._open.first_tick, self._open.ticks, parts),
            filling=[OpenSlices.of(part, closed) for part, closed in zip(self._open.parts, parts, strict=True)],
            searches=self._searches.state(),
        )

    def full_blocks(self, is_known: Callable[[SliceBlock], bool]) -> list[FullBlock]:
        """Return the blocks that are full and not about to be sealed, newest first, back to a segment that is known."""
        found: dict[int, FullBlock] = {}
        filling = {id(part.block) for part in self._open.parts}
        for segment in reversed(self._closed):
            new = [part for part in segment.parts if id(part.block) not in filling and not is_known(part.block)]
            if not new:
                break
            found |= {id(part.block): FullBlock(part.block, part.log is None) for part in new}
        return [full for full in found.values() if self._tiers is None or not self._tiers.is_changing(full.block)]

    def thaw(self, content: StoreContent, leaves: list[Leaf]) -> None:
        """Take over what was saved; the cursors follow, as columns."""
        nothing = [np.empty((0, self._lanes), np.uint32)] * len(leaves)
        self.restore({"windows": content.windows, "cursors": nothing, "segments": content.segments}, leaves)
        self._searches.restore(content.searches, leaves)

    def columns(self) -> list[Cursors]:
        """Return the rings of cursors, field by field."""
        return self._cursors

    def restore(self, state: dict[str, Any], leaves: list[Leaf]) -> None:
        """Take over what `state` returned elsewhere; the next tick opens a new segment."""
        self._leaves, self._windows, self._cursors = [], [], []
        self._closed = list(state["segments"])
        self._naming = {}
        for segment in self._closed:
            self._name(segment)
        end = self._closed[-1].first_tick + self._closed[-1].ticks if self._closed else 0
        self._open = Segment(end, 0, [])
        for field, leaf in enumerate(leaves):
            self._admit(leaf, state["windows"][field])
            past = state["cursors"][field]
            self._cursors[field][: len(past)] = past
        self._take_over_blocks()

    def _take_over_blocks(self) -> None:
        """Make the blocks of a loaded memory readable here, and subject to its budget."""
        self._overhead_bytes = sum(part.overhead_bytes for segment in self._closed for part in segment.parts)
        frozen: dict[int, FrozenBlock] = {}
        for segment in self._closed:
            for field, part in enumerate(segment.parts):
                block, carried = part.block, part.block.sealed
                if isinstance(carried, CarriedSlices):
                    block.sealed = self._kernels.coder.adopt(carried.coded)
                if part.log is not None and not block.is_on_disk:
                    frozen[id(block)] = FrozenBlock(field, self._leaves[field], part.window, block, self._lanes)
        blocks = {id(part.block): part.block for segment in self._closed for part in segment.parts}
        on_disk = [block for block in blocks.values() if block.is_on_disk]
        self._blocks_on_disk = len(on_disk)
        files = {id(extent.file): extent.file for block in on_disk if (extent := block.extent) is not None}
        self._awaited = [file for file in files.values() if file.is_awaited]
        self._overhead_bytes += sum(block.used_bytes for block in on_disk)
        self._rebuild_index()
        if self._tiers is not None:
            for each in frozen.values():
                self._tiers.keep(each)
            self._settle(self.evict_oldest)

    @property
    def _touched_ticks(self) -> int:
        return min(self._open.first_tick + self._open.ticks, self._ring_ticks)

    def _append_field(self, field: int, tick: int, obs: Array, next_obs: Array) -> None:
        part = self._open.parts[field]
        log = part.log
        part.append(obs, next_obs, self._cursors[field][tick % self._ring_ticks])
        if part.log is not log:
            self._index.update(field, -1, part)

    def _admit(self, leaf: Leaf, window: Window) -> None:
        self._sure_ticks = 0
        self._leaves.append(leaf)
        self._windows.append(window)
        context = self._lanes * sum(leaf.nbytes for leaf in self._leaves)
        most = self._budget.segment_bytes if self._budget is not None else 1 << 62
        self._limit_bytes = min(max(SEGMENT_BYTES, _CONTEXT_FACTOR * context), most)
        ring = reserve(self._ring_ticks * self._lanes * self.cursor_bytes)
        self._cursors.append(ring.view(np.uint32).reshape(-1, self._lanes))
        self._open.parts.append(self._new_part(len(self._leaves) - 1, replayed_ticks=self._open.ticks))

    def _new_part(self, field: int, block: SliceBlock | None = None, replayed_ticks: int = 0) -> OpenPart:
        window = self._windows[field]
        most_in_a_tick = 2 * self._lanes * self._leaves[field].nbytes
        arena_bytes = self._limit_bytes + (2 + replayed_ticks) * most_in_a_tick
        if block is None and not lies_direct(window):
            block = self._kernels.new_block(window.slice_bytes, self._arenas.take(arena_bytes))
        return self._kernels.new_part(window, self._lanes, block, arena_bytes)

    def _is_full(self) -> bool:
        parts = self._open.parts
        return (
            self._open.ticks >= self._most_ticks
            or sum(part.added_bytes for part in parts) >= self._limit_bytes
            or not all(part.has_room() for part in parts)
        )

    def _ticks_that_fit(self) -> int:
        """Count the ticks that fit whatever they bring, so that nobody has to look at each."""
        parts = self._open.parts
        bytes_left = self._limit_bytes - sum(part.added_bytes for part in parts)
        most_in_a_tick = 2 * sum(part.lanes * part.obs_bytes for part in parts)
        by_bytes = bytes_left // max(most_in_a_tick, 1)
        by_room = min((part.ticks_that_fit() for part in parts), default=0)
        return max(1, min(self._most_ticks - self._open.ticks, by_bytes, by_room))

    def _roll(self, tick: int) -> None:
        """Close the open segment and open the next one at `tick`."""
        full = self._open
        following = []
        for field, part in enumerate(full.parts):
            fits = part.window.count > 1 and part.broken_steps * 2 < part.steps
            if not fits:
                self._searches.consider(field, self._leaves[field])
            following.append(self._next_part(field, part))
        self._open = Segment(tick, 0, following)
        self._close(Segment(full.first_tick, full.ticks, [part.closed() for part in full.parts]), following, tick)
        self._settle(self.evict_oldest)

    def _close(self, closed: Segment[ClosedPart], following: list[OpenPart], tick: int) -> None:
        """Append a closed segment; the open one, which consists of `following`, begins at `tick`."""
        self._sure_ticks = 0
        self._closed.append(closed)
        self._name(closed)
        self._overhead_bytes += sum(part.overhead_bytes for part in closed.parts)
        self._index.open_next(tick, closed.parts, following)

    def _name(self, closed: Segment[ClosedPart]) -> None:
        for part in closed.parts:
            self._naming.setdefault(id(part.block), []).append(closed)

    def _next_part(self, field: int, part: OpenPart) -> OpenPart:
        """Open a part after `part`, in its block where that spares repeating slices."""
        block = part.block_to_go_on_in() if part.window == self._windows[field] else None
        if block is not None:
            # A block goes with its last part: one that went on for ever would keep what was evicted.
            block.steps_before += part.steps
            evicting = block.steps_before >= (self._ring_ticks - 1) * self._lanes
            if evicting or block.used_bytes >= self._limit_bytes:
                block = None
        if block is None and part.block is not None:
            self._freeze(field, part.window, part.block)
        return self._new_part(field, block)

    def _freeze(self, field: int, window: Window, block: SliceBlock) -> None:
        """Close a block: it may be sealed from now on."""
        block.freeze()
        self._keep(field, window, block)

    def _keep(self, field: int, window: Window, block: SliceBlock) -> None:
        if self._tiers is not None:
            self._tiers.keep(FrozenBlock(field, self._leaves[field], window, block, self._lanes))

    def seal(self, block: SliceBlock, sealed: SealedSlices) -> None:
        """Change over to a block's next form; places that were handed out keep the one before."""
        block.replace_by(sealed)
        naming = self._naming.get(id(block), [])
        for segment in naming:
            number = int(np.searchsorted(self._index.first_ticks, segment.first_tick))
            for field, part in enumerate(segment.parts):
                if part.block is block:
                    self._index.update(field, number, part)
        if naming and block.is_on_disk:  # it may have been evicted while it was written
            self._blocks_on_disk += 1
            self._overhead_bytes += block.used_bytes

    def take_back(self, block: SliceBlock, sealed: SealedSlices | None) -> None:
        """Go on with a block whose turn at the sealer is over, in its next form if it has one."""
        if sealed is not None:
            self.seal(block, sealed)
        if self._tiers is not None:
            self._tiers.take_back(block)
        # Nothing leaves beside the caller's back: ids that it was just told of must stay good until it adds more.
        self._settle(lambda: None)

    def _settle(self, evict: Callable[[], int | None]) -> None:
        """Have blocks sealed, spilled and evicted as the budget says."""
        if self._tiers is not None and self._budget is not None:
            closed = min(self._closed_allowed(self._budget), self._most_closed)
            at_most = closed + _SPARED_WHILE_STUCK * self.segment_bytes
            self._tiers.settle(Allowance(min(self._budget.raw_bytes, self._most_raw, closed), closed, at_most), evict)

    def relieve(self, nbytes: int) -> None:
        """Hold that much less in memory from now on: raw blocks are sealed, and spilled where there is a disk tier.

        Nothing is evicted for it. It takes effect as the worker gets to it.
        """
        tiers = self._tiers
        if tiers is None:
            return
        self._most_raw = min(self._most_raw, max(tiers.raw_bytes - nbytes, 0))
        if tiers.spills:
            self._most_closed = min(self._most_closed, max(tiers.held_bytes - nbytes, 0))
        self._settle(lambda: None)

    def _closed_allowed(self, budget: Budget) -> int:
        return budget.closed_allowed(self.fixed_bytes, self._overhead_bytes, self.segment_bytes)

    @property
    def ticks_that_fit(self) -> int | None:
        """How many ticks the budget's limit holds in memory; None without one, or before it is known."""
        if self._tiers is None or self._budget is None or self._budget.limit is None:
            return None
        shrinks_to, ticks = self._tiers.shrinks_to, sum(segment.ticks for segment in self._closed)
        if shrinks_to is None or ticks == 0:
            return None
        overhead = self._overhead_bytes / ticks
        room = self._closed_allowed(self._budget) + self._overhead_bytes
        return int(room / max(self.slice_bytes_per_tick * shrinks_to + overhead, 1e-9))

    def _apply(self, field: int, window: Window, tick: int) -> None:
        """Cut a field in a new way: from now on, or from the open segment's first tick on."""
        self._windows[field] = window
        if self._open.ticks > _REPLAYED_TICKS:
            self._roll(tick + 1)
            return
        self._sure_ticks = 0
        old = self._open.parts[field]
        self._open.parts[field] = self._new_part(field, replayed_ticks=self._open.ticks)
        held_from = tick + 2 - self._ring_ticks  # cursors of older ticks were overwritten
        for past in range(max(self._open.first_tick, held_from), tick + 1):
            self.replay(field, past, *self._read_back(field, old, past))
        self._index.update(field, -1, self._open.parts[field])
        # The segments before may have begun the block that is left here.
        if old.block is not None and any(segment.parts[field].block is old.block for segment in self._closed):
            self._freeze(field, old.window, old.block)
            self._settle(self.evict_oldest)

    def _read_back(self, field: int, part: OpenPart, tick: int) -> tuple[Bytes, Bytes]:
        """Read one tick of one field out of a part that is being replaced."""
        shape = (self._lanes, self._leaves[field].nbytes)
        obs, next_obs = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
        places = Places(
            records=[np.array([part.record()], np.int64)],
            segment=np.zeros(self._lanes, np.int32),
            cursors=[self._cursors[field][tick % self._ring_ticks].copy()],
            lane=np.arange(self._lanes, dtype=np.int32),
            lanes=self._lanes,
            held=((part.held,),),
        )
        self._kernels.gather(places, 0, obs, next_obs, _ALONE)
        return obs, next_obs

    def _parts(self, field: int) -> list[OpenPart | ClosedPart]:
        closed = [segment.parts[field] for segment in self._closed]
        return [*closed, self._open.parts[field]]

    def parts(self, field: int) -> list[OpenPart | ClosedPart]:
        """Return what all segments hold of one field, oldest first."""
        return self._parts(field)

    @property
    def version(self) -> int:
        """Of the tables that readers use: another one when segments or their blocks are others."""
        return self._index.version

    def _rebuild_index(self) -> None:
        first_ticks = [*(segment.first_tick for segment in self._closed), self._open.first_tick]
        self._index.rebuild(first_ticks, [self._parts(field) for field in range(len(self._leaves))])

"""Placement: which blocks stay raw, which are compressed, which move to disk, and which ticks are evicted.

`Holdings` are the sizes of everything that is held. `plan` is a pure function of the holdings and of the budget. It has
no state, no threads and no clock, so its tests are tables of inputs and outputs. The store calls it after every closed
segment and carries the plan out. `plan` looks only at sums and at the blocks and segments that it chooses, so it takes
the same time for ten segments and for ten thousand.

A plan is safe to repeat, because the compactor ignores blocks that it already works on. Evictions depend only on known
sizes. A block that is about to be compressed counts as zero bytes until its compressed size is known. Until then,
`Budget.reserved_bytes` covers the block.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from holdall.store.budget import Budget

_ASSUMED_RATIO = 0.5
"""Compressed size divided by raw size. Assumed until the first block is compressed."""

Key = TypeVar("Key", bound=Hashable)


class Form(Enum):
    """Where the bytes of a block are, whether they are compressed, and whether the compactor works on them."""

    OPEN = "open"  # In memory. Slices may still be added, and `Budget.reserved_bytes` covers the block.
    RAW = "raw"  # In memory, uncompressed.
    COMPRESSING = "compressing"  # In memory, uncompressed. The compactor has a job to compress it.
    KEPT = "kept"  # In memory, uncompressed, because compression failed.
    CODED = "coded"  # In memory, compressed.
    MOVING = "moving"  # In memory, compressed. The compactor has a job to move it to disk.
    FILED = "filed"  # On disk, compressed.


@dataclass(frozen=True, slots=True)
class BlockState:
    """Form and sizes of a block."""

    form: Form
    raw_bytes: int  # Bytes of the uncompressed block.
    memory_bytes: int  # Bytes of RAM that the block takes now.
    disk_bytes: int = 0  # Bytes of the block on disk.
    file: int | None = None  # Number of the spill file. A file is deleted when all of its blocks are evicted.
    field: int = 0  # Number of the observation leaf.

    @property
    def is_measured(self) -> bool:
        """Whether the compressed size is known."""
        return self.form in (Form.CODED, Form.MOVING, Form.FILED)

    @property
    def coded_bytes(self) -> int:
        """Bytes of a compressed block, in memory and on disk."""
        return self.memory_bytes + self.disk_bytes


@dataclass(frozen=True, slots=True)
class _SegmentState(Generic[Key]):
    end_tick: int  # Tick after the segment's last one.
    ticks: int
    rows_bytes: int
    keys: tuple[Key, ...]  # Blocks that the segment needs.


class Holdings(Generic[Key]):
    """Sizes of all closed segments and of their blocks, oldest first. Blocks are named by keys.

    Attributes:
        segments: The segments, oldest first.
        rows_bytes: Bytes of rows and logs. Only eviction frees them.
        block_bytes: Bytes of RAM of all blocks, by form. 0 for open blocks, which `Budget.reserved_bytes` covers.
        raw_bytes: Bytes that all blocks have without compression.
        ticks: Ticks of all segments.
    """

    def __init__(self) -> None:
        self.segments: deque[_SegmentState[Key]] = deque()
        self.rows_bytes = 0
        self.block_bytes = dict.fromkeys(Form, 0)
        self.raw_bytes = 0
        self.ticks = 0
        self._states: dict[Key, BlockState] = {}
        self._keys_by_form: dict[Form, dict[Key, None]] = {form: {} for form in Form}
        self._end_ticks: dict[Key, int] = {}  # By block: the tick after the last tick that needs the block.
        self._measured_raw_bytes = 0
        self._measured_coded_bytes = 0
        self._measured_fields: set[int] = set()
        self._fields: set[int] = set()
        self._blocks_by_file: Counter[int] = Counter()
        self._bytes_by_file: Counter[int] = Counter()

    @property
    def memory_bytes(self) -> int:
        """Bytes of RAM of all rows, logs and blocks, except open blocks."""
        return self.rows_bytes + sum(self.block_bytes.values())

    @property
    def ratio(self) -> float:
        """Compressed size divided by raw size, of all blocks that were compressed."""
        if self._measured_raw_bytes == 0:
            return _ASSUMED_RATIO
        return self._measured_coded_bytes / self._measured_raw_bytes

    @property
    def unmeasured_fields(self) -> set[int]:
        """Fields of which no block was compressed yet."""
        return self._fields - self._measured_fields

    def __contains__(self, key: Key) -> bool:
        return key in self._states

    def __getitem__(self, key: Key) -> BlockState:
        """Return the state of a block."""
        return self._states[key]

    @property
    def expected_bytes(self) -> int:
        """Bytes of RAM after the compactor has done its jobs. An estimate while blocks are still to be compressed."""
        saved_bytes = (1.0 - self.ratio) * self.block_bytes[Form.COMPRESSING]
        return self.memory_bytes - int(saved_bytes) - self.block_bytes[Form.MOVING]

    @property
    def known_bytes(self) -> int:
        """Bytes of RAM without the blocks that the compactor has a job for."""
        return self.memory_bytes - self.block_bytes[Form.COMPRESSING] - self.block_bytes[Form.MOVING]

    def list_blocks(self, form: Form) -> Collection[Key]:
        """Return the blocks of one form, in the order in which they took that form."""
        return self._keys_by_form[form].keys()

    def find_end_tick(self, key: Key) -> int:
        """Return the tick after the last tick that needs the block."""
        return self._end_ticks[key]

    def measure_file(self, file: int) -> tuple[int, int]:
        """Return how many blocks a spill file has, and their bytes."""
        return self._blocks_by_file[file], self._bytes_by_file[file]

    def add_segment(self, end_tick: int, ticks: int, rows_bytes: int, blocks: Mapping[Key, BlockState]) -> None:
        """Append a closed segment. The state in `blocks` replaces the older state of a block."""
        self.segments.append(_SegmentState(end_tick, ticks, rows_bytes, tuple(blocks)))
        self.rows_bytes += rows_bytes
        self.ticks += ticks
        for key, state in blocks.items():
            self._end_ticks[key] = end_tick
            self._fields.add(state.field)
            self.change_block(key, state)

    def change_block(self, key: Key, state: BlockState) -> None:
        """Replace the state of a block."""
        if key in self._states:
            self._forget(key)
        self._states[key] = state
        self._keys_by_form[state.form][key] = None
        self.raw_bytes += state.raw_bytes
        if state.form is not Form.OPEN:
            self.block_bytes[state.form] += state.memory_bytes
        if state.is_measured:
            self._measured_raw_bytes += state.raw_bytes
            self._measured_coded_bytes += state.coded_bytes
            self._measured_fields.add(state.field)
        if state.file is not None:
            self._blocks_by_file[state.file] += 1
            self._bytes_by_file[state.file] += state.disk_bytes

    def evict(self, before_tick: int) -> list[Key]:
        """Remove the segments that end before `before_tick`. Return the blocks that no remaining segment needs."""
        evicted: list[Key] = []
        while self.segments and self.segments[0].end_tick <= before_tick:
            segment = self.segments.popleft()
            self.rows_bytes -= segment.rows_bytes
            self.ticks -= segment.ticks
            evicted += [key for key in segment.keys if self._end_ticks[key] == segment.end_tick]
        for key in evicted:
            self._forget(key)
            del self._end_ticks[key]
        return evicted

    def _forget(self, key: Key) -> None:
        state = self._states.pop(key)
        del self._keys_by_form[state.form][key]
        self.raw_bytes -= state.raw_bytes
        if state.form is not Form.OPEN:
            self.block_bytes[state.form] -= state.memory_bytes
        if state.is_measured:
            self._measured_raw_bytes -= state.raw_bytes
            self._measured_coded_bytes -= state.coded_bytes
        if state.file is not None:
            self._blocks_by_file[state.file] -= 1
            self._bytes_by_file[state.file] -= state.disk_bytes


@dataclass(frozen=True, slots=True)
class PlacementPlan(Generic[Key]):
    """Work that brings a memory within its budget."""

    to_compress: tuple[Key, ...] = ()  # Blocks to compress, oldest first.
    to_spill: tuple[Key, ...] = ()  # Compressed blocks to move to disk, oldest first.
    evict_before_tick: int | None = None  # Evict older ticks first, and then do the rest. None: no eviction.
    freed_disk_bytes: int = 0  # Disk space that the eviction frees.


def plan(
    holdings: Holdings[Key], budget: Budget, disk_room_bytes: int | None = None, *, can_evict: bool = True
) -> PlacementPlan[Key]:
    """Return the least work after which `holdings` fit into `budget`.

    Blocks are compressed before they are moved to disk, and moved to disk before ticks are evicted.

    Args:
        disk_room_bytes: Free bytes of the disk. Blocks that are being moved will take some of them. None: no known
            limit.
        can_evict: Whether ticks may be evicted.
    """
    room_bytes = budget.target_bytes
    to_compress = _choose_to_compress(holdings, budget, room_bytes)
    disk_room = disk_room_bytes if budget.can_spill else 0
    if disk_room is not None:
        disk_room = max(disk_room - holdings.block_bytes[Form.MOVING], 0)
    eviction = _Eviction(None, 0, 0)
    if budget.max_held_bytes is not None and can_evict:
        eviction = _choose_eviction(holdings, to_compress, budget.max_held_bytes, disk_room)
    evict_before = eviction.before_tick
    if evict_before is not None:
        to_compress = [key for key in to_compress if holdings.find_end_tick(key) > evict_before]
    to_spill: list[Key] = []
    if room_bytes is not None and budget.can_spill:
        saved_bytes = (1.0 - holdings.ratio) * sum(holdings[key].raw_bytes for key in to_compress)
        excess_bytes = holdings.expected_bytes - eviction.freed_bytes - int(saved_bytes) - room_bytes
        if disk_room is not None:
            disk_room += eviction.freed_disk_bytes
        to_spill = _choose_to_spill(holdings, evict_before, excess_bytes, disk_room)
    return PlacementPlan(tuple(to_compress), tuple(to_spill), evict_before, eviction.freed_disk_bytes)


def has_room_for_speed(holdings: Holdings[Key], budget: Budget) -> bool:
    """Return whether there is room for blocks that a fast codec makes larger.

    True without a limit. With a limit, the raw blocks and the free bytes must make up two segments.
    """
    if budget.max_held_bytes is None:
        return True
    free_bytes = budget.max_held_bytes - holdings.expected_bytes
    return holdings.block_bytes[Form.RAW] + free_bytes >= 2 * budget.max_segment_bytes


def count_ticks_that_fit(holdings: Holdings[Key], budget: Budget) -> int | None:
    """Return how many ticks like the held ones fit into the limit.

    None if there is no limit, or a disk tier for everything above the limit. Also None if no tick is held, or if a
    field has no compressed block yet.
    """
    if budget.max_held_bytes is None or budget.can_spill:
        return None
    if holdings.ticks == 0 or holdings.unmeasured_fields:
        return None
    tick_bytes = (holdings.rows_bytes + holdings.ratio * holdings.raw_bytes) / holdings.ticks
    return int(budget.max_held_bytes / max(tick_bytes, 1e-9))


def _choose_to_compress(holdings: Holdings[Key], budget: Budget, room_bytes: int | None) -> list[Key]:
    """Return the raw blocks to compress, oldest first.

    Afterwards, at most `budget.max_raw_bytes` are uncompressed, and at most `room_bytes` are in memory if possible.

    With a limit, the first block of every field is compressed at once, because its compressed size tells how many
    transitions fit.
    """
    raw_bytes = holdings.block_bytes[Form.RAW]
    expected_bytes = holdings.expected_bytes
    saved_share = 1.0 - holdings.ratio
    unmeasured = set()
    if budget.max_bytes is not None:
        compressing = {holdings[key].field for key in holdings.list_blocks(Form.COMPRESSING)}
        unmeasured = holdings.unmeasured_fields - compressing
    chosen = []
    for key in holdings.list_blocks(Form.RAW):
        is_too_large = room_bytes is not None and expected_bytes > room_bytes
        is_too_raw = raw_bytes > budget.max_raw_bytes
        state = holdings[key]
        if not (is_too_large or is_too_raw or unmeasured):
            break
        if not (is_too_large or is_too_raw or state.field in unmeasured):
            continue
        chosen.append(key)
        unmeasured.discard(state.field)
        raw_bytes -= state.raw_bytes
        expected_bytes -= int(saved_share * state.raw_bytes)
    return chosen


def _choose_to_spill(
    holdings: Holdings[Key], evict_before: int | None, excess_bytes: int, disk_room_bytes: int | None
) -> list[Key]:
    """Return compressed blocks to move to disk, oldest first: enough to free `excess_bytes` if the disk has room."""
    chosen: list[Key] = []
    for key in holdings.list_blocks(Form.CODED):
        if excess_bytes <= 0:
            break
        if evict_before is not None and holdings.find_end_tick(key) <= evict_before:
            continue
        nbytes = holdings[key].memory_bytes
        if disk_room_bytes is not None:
            if nbytes > disk_room_bytes:
                break
            disk_room_bytes -= nbytes
        chosen.append(key)
        excess_bytes -= nbytes
    return chosen


@dataclass(frozen=True, slots=True)
class _Eviction:
    before_tick: int | None  # First tick that is kept. None: no eviction.
    freed_bytes: int  # Bytes of RAM.
    freed_disk_bytes: int


def _choose_eviction(
    holdings: Holdings[Key], to_compress: Collection[Key], room_bytes: int, disk_room_bytes: int | None
) -> _Eviction:
    """Return the smallest eviction after which all other ticks fit into memory and on the disk.

    Blocks in `to_compress` count as zero bytes, as those that the compactor has a job for.
    """
    uncounted = set(to_compress)
    excess_bytes = holdings.known_bytes - sum(holdings[key].raw_bytes for key in uncounted) - room_bytes
    coded_bytes = holdings.block_bytes[Form.CODED]
    next_spill_bytes = next((holdings[key].memory_bytes for key in holdings.list_blocks(Form.CODED)), 0)
    freed_bytes = 0
    freed_disk_bytes = 0
    before_tick: int | None = None
    evicted_by_file: Counter[int] = Counter()
    for segment in holdings.segments:
        spillable_bytes = coded_bytes
        if disk_room_bytes is not None:
            disk_room = disk_room_bytes + freed_disk_bytes
            # A block is moved whole, so room for a part of a block is useless.
            spillable_bytes = min(coded_bytes, disk_room) if disk_room >= next_spill_bytes else 0
        if excess_bytes <= spillable_bytes:
            break
        before_tick = segment.end_tick
        excess_bytes -= segment.rows_bytes
        freed_bytes += segment.rows_bytes
        for key in segment.keys:
            state = holdings[key]
            if holdings.find_end_tick(key) != segment.end_tick or state.form is Form.OPEN:
                continue
            freed_bytes += state.memory_bytes
            if key not in uncounted and state.form not in (Form.COMPRESSING, Form.MOVING):
                excess_bytes -= state.memory_bytes
            if state.form is Form.CODED:
                coded_bytes -= state.memory_bytes
            if state.file is not None:
                evicted_by_file[state.file] += 1
                blocks, nbytes = holdings.measure_file(state.file)
                if evicted_by_file[state.file] == blocks:
                    freed_disk_bytes += nbytes
    return _Eviction(before_tick, freed_bytes, freed_disk_bytes)

"""Placement: which blocks stay raw, which are compressed, which move to disk, and which ticks are evicted.

`plan` is a pure function of what is held and of the budget. It has no state, no threads and no clock, so its tests are
tables of inputs and outputs. The store calls it after every closed segment and carries the plan out.

The plan is safe to repeat. A block that the compactor has not finished yet is listed again, and the compactor ignores
it. Ticks are only evicted because of sizes that are known: a block that is about to be compressed counts as nothing
until its compressed size is known. `Budget.reserved_bytes` covers it in the meantime.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from holdall.errors import ArgumentError
from holdall.store.tuning import Tuning
from holdall.units import format_bytes

_ASSUMED_RATIO = 0.5
"""Compressed size over raw size, as long as no block was compressed."""
_MIN_TICKS_PER_SEGMENT = 2
"""Ticks that fit into the smallest segment, even if none of their observations repeats another one."""


class Form(Enum):
    """Where the bytes of a block are."""

    RAW = "raw"  # In memory, uncompressed.
    CODED = "coded"  # In memory, compressed.
    FILED = "filed"  # On disk, compressed.
    ROWS = "rows"  # In memory: rows and logs of a segment, which leave memory only by eviction.


@dataclass(frozen=True, slots=True)
class BlockState:
    """What placement knows of a block, or of the rows of a segment."""

    first_tick: int  # First tick that needs the block.
    end_tick: int  # Tick after the last one that needs the block.
    raw_bytes: int  # Bytes of the uncompressed block.
    coded_bytes: int | None = None  # Bytes after compression. None: not tried. `raw_bytes`: compression did not help.
    form: Form = Form.RAW
    is_open: bool = False  # Whether ticks may still be added. Open blocks are neither compressed nor evicted.
    file: int | None = None  # Number of the spill file. The disk is freed when all blocks of a file are evicted.

    @property
    def memory_bytes(self) -> int:
        """Bytes of RAM that the block takes now."""
        if self.form is Form.FILED:
            return 0
        if self.form is Form.CODED:
            return self.coded_bytes or 0
        return self.raw_bytes

    @property
    def can_compress(self) -> bool:
        """Whether the block is closed, raw, and was not tried before."""
        return self.form is Form.RAW and not self.is_open and self.coded_bytes is None


@dataclass(frozen=True, slots=True)
class Budget:
    """How much RAM a memory may use, for which purpose. Make one with `limited`, `automatic` or `least`."""

    max_bytes: int | None  # Hard limit of everything in RAM. None: nothing is evicted before the capacity is reached.
    max_raw_bytes: int  # Closed blocks that may stay uncompressed.
    max_resident_bytes: int | None  # Closed blocks in RAM before the oldest move to disk. None: no such limit.
    max_queued_bytes: int  # Raw blocks that may wait for the compactor before `add` waits.
    max_segment_bytes: int  # Blocks of one segment together.
    reserved_bytes: int  # Part of `max_bytes` for the open segment, blocks in transit, and batches.
    can_spill: bool  # Whether there is a disk tier.

    @classmethod
    def limited(cls, max_bytes: int, *, can_spill: bool, tick_bytes: int, tuning: Tuning) -> Budget:
        """Return the budget of a memory with a hard limit.

        `tick_bytes` are the bytes of one tick if none of its observations repeats another one. Raise ArgumentError if
        the smallest useful segments do not fit into `max_bytes`.
        """
        min_bytes = tuning.segments_per_limit * _MIN_TICKS_PER_SEGMENT * tick_bytes
        if max_bytes < min_bytes:
            raise ArgumentError(
                f"budget ({format_bytes(max_bytes)}) is too small. Segments of {_MIN_TICKS_PER_SEGMENT} ticks need "
                f"{format_bytes(_MIN_TICKS_PER_SEGMENT * tick_bytes)}, and {tuning.segments_per_limit} of them must "
                f"fit. Pass at least {min_bytes} bytes ({format_bytes(min_bytes)}), or use fewer environments."
            )
        segment_bytes = min(tuning.block_bytes, max_bytes // tuning.segments_per_limit)
        staging_bytes = min(max_bytes // tuning.staging_divisor, tuning.max_staging_bytes)
        return cls(
            max_bytes=max_bytes,
            max_raw_bytes=max_bytes,
            max_resident_bytes=None,
            max_queued_bytes=tuning.min_queued_segments * segment_bytes,
            max_segment_bytes=segment_bytes,
            reserved_bytes=tuning.segments_in_transit * segment_bytes + staging_bytes,
            can_spill=can_spill,
        )

    @classmethod
    def automatic(cls, available_bytes: int, *, can_spill: bool, tuning: Tuning) -> Budget:
        """Return the budget "auto": the newest blocks stay raw in a share of the memory that is available now."""
        return cls._unlimited(
            available_bytes,
            max_raw_bytes=available_bytes // tuning.auto_raw_divisor,
            max_resident_bytes=available_bytes // tuning.auto_resident_divisor,
            can_spill=can_spill,
            tuning=tuning,
        )

    @classmethod
    def least(cls, available_bytes: int, *, can_spill: bool, tuning: Tuning) -> Budget:
        """Return the budget None: every block is compressed, and moved to disk if there is a disk tier."""
        return cls._unlimited(
            available_bytes, max_raw_bytes=0, max_resident_bytes=0, can_spill=can_spill, tuning=tuning
        )

    @classmethod
    def _unlimited(
        cls, available_bytes: int, *, max_raw_bytes: int, max_resident_bytes: int, can_spill: bool, tuning: Tuning
    ) -> Budget:
        queued_bytes = min(available_bytes // tuning.queue_divisor, tuning.max_queued_bytes)
        return cls(
            max_bytes=None,
            max_raw_bytes=max_raw_bytes,
            max_resident_bytes=max_resident_bytes if can_spill else None,
            max_queued_bytes=max(queued_bytes, tuning.min_queued_segments * tuning.block_bytes),
            max_segment_bytes=tuning.block_bytes,
            reserved_bytes=0,
            can_spill=can_spill,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Work that brings what is held within the budget. Positions are those of the blocks given to `plan`."""

    to_compress: tuple[int, ...] = ()  # Positions of blocks to compress, oldest first.
    to_spill: tuple[int, ...] = ()  # Positions of compressed blocks to move to disk, oldest first.
    evict_before_tick: int | None = None  # Ticks before this one are evicted first. None: no tick is evicted.
    is_disk_full: bool = False  # Whether ticks are evicted although there is a disk tier, because the disk is full.


def plan(blocks: Sequence[BlockState], other_bytes: int, budget: Budget, disk_room_bytes: int | None = None) -> Plan:
    """Return the least work after which `blocks` fit into `budget`.

    Blocks are compressed before they are moved to disk, and moved to disk before ticks are evicted.

    Args:
        other_bytes: Bytes in RAM that neither compression nor eviction frees.
        disk_room_bytes: Bytes that the disk takes. None: as many as needed.
    """
    oldest_first = sorted(range(len(blocks)), key=lambda position: blocks[position].first_tick)
    room = _resident_room(other_bytes, budget)
    to_compress = _choose_to_compress(blocks, oldest_first, budget, room)
    if room is None:
        return Plan(to_compress=to_compress)
    disk = disk_room_bytes if budget.can_spill else 0
    evict_before = None
    if budget.max_bytes is not None:
        evict_before = _choose_eviction(blocks, oldest_first, set(to_compress), room, disk)
    held = [position for position in oldest_first if not _is_evicted(blocks[position], evict_before)]
    kept = set(held)
    expected_bytes = _expected_bytes(blocks, held, set(to_compress))
    if disk is not None:
        disk += _freed_disk_bytes(blocks, evict_before)
    return Plan(
        to_compress=tuple(position for position in to_compress if position in kept),
        to_spill=_choose_to_spill(blocks, held, expected_bytes - room, disk),
        evict_before_tick=evict_before,
        is_disk_full=budget.can_spill and evict_before is not None,
    )


def _resident_room(other_bytes: int, budget: Budget) -> int | None:
    """Return the bytes of RAM for all `blocks`. None: as many as they need."""
    if budget.max_bytes is not None:
        return max(budget.max_bytes - budget.reserved_bytes - other_bytes, 0)
    return budget.max_resident_bytes


def _choose_to_compress(
    blocks: Sequence[BlockState], oldest_first: Iterable[int], budget: Budget, room: int | None
) -> tuple[int, ...]:
    """Return the oldest raw blocks: as many as are too many uncompressed, or too many in memory."""
    candidates = [position for position in oldest_first if blocks[position].can_compress]
    raw_bytes = sum(blocks[position].raw_bytes for position in candidates)
    resident_bytes = sum(block.memory_bytes for block in blocks)
    saved_share = 1.0 - _compression_ratio(blocks)
    chosen = []
    for position in candidates:
        is_too_large = room is not None and resident_bytes > room
        if raw_bytes <= budget.max_raw_bytes and not is_too_large:
            break
        chosen.append(position)
        raw_bytes -= blocks[position].raw_bytes
        resident_bytes -= int(saved_share * blocks[position].raw_bytes)
    return tuple(chosen)


def _compression_ratio(blocks: Sequence[BlockState]) -> float:
    """Return the compressed size over the raw size of all blocks that were compressed."""
    known = [block for block in blocks if block.coded_bytes is not None and block.form is not Form.ROWS]
    raw_bytes = sum(block.raw_bytes for block in known)
    if raw_bytes == 0:
        return _ASSUMED_RATIO
    return sum(block.coded_bytes or 0 for block in known) / raw_bytes


def _expected_bytes(blocks: Sequence[BlockState], held: Iterable[int], compressing: set[int]) -> int:
    """Return the bytes in memory after compression, which are an estimate for blocks that were not compressed yet."""
    ratio = _compression_ratio(blocks)
    expected = 0
    for position in held:
        block = blocks[position]
        if position in compressing:
            expected += int(ratio * block.raw_bytes)
        else:
            expected += block.memory_bytes
    return expected


def _choose_to_spill(
    blocks: Sequence[BlockState], held: Iterable[int], excess_bytes: int, disk_room_bytes: int | None
) -> tuple[int, ...]:
    """Return the oldest compressed blocks: as many as exceed the memory and fit on the disk."""
    chosen = []
    for position in held:
        block = blocks[position]
        if excess_bytes <= 0:
            break
        if block.form is not Form.CODED or block.is_open:
            continue
        if disk_room_bytes is not None:
            if block.memory_bytes > disk_room_bytes:
                break
            disk_room_bytes -= block.memory_bytes
        chosen.append(position)
        excess_bytes -= block.memory_bytes
    return tuple(chosen)


def _choose_eviction(
    blocks: Sequence[BlockState],
    oldest_first: Sequence[int],
    compressing: set[int],
    room: int,
    disk_room_bytes: int | None,
) -> int | None:
    """Return the first tick that stays. None: every tick can stay.

    Memory is only freed together with a whole block, so the result is the end of a block.
    """

    def fits(evict_before: int | None) -> bool:
        held = [position for position in oldest_first if not _is_evicted(blocks[position], evict_before)]
        known_bytes = sum(blocks[position].memory_bytes for position in held if position not in compressing)
        disk = disk_room_bytes
        if disk is not None:
            disk += _freed_disk_bytes(blocks, evict_before)
        spilled = _choose_to_spill(blocks, held, known_bytes - room, disk)
        return known_bytes - sum(blocks[position].memory_bytes for position in spilled) <= room

    if fits(None):
        return None
    ends = sorted({block.end_tick for block in blocks if not block.is_open})
    if not ends:
        return None
    # Evicting more ticks never needs more memory, so a binary search finds the smallest sufficient eviction.
    sufficient = bisect_left(ends, True, key=fits)
    return ends[min(sufficient, len(ends) - 1)]


def _is_evicted(block: BlockState, evict_before: int | None) -> bool:
    return evict_before is not None and not block.is_open and block.end_tick <= evict_before


def _freed_disk_bytes(blocks: Sequence[BlockState], evict_before: int | None) -> int:
    """Return the disk space of the spill files in which every block is evicted."""
    if evict_before is None:
        return 0
    freed_bytes = 0
    bytes_by_file: dict[int, int] = defaultdict(int)
    needed_files = set()
    for block in blocks:
        if block.form is not Form.FILED:
            continue
        is_evicted = _is_evicted(block, evict_before)
        if block.file is None:
            freed_bytes += (block.coded_bytes or 0) if is_evicted else 0
        elif is_evicted:
            bytes_by_file[block.file] += block.coded_bytes or 0
        else:
            needed_files.add(block.file)
    return freed_bytes + sum(nbytes for file, nbytes in bytes_by_file.items() if file not in needed_files)

"""The budget: how much memory may be used to be fast.

In:  what the user said, and what this machine has.  Out: what closed blocks may take, raw or in any form.
Invariant: a budget in bytes is a limit over everything that a memory holds. What does not depend on the blocks is set
aside first: rings, the open segment, those being sealed and spilled, staging.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from holdall.errors import ArgumentError
from holdall.machine import memory_limits
from holdall.storage.blocks import SliceBlock
from holdall.storage.codec import COST_CAPS
from holdall.storage.sealer import FrozenBlock, Sealer
from holdall.units import format_bytes, parse_bytes

_SHARE_OF_AVAILABLE = 4
_SHARE_BEFORE_DISK = 2
"""With a disk tier and no limit named, sealed blocks stay in memory up to this share of what is available."""
_SEGMENTS_OF_A_BUDGET = 32
"""A segment takes at most this share of a limit, for there are several on their way: see SEGMENTS_ON_THE_WAY."""
SEGMENTS_ON_THE_WAY = 6
"""One open, one waiting to be sealed, one being sealed, what it becomes, that being written out, and a spare arena."""
_STAGING_SHARE = 8
_MOST_STAGING = 256 * 2**20
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Budget:
    """What the stages need to know of `budget`, `prefer` and `spill_dir`."""

    limit: int | None  # over everything, if the user named one
    raw_bytes: int  # closed blocks that stay raw
    closed_bytes: int  # closed blocks that stay in memory, raw or sealed
    cost_cap: float  # of sampling sealed slices, over a raw gather
    hands: int

    @classmethod
    def of(cls, budget: str | int | None, prefer: str, hands: int, *, spills: bool = False) -> Budget:
        """Read the constructor's arguments."""
        if prefer not in COST_CAPS:
            raise ArgumentError(f"prefer ({prefer!r}) must be one of {sorted(COST_CAPS)}")
        cap = COST_CAPS[prefer]
        if budget is None:
            return cls(None, 0, 0 if spills else NO_LIMIT, cap, hands)
        if budget == "auto":
            available = available_bytes()
            closed = available // _SHARE_BEFORE_DISK if spills else NO_LIMIT
            return cls(None, available // _SHARE_OF_AVAILABLE, closed, cap, hands)
        limit = parse_bytes(budget, "budget")
        return cls(limit, limit, limit, cap, hands)

    @property
    def segment_bytes(self) -> int:
        """Most that one segment may take."""
        return NO_LIMIT if self.limit is None else self.limit // _SEGMENTS_OF_A_BUDGET

    @property
    def staging_bytes(self) -> int:
        """Most that may be kept for the next batches."""
        return NO_LIMIT if self.limit is None else min(self.limit // _STAGING_SHARE, _MOST_STAGING)

    def require(self, fixed: int, segment: int) -> None:
        """Refuse a limit that is too small for what is needed whatever comes.

        Args:
            fixed: Rings and tables of the full capacity.
            segment: The smallest useful segment.
        """
        least = max(_SEGMENTS_OF_A_BUDGET * segment, 2 * fixed)
        if self.limit is not None and self.limit < least:
            raise ArgumentError(
                f"budget ({format_bytes(self.limit)}) is too small: the small fields and the index of a memory of this "
                f"capacity take {format_bytes(fixed)}, and segments need {format_bytes(segment)} each while they are "
                f"written, sealed and moved; give it at least {least} bytes ({format_bytes(least)}), or lower capacity"
            )

    def closed_allowed(self, fixed: int, elsewhere: int, segment: int) -> int:
        """Return what closed blocks may take in memory, in any form.

        Args:
            fixed: Rings and tables of the full capacity.
            elsewhere: Logs, dictionaries and indexes of blocks on disk.
            segment: What a segment takes at most.
        """
        if self.limit is None:
            return self.closed_bytes
        aside = fixed + elsewhere + SEGMENTS_ON_THE_WAY * segment + self.staging_bytes
        return max(self.limit - aside, 0)


def available_bytes() -> int:
    """Return the memory that is free for this process: the machine's, or a control group's if that is less."""
    return memory_limits()[0].free_bytes


_WORTH_TRYING_BYTES = 128 * 2**20
"""Bytes on disk that are given up before a full disk is tried again: a file goes with the last block in it."""


class Allowance(NamedTuple):
    """What closed blocks may take in memory."""

    raw: int
    closed: int  # raw or sealed
    at_most: int  # the same while the disk takes nothing: what is set aside for writing is not needed then


class Tiers:
    """Keeps the newest blocks raw, the older ones sealed, and the oldest on disk.

    Args:
        spills: Whether there is a disk tier.
        measures_early: Whether the first block of every field is sealed at once, though it might stay raw: how much
            fits a limit is known by how much it shrinks.
    """

    def __init__(self, sealer: Sealer, *, spills: bool = False, measures_early: bool = False) -> None:
        self._sealer = sealer
        self._spills = spills
        self._measures_early = measures_early
        self._raw = _Shelf()
        self._sealed = _Shelf()  # in memory: sealed, or tried in vain
        self._sealing: dict[int, FrozenBlock] = {}  # by identity of the block
        self._spilling: dict[int, FrozenBlock] = {}
        self._is_stuck = False  # the disk did not take the last block
        self._tries_again = False  # the disk, with one block for every one that comes
        self._fields: set[int] = set()

    def keep(self, frozen: FrozenBlock) -> None:
        """Take a block that was just frozen, or one that was sealed elsewhere."""
        self._tries_again = True
        if frozen.block.sealed is not None:
            self._sealed.put(frozen)
        elif self._measures_early and frozen.field not in self._fields:
            self._seal(frozen)
        else:
            self._raw.put(frozen)
        self._fields.add(frozen.field)

    def take_back(self, block: SliceBlock) -> None:
        """Go on with a block whose turn at the sealer is over."""
        frozen = self._sealing.pop(id(block), None)
        if frozen is not None:
            self._sealed.put(frozen)
        frozen = self._spilling.pop(id(block), None)
        if frozen is not None:
            self._is_stuck = not block.is_on_disk
        if frozen is not None and self._is_stuck:
            waiting, self._spilling = list(self._spilling.values()), {}
            self._sealer.withdraw({id(other.block) for other in waiting})
            for back in reversed([frozen, *waiting]):
                self._sealed.put_back(back)

    def is_changing(self, block: SliceBlock) -> bool:
        """Whether a block waits to be sealed or spilled, or is being."""
        return id(block) in self._sealing or id(block) in self._spilling

    def settle(self, allowance: Allowance, evict: Callable[[], int | None]) -> None:
        """Seal, spill and evict until no more is held than may be.

        Args:
            evict: Drops the oldest segment before its time; returns the bytes that it had on disk, None if there was
                none to drop.
        """
        while self._raw.blocks and (self._raw.nbytes > allowance.raw or self._held > allowance.closed):
            self._seal(self._raw.take_oldest())
        if self._spills and not self._is_stuck:
            while self._sealed.blocks and self._held > allowance.closed:
                self._spill_oldest()
            return
        self._make_room(allowance, evict)
        if self._is_stuck and self._tries_again and self._sealed.blocks:
            self._tries_again = False
            self._spill_oldest()

    def _make_room(self, allowance: Allowance, evict: Callable[[], int | None]) -> None:
        """Drop the oldest segments: all that is too much, or enough that a full disk may take the rest."""
        ceiling = allowance.at_most if self._spills else allowance.closed
        freed = 0
        while self._held > ceiling or (self._held > allowance.closed and freed < _WORTH_TRYING_BYTES):
            on_disk = evict()
            if on_disk is None:
                return
            freed += on_disk

    @property
    def shrinks_to(self) -> float | None:
        """What became of sealed blocks, over what they were; None before one of every field was sealed."""
        known = {frozen.field for frozen in self._sealed.blocks.values()}
        return self._sealed.nbytes / self._sealed.whole_bytes if self._fields and known == self._fields else None

    def forget(self, evicted: Iterable[SliceBlock]) -> None:
        """Let go of blocks that were evicted."""
        gone = {id(block) for block in evicted}
        self._raw.drop(gone)
        self._sealed.drop(gone)
        on_their_way = gone & (self._sealing.keys() | self._spilling.keys())
        if on_their_way:
            for key in on_their_way:
                self._sealing.pop(key, None)
                self._spilling.pop(key, None)
            self._sealer.withdraw(on_their_way)

    @property
    def spills(self) -> bool:
        """Whether there is a disk tier."""
        return self._spills

    @property
    def raw_bytes(self) -> int:
        """What raw blocks take that are not on their way to the sealer."""
        return self._raw.nbytes

    @property
    def held_bytes(self) -> int:
        """What closed blocks take."""
        return self._held

    @property
    def _held(self) -> int:
        """What closed blocks take, those on their way as if they had arrived: for these, memory is set aside."""
        ratio = self._sealed.nbytes / self._sealed.whole_bytes if self._sealed.whole_bytes else 0.0
        sealing = sum(frozen.block.used_bytes for frozen in self._sealing.values())
        return self._raw.nbytes + self._sealed.nbytes + int(ratio * sealing)

    def _spill_oldest(self) -> None:
        oldest = self._sealed.take_oldest()
        self._spilling[id(oldest.block)] = oldest
        self._sealer.spill(oldest)

    def _seal(self, frozen: FrozenBlock) -> None:
        self._sealing[id(frozen.block)] = frozen
        self._sealer.submit(frozen)


class _Shelf:
    """Blocks in the order in which they came, and what they take."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, FrozenBlock] = OrderedDict()  # by identity of the block
        self.nbytes = 0
        self.whole_bytes = 0  # if none of them was sealed

    def put(self, frozen: FrozenBlock) -> None:
        self.blocks[id(frozen.block)] = frozen
        self._count(frozen, 1)

    def put_back(self, frozen: FrozenBlock) -> None:
        self.put(frozen)
        self.blocks.move_to_end(id(frozen.block), last=False)

    def take_oldest(self) -> FrozenBlock:
        _, oldest = self.blocks.popitem(last=False)
        self._count(oldest, -1)
        return oldest

    def drop(self, gone: set[int]) -> None:
        for frozen in [self.blocks.pop(key) for key in gone if key in self.blocks]:
            self._count(frozen, -1)

    def _count(self, frozen: FrozenBlock, sign: int) -> None:
        self.nbytes += sign * frozen.block.used_bytes
        self.whole_bytes += sign * frozen.block.used * frozen.block.slice_bytes

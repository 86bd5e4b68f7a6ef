"""The budget: how much memory may be used to be fast.

In:  what the user said, and what this machine has.  Out: what closed blocks may take, raw or in any form.
Invariant: a budget in bytes is a limit over everything that a memory holds. What does not depend on the blocks is set
aside first: rings, the open segment, those being sealed and spilled, staging.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdall.errors import ArgumentError
from holdall.experience.sealing.choice import COST_CAPS
from holdall.limits import memory_limits
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

"""The budget: how much memory may be used to be fast.

In:  what the user said, and what this machine has.  Out: how many bytes of closed blocks stay raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from holdall.errors import ArgumentError
from holdall.experience.choice import COST_CAPS

_SHARE_OF_AVAILABLE = 4
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_CGROUP_USES = (
    Path("/sys/fs/cgroup/memory.current"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True)
class Budget:
    """What the stages need to know of `budget` and `prefer`."""

    raw_bytes: int  # closed blocks that stay raw
    cost_cap: float  # of sampling sealed slices, over a raw gather
    hands: int

    @classmethod
    def of(cls, budget: str | int | None, prefer: str, hands: int) -> Budget:
        """Read the constructor's arguments."""
        if prefer not in COST_CAPS:
            raise ArgumentError(f"prefer ({prefer!r}) must be one of {sorted(COST_CAPS)}")
        if budget is None:
            return cls(0, COST_CAPS[prefer], hands)
        if budget == "auto":
            return cls(available_bytes() // _SHARE_OF_AVAILABLE, COST_CAPS[prefer], hands)
        raise ArgumentError(f"budget ({budget!r}) must be 'auto' or None in this version")


def available_bytes() -> int:
    """Return the memory that is free for this process: the machine's, or its container's if less."""
    available = int(psutil.virtual_memory().available)
    for limit_file, use_file in zip(_CGROUP_LIMITS, _CGROUP_USES, strict=True):
        try:
            limit, use = int(limit_file.read_text()), int(use_file.read_text())
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
        available = min(available, max(limit - use, 0))
    return available

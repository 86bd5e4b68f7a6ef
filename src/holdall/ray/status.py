"""How each shard is: where it runs, what it holds, and what its process takes.

In:  an actor.  Out: a few numbers; also of one that does not answer.
Invariant: reading what a process takes costs it a fiftieth of a core at most, however large it is and whoever asks.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray

from holdall.footprint import LINUX, Held, held_bytes
from holdall.limits import memory_limits
from holdall.ray.standing import Standing

_SHARE_OF_A_CORE = 0.02


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard at one moment; all but its number is unknown while it does not answer."""

    number: int
    answers: bool
    node: str = ""
    pid: int = 0
    uss_bytes: int = 0  # memory that its process has to itself
    standing: Standing | None = None
    pss_bytes: int = 0  # the same, and its share of what it has in common with others
    held_bytes: int = 0  # of transitions, as they are held
    plain_bytes: int = 0  # what the same transitions take as plain arrays of obs and next_obs
    capacity: int = 0  # most transitions
    is_durable: bool = False  # whether a journal is kept
    limit: str = ""  # what its memory meets first: its control group, or the machine
    limit_bytes: int = 0
    limit_free_bytes: int = 0

    @classmethod
    def of(cls, number: int, told: dict[str, Any]) -> Self:
        """Read what a shard told."""
        return cls(number, True, **told | {"standing": Standing.of(told["standing"])})


class Process:
    """The process that a shard runs in."""

    @staticmethod
    def anonymous_bytes() -> int:
        """Return the memory that no file backs, from the kernel's counters: at no cost, whatever the size."""
        if not LINUX:
            return held_bytes().anonymous
        _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")

    def __init__(self) -> None:
        self._held: Held | None = None
        self._read_again_at = 0.0

    def words(self) -> dict[str, Any]:
        """Say where it runs, what it takes, and how much there is."""
        now = time.monotonic()
        if self._held is None or now >= self._read_again_at:
            self._held = held_bytes()  # the kernel walks all pages for it
            self._read_again_at = now + (time.monotonic() - now) / _SHARE_OF_A_CORE
        limit = memory_limits()[0]
        address: Any = ray.util.get_node_ip_address
        return {
            "node": str(address()),
            "pid": os.getpid(),
            "uss_bytes": self._held.unique,
            "pss_bytes": self._held.proportional,
            "limit": limit.name,
            "limit_bytes": limit.total_bytes,
            "limit_free_bytes": limit.free_bytes,
        }


def status_of(number: int, actor: Any, patience_s: float) -> ShardStatus:
    """Ask a shard how it is."""
    try:
        return ShardStatus.of(number, ray.get(actor.process.remote(), timeout=patience_s))
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return ShardStatus(number, answers=False)

"""How limits come near: which one first, and how fast.

In:  what is left under every limit, look by look.  Out: the limit that is near first, at the rate at which it comes.
Invariant: a rate that rises counts at once, one that falls by and by; a limit is measured from the first look on,
whether it was the nearest then or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdall.machine import Limit

_AHEAD_S = 1.0
"""A limit that would be near after so long, at the rate at which it comes, is near."""
_LOOKS_EVERY_S = 0.5
_LOOKS_AT_MOST_EVERY_S = 0.02
_MAY_COME = 512.0 * 2**20
"""Bytes a second that a process which was quiet may begin to take before the next look."""


class Near(NamedTuple):
    """The limit that is near first."""

    limit: Limit
    spare: float  # bytes before it is near; below 0: it is
    coming: float  # bytes a second

    @property
    def is_near(self) -> bool:
        """Whether it is, or will be in a second."""
        return self.spare <= self.coming * _AHEAD_S

    @property
    def look_again_s(self) -> float:
        """Seconds until it should be looked at again."""
        pause = self.spare / (4.0 * self.coming + _MAY_COME)
        return min(max(pause, _LOOKS_AT_MOST_EVERY_S), _LOOKS_EVERY_S)

    @property
    def soon_taken(self) -> float:
        """Bytes that will be taken within the second ahead."""
        return self.coming * _AHEAD_S


class Approach:
    """Follows limits.

    Args:
        at: Share of a limit from which on it is near.
    """

    def __init__(self, at: float) -> None:
        self._at = at
        self._before: dict[str, tuple[float, int, float]] = {}  # when, how much was left, bytes a second

    def nearest(self, limits: Iterable[Limit], now: float) -> Near:
        """Return the limit that is near first, as a share of its size."""
        found = [Near(limit, self._spare(limit), self._rate(limit, now)) for limit in limits]
        return min(found, key=lambda near: (near.spare - near.soon_taken) / max(near.limit.total_bytes, 1))

    def _spare(self, limit: Limit) -> float:
        return limit.free_bytes - (1.0 - self._at) * limit.total_bytes

    def _rate(self, limit: Limit, now: float) -> float:
        moment, left, before = self._before.get(limit.name, (now, limit.free_bytes, 0.0))
        rate = max((left - limit.free_bytes) / (now - moment), 0.0) if now > moment else 0.0
        coming = max(rate, 0.5 * (before + rate))
        self._before[limit.name] = (now, limit.free_bytes, coming)
        return coming

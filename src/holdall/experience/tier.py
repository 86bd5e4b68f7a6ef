"""Tiers: which closed blocks stay raw, and which are sealed.

In:  blocks as they are frozen, oldest first.  Out: the oldest go to the sealer once the raw ones
take more than is allowed.
Invariant: what may stay raw is bounded; nothing is sealed that would still fit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdall.experience.seal import FrozenBlock, Sealer


class Tiers:
    """Keeps the newest blocks raw, up to an allowance in bytes."""

    def __init__(self, sealer: Sealer, raw_bytes_allowed: int) -> None:
        self._sealer = sealer
        self._allowed = raw_bytes_allowed
        self._raw: deque[FrozenBlock] = deque()
        self._raw_bytes = 0

    def keep(self, frozen: FrozenBlock) -> None:
        """Take a block that was just frozen; seal the oldest ones if the allowance is used up."""
        self._raw.append(frozen)
        self._raw_bytes += frozen.block.used_bytes
        while self._raw and self._raw_bytes > self._allowed:
            oldest = self._raw.popleft()
            self._raw_bytes -= oldest.block.used_bytes
            self._sealer.submit(oldest)

    def forget(self, evicted: Iterable[object]) -> None:
        """Let go of blocks that were evicted while they were raw."""
        gone = {id(block) for block in evicted}
        kept = deque(frozen for frozen in self._raw if id(frozen.block) not in gone)
        self._raw = kept
        self._raw_bytes = sum(frozen.block.used_bytes for frozen in kept)

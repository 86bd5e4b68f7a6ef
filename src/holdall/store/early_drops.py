"""EarlyDrops: transitions that were evicted before the capacity was reached, and the warnings about them."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("holdall")


class EarlyDrops:
    """Count of the transitions that were evicted early. The first drop is logged, and then every tenfold count.

    Attributes:
        transitions: Number of transitions that were dropped early, in all.
        reason: Why the newest of them were dropped, and what to do. Empty if none were.
    """

    def __init__(self, warning_factor: int) -> None:
        self.transitions = 0
        self.reason = ""
        self._warning_factor = warning_factor
        self._next_warning = 1

    def record(self, transitions: int, reason: str) -> None:
        """Record that `transitions` were dropped early."""
        if transitions <= 0:
            return
        self.transitions += transitions
        self.reason = reason
        if self.transitions >= self._next_warning:
            self._next_warning = self._warning_factor * self.transitions
            _LOG.warning("%d transitions were dropped before the capacity was reached. %s", self.transitions, reason)

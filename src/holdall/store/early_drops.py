"""EarlyDrops: warnings about transitions that were evicted before the capacity was reached."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("holdall")


class EarlyDrops:
    """Warnings about transitions that were dropped early.

    The first drop is logged. Each later warning is logged when the number of dropped transitions is `warning_factor`
    times that of the last warning.

    Attributes:
        reason: Why transitions were last dropped early, and what to do. Empty before the first drop.
    """

    def __init__(self, warning_factor: int) -> None:
        self.reason = ""
        self._warning_factor = warning_factor
        self._next_warning = 1

    def warn(self, transitions: int) -> None:
        """Log that `transitions` were dropped in all, if a warning is due."""
        if transitions < self._next_warning:
            return
        self._next_warning = self._warning_factor * transitions
        _LOG.warning("%d transitions were dropped before the capacity was reached. %s", transitions, self.reason)

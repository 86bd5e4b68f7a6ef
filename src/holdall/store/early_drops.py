"""EarlyDrops: why transitions were evicted before the capacity was reached, and the warnings about it."""

from __future__ import annotations

import logging

_LOG = logging.getLogger("holdall")


class EarlyDrops:
    """Warnings about early drops.

    The first drop is logged. Later warnings follow when `warning_factor` times as many transitions were dropped.

    Attributes:
        reason: Why transitions were last dropped early, and what to do. Empty before the first drop.
    """

    def __init__(self, warning_factor: int) -> None:
        self.reason = ""
        self._warning_factor = warning_factor
        self._next_warning = 1

    def warn(self, transitions: int) -> None:
        """Log that `transitions` transitions were dropped in all, unless the last warning is recent enough."""
        if transitions < self._next_warning:
            return
        self._next_warning = self._warning_factor * transitions
        _LOG.warning("%d transitions were dropped before the capacity was reached. %s", transitions, self.reason)

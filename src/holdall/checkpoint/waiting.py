"""Waiting: the progress of a job that may have to wait for a disk or a server, and the way to end it.

The job calls `record_progress` and `check`. Any other thread may call `cancel`.
"""

from __future__ import annotations

import errno
import logging
import math
import threading
import time

from holdall.errors import CheckpointError

REMIND_S = 10.0
"""Seconds after which a wait is logged."""

_LOG = logging.getLogger("holdall")


class Waiting:
    """The progress of the jobs at one place, which are done one after another. Thread-safe.

    Attributes:
        url: Place that the job reads or writes.
        limit_s: Seconds without progress after which the job fails.
        reason: Cause of the current wait, for messages. Empty while the job makes progress.
    """

    def __init__(self, url: str, limit_s: float = math.inf) -> None:
        self.url = url
        self.limit_s = limit_s
        self.reason = ""
        self._cancelled = threading.Event()
        self._progress_at = time.monotonic()
        self._reminded_at = -math.inf

    def cancel(self) -> None:
        """Cancel the job. All current and later waits raise an error until `begin` is called."""
        self._cancelled.set()

    def begin(self) -> None:
        """Start a new job, which the cancellation of an earlier job does not affect."""
        self._cancelled.clear()
        self.record_progress()

    def record_progress(self) -> None:
        """Restart the clock of `limit_s`."""
        self.reason = ""
        self._progress_at = time.monotonic()

    def last_progress_after(self, began: float) -> float:
        """Return the time of the last progress, or `began` if that is later."""
        return max(began, self._progress_at)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`. Raise CheckpointError if the job is cancelled or reaches `limit_s` meanwhile."""
        left_s = self._progress_at + self.limit_s - time.monotonic()
        self._cancelled.wait(max(0.0, min(seconds, left_s)))
        self.check()

    def check(self) -> None:
        """Raise CheckpointError if the job is cancelled, or made no progress for `limit_s` seconds."""
        if time.monotonic() - self._progress_at > self.limit_s:
            raise CheckpointError(
                errno.ETIMEDOUT,
                f"{self.url} did not answer for {self.limit_s:g} s: {self.reason or 'there is no progress'}. Check the "
                "URL and the endpoint, or pass a longer timeout.",
            )
        if self._cancelled.is_set():
            cause = f" It was waiting: {self.reason}." if self.reason else ""
            raise CheckpointError(
                f"The work at {self.url} was cancelled, by cancel() or because the memory was closed.{cause}"
            )

    def remind(self, began: float, message: str) -> None:
        """Log `message` once, if the job has waited since `began` for more than `REMIND_S` seconds."""
        now = time.monotonic()
        if self._reminded_at < began <= now - REMIND_S:
            self._reminded_at = now
            _LOG.warning("Still waiting after %.0f s: %s", REMIND_S, message)

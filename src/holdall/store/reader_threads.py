"""ReaderThreads: threads that share the work of a reader's large batches."""

from __future__ import annotations

import os
import threading
import weakref
from math import inf

from holdall._native import Reader
from holdall.background import end_at_exit


class ReaderThreads:
    """Helper threads of one reader. They start with the first batch that is large enough to share.

    All methods may be called from any thread.

    Attributes:
        count: Number of helpers that were started, or infinity if no more may be started.
    """

    def __init__(self, reader: Reader, max_threads: int) -> None:
        self._reader = reader
        self._max_helpers = max_threads - 1
        self._lock = threading.RLock()  # Re-entrant, because a signal handler may read, too.
        # Helpers that wait for work keep the reader alive, so they are ended when this object is freed.
        self._dismiss = weakref.finalize(self, _dismiss_helpers, reader, os.getpid())
        self.count: float = 0 if max_threads > 1 else inf

    def start(self) -> None:
        """Start helpers until there are as many as the reader's batches could use."""
        with self._lock:
            started = self.count
            if started == inf:
                return
            wanted = min(self._reader.wanted_helpers, self._max_helpers)
            self.count = wanted if wanted < self._max_helpers else inf
            for _ in range(wanted - int(started)):
                helper = threading.Thread(target=self._reader.help, name="holdall reader", daemon=True)
                end_at_exit(helper, self._reader.dismiss)
                helper.start()

    def dismiss(self) -> None:
        """End all helpers. The reader then works alone."""
        with self._lock:
            self.count = inf
        self._dismiss()


def _dismiss_helpers(reader: Reader, process_id: int) -> None:
    """End the helpers of a reader.

    Do nothing in a forked child. It has no helpers, and waiting for the reader's lock might never end, because a thread
    of the parent may have held the lock during the fork.
    """
    if process_id == os.getpid():
        reader.dismiss()

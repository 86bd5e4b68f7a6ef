"""A crew: a few threads of holdall's own that share out one compiled loop.

In:  a function over a range of rows that lets go of the GIL, and how many bytes it moves.
Out: nothing; the range was covered, or the first error is raised.
Invariant: the calling thread does its share, so a crew of one has no threads at all.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from holdall.errors import ArgumentError

_BYTES_PER_HAND = 1 << 20
"""A thread is woken only for at least this much to move; waking it costs some 50 us."""
_PIECE_BYTES = 1 << 18
_MOST_HANDS = 4


class Crew:
    """Threads for one memory; started when first needed, and again after a fork."""

    def __init__(self, hands: int | None = None, most: int = _MOST_HANDS) -> None:
        self.hands = hands or min(usable_cores(), most)
        self._pool: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def share(self, work: Callable[[int, int], None], rows: int, nbytes: int, piece_bytes: int = _PIECE_BYTES) -> None:
        """Run `work(first, end)` over pieces of `rows` that together cover it.

        Pieces are taken one by one, so a helper that the system does not schedule costs nothing:
        the calling thread then does them all.
        """
        pieces = max(1, min(nbytes // piece_bytes, rows))
        taken = itertools.count()

        def take_pieces() -> None:
            while (piece := next(taken)) < pieces:
                work(rows * piece // pieces, rows * (piece + 1) // pieces)

        hands = min(self.hands, nbytes // _BYTES_PER_HAND)
        helping = self._call(take_pieces, hands - 1)
        try:
            take_pieces()
        finally:
            # No helper may outlive the call: the arrays it writes to belong to the caller.
            errors = [future.exception() for future in helping if not future.cancel()]
        for error in errors:
            if error is not None:
                raise error

    def _call(self, work: Callable[[], None], helpers: int) -> list[Future[None]]:
        """Wake helpers; the lock keeps `dismiss` from ending them in between."""
        if helpers < 1:
            return []
        with self._lock:
            if self._pool is None or self._process != os.getpid():
                self._pool = ThreadPoolExecutor(self.hands - 1, thread_name_prefix="holdall-crew")
                self._process = os.getpid()
            return [self._pool.submit(work) for _ in range(helpers)]

    def dismiss(self) -> None:
        """End the threads; the crew may be used again."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._process == os.getpid():
            pool.shutdown(wait=True)


def usable_cores() -> int:
    """Count the cores this process may use, or the threads that HOLDALL_THREADS names."""
    wish = os.environ.get("HOLDALL_THREADS", "")
    if wish:
        if not wish.isdecimal() or int(wish) < 1:
            raise ArgumentError(f"HOLDALL_THREADS ({wish}) must be a whole number of at least 1; correct or unset it")
        return int(wish)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""Hands: threads that wait in C, and share out its loops without a word to Python.

In:  how many there may be.  Out: where C finds them.
Invariant: who uses them has them alone. They end when they are dismissed, when nobody refers to them any more, and
with the process; after a fork there are new ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from holdall.experience.crew import usable_cores


class Hands:
    """Helpers for one builder; started when they are first needed.

    Args:
        most: Hands, the caller's own among them; fewer where there are not so many cores.
    """

    def __init__(self, library: ctypes.CDLL, most: int) -> None:
        self.helpers = min(usable_cores(), most) - 1
        self._library = library
        library.holdall_hands_new.restype = ctypes.c_void_p
        library.holdall_hands_help.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        library.holdall_hands_help.restype = None
        for function in (library.holdall_hands_dismiss, library.holdall_hands_free):
            function.argtypes, function.restype = [ctypes.c_void_p], None
        self._lock = threading.Lock()
        self._process = 0
        self._address = 0
        self._end: weakref.finalize[Any, Any] | None = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[int]:
        """Return where C finds the hands, 0 if there are no helpers; nobody dismisses them meanwhile."""
        if self.helpers < 1:
            yield 0
            return
        with self._lock:
            if self._process != os.getpid():
                self._start()
            yield self._address

    def dismiss(self) -> None:
        """End the threads; the hands may be used again."""
        with self._lock:
            if self._end is not None and self._process == os.getpid():
                self._end()
            self._process, self._end = 0, None

    def _start(self) -> None:
        if self._end is not None:
            self._end.detach()  # a parent's threads, which are not here, and a lock that they may have held
        address = self._library.holdall_hands_new()
        if not address:
            raise MemoryError("there is no memory for the threads that fill batches")
        threads = [
            threading.Thread(
                target=self._library.holdall_hands_help,
                args=(address, hand),
                name=f"holdall-hand-{hand}",
                daemon=True,  # a thread that waits in C must not keep the process from ending
            )
            for hand in range(1, self.helpers + 1)
        ]
        for thread in threads:
            thread.start()
        self._address, self._process = address, os.getpid()
        self._end = weakref.finalize(self, _end, self._library, address, threads)


def _end(library: ctypes.CDLL, address: int, threads: list[threading.Thread]) -> None:
    if not all(thread.is_alive() for thread in threads):
        return  # a forked child's copies: nobody waits there
    library.holdall_hands_dismiss(address)
    for thread in threads:
        thread.join()
    library.holdall_hands_free(address)

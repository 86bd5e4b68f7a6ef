"""Functions that Python calls after a fork and at the end of a program.

A memory belongs to the process that made it, so a forked child closes it. When the program ends, background threads are
stopped, and saves are completed. Nothing waits longer than `CLOSE_S` without progress.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

from holdall.errors import CheckpointError
from holdall.memory_registry import MEMORIES

_LOG = logging.getLogger("holdall")


# ---------------------------------------------------------------- forks


def _after_fork_in_child() -> None:
    """Close the parent's memories. Called in a forked child, by its only thread."""
    MEMORIES.close_in_child()
    JOBS.clear()
    _watch_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# ---------------------------------------------------------------- the end of a program

_JOIN_S = 30.0
"""Seconds that the end of a program waits for a thread, because a disk may hang."""
_STOP_BY_THREAD: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_at_exit(thread: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Call `stop` when the program ends, and then wait for `thread`, which is a daemon thread.

    Python would otherwise end the thread in the middle of a call. C++ code in NumPy then aborts the process.

    `stop` must not refer to an object that refers to `thread`. Both would then stay in memory until the program ends.
    """
    _STOP_BY_THREAD[thread] = stop


def _end_threads() -> None:
    alive = [(thread, stop) for thread, stop in tuple(_STOP_BY_THREAD.items()) if thread.is_alive()]
    for _, stop in alive:
        stop()
    for thread, _ in alive:
        thread.join(_JOIN_S)


CLOSE_S = 30.0
"""Seconds that `close`, and the end of the program, wait for a job that makes no progress."""
JOBS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects with jobs that the end of the program waits for. Each object adds itself. Empty in a forked child."""
_EXIT_PRIORITY = 100


def _watch_exit(_jobs: object = None) -> None:
    """Make the end of this process wait for jobs, also in processes of multiprocessing, which ignore `atexit`.

    In a new process, multiprocessing removes all finalizers, and then calls this function with `JOBS`.
    """
    util.Finalize(None, _end_jobs, exitpriority=_EXIT_PRIORITY)


def _end_jobs() -> None:
    began = time.monotonic()
    for owner in 2 * list(JOBS):  # Twice, because a save that ends may give a mirror another job.
        try:
            owner.end(CLOSE_S, began)
        except CheckpointError as error:
            _LOG.error("the program ends: %s", error)
    JOBS.clear()  # This function runs twice in the main process, and must not wait again for an abandoned job.


def _end_background() -> None:
    """End threads and jobs while their files are still open."""
    _end_threads()
    _end_jobs()


# The atexit hook of weakref.finalize closes files that threads and jobs use. Python runs the hook that was registered
# last first, and weakref registers its own with the first finalizer. So a finalizer is made before the hook below.
weakref.finalize(_end_background, id, None).detach()
atexit.register(_end_background)
_watch_exit()
util.register_after_fork(JOBS, _watch_exit)

"""What happens to memories after a fork, and to background threads and jobs when the program ends.

A memory belongs to the process that made it: it is closed in a forked child. When the program ends, background threads
are stopped, and saves are completed. Nothing waits longer than `CLOSE_S` without progress.
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
    """Close the parent's memories in a forked child, whose only thread calls this."""
    MEMORIES.close_in_child()
    JOBS.clear()
    _watch_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# ---------------------------------------------------------------- the end of a program

_END_S = 30.0
"""Seconds that the end of a program waits for a thread, because a disk may hang."""
_ENDED: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_before_python(thread: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Register a daemon thread that is stopped, and waited for, when the program ends.

    Python would otherwise end the thread in the middle of a call, and C++ code in NumPy aborts the process then.

    `stop` must not refer to an object that refers to `thread`. Both would then stay in memory until the program ends.
    """
    _ENDED[thread] = stop


def _end_threads() -> None:
    alive = [(thread, stop) for thread, stop in tuple(_ENDED.items()) if thread.is_alive()]
    for _, stop in alive:
        stop()
    for thread, _ in alive:
        thread.join(_END_S)


CLOSE_S = 30.0
"""Seconds that `close`, and the end of the program, wait for a job that makes no progress."""
JOBS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Objects with jobs that the end of the program waits for. Each adds itself. Empty in a forked child."""
_EXIT_PRIORITY = 100


def _watch_exit(_jobs: object = None) -> None:
    """Make the end of this process wait for jobs. Processes of multiprocessing do not run `atexit` functions."""
    util.Finalize(None, _end_jobs, exitpriority=_EXIT_PRIORITY)


def _end_jobs() -> None:
    began = time.monotonic()
    for doer in 2 * list(JOBS):  # Twice, because a save that ends may give a mirror another job.
        try:
            doer.end(CLOSE_S, began)
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

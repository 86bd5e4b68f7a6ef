"""Forks and the end of a program: what becomes of locks, memories and threads of holdall's own.

In:  locks, threads and jobs.  Out: the same, as a fork's child, the next call and the end of Python need them.
Invariant: no child waits for a lock that a thread of its parent holds. Nothing waits for ever once the program ends.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any, Protocol, TypeVar

from holdall.errors import CheckpointError
from holdall.report import LIVING

_LOG = logging.getLogger("holdall")


def left(lock: Any) -> Any:
    """Return a reentrant lock, for `with`, after this thread left it: it may still be in it if it was interrupted.

    For locks that nobody takes twice.
    """
    while lock._is_owned():
        lock.release()
    return lock


# ---------------------------------------------------------------- forks

_FORK_PATIENCE_S = 5.0
"""How long a fork waits for locks. They are held for milliseconds, unless it is the forking thread that holds one."""

_Lock = TypeVar("_Lock")


class Forked(Protocol):
    """What has to know that it is in a child now."""

    def after_fork(self) -> None:
        """Leave to the parent what is the parent's; called in the child, by its only thread."""


_LOCKS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_FORKED: weakref.WeakSet[Any] = weakref.WeakSet()


class _Fork(threading.local):
    """The fork that a thread is about to make."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.made = 0  # its number among the forks of this process
        self.number = 0  # of the fork that made this process


_FORK = _Fork()
_FORKS = itertools.count(1)


def fork_safe(lock: _Lock) -> _Lock:
    """Have a lock taken before a fork and let go of after it, so that no child finds it held by a thread it lacks.

    Those of memories are taken first, and others in the order of these calls: one that is taken under another later.
    """
    _LOCKS[next(_NUMBERS)] = lock
    return lock


def tell_of_forks(thing: Forked) -> None:
    """Have `after_fork` called in every child, for as long as the thing lives; that of memories is called anyway."""
    _FORKED.add(thing)


def fork_number() -> int:
    """Return which of its parent's forks made this process; 0 if none did."""
    return _FORK.number


def _before_fork() -> None:
    deadline = time.monotonic() + _FORK_PATIENCE_S
    locks = [memory.fork_lock for memory in list(LIVING) if memory.fork_lock is not None]
    for lock in [*locks, *(_LOCKS[number] for number in sorted(_LOCKS) if number in _LOCKS)]:
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _FORK.held.append(lock)
    _FORK.made = next(_FORKS)


def _after_fork_in_parent() -> None:
    while _FORK.held:
        _FORK.held.pop().release()


def _after_fork_in_child() -> None:
    _after_fork_in_parent()
    _FORK.number = _FORK.made
    for thing in [*LIVING, *_FORKED]:
        thing.after_fork()
    JOBS.clear()
    _watch_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


# ---------------------------------------------------------------- the end of a program

_END_S = 30.0
"""How long the end of a program waits for a thread: a disk may hang."""
_ENDED: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


def end_before_python(thread: threading.Thread, stop: Callable[[], object] = lambda: None) -> None:
    """Have a daemon thread stopped and waited for when the program ends.

    Python would end it in the middle of a call, which C++ inside NumPy answers by aborting the process.
    """
    _ENDED[thread] = stop


def _end_threads() -> None:
    alive = [(thread, stop) for thread, stop in tuple(_ENDED.items()) if thread.is_alive()]
    for _, stop in alive:
        stop()
    for thread, _ in alive:
        thread.join(_END_S)


CLOSE_S = 30.0
"""How long `close`, and the end of the program, wait for a job that does not get on."""
JOBS: weakref.WeakSet[Any] = weakref.WeakSet()
"""What does jobs that the end of the program has to wait for; each adds itself. A forked child has none at first."""
_EXIT_PRIORITY = 100


def _watch_exit(_jobs: object = None) -> None:
    """Have the end of this process wait for jobs: also in a child, which forgets what its parent asked for.

    One of multiprocessing knows no atexit.
    """
    util.Finalize(None, _end_jobs, exitpriority=_EXIT_PRIORITY)


def _end_jobs() -> None:
    began = time.monotonic()
    for doer in 2 * list(JOBS):  # twice: a save that ends may have given a mirror something to do
        try:
            doer.end(CLOSE_S, began)
        except CheckpointError as error:
            _LOG.error("the program ends: %s", error)
    JOBS.clear()  # in the main process this function runs twice, and must not wait for a job again that was given up


def _end_background() -> None:
    """End threads and jobs while their files are still open."""
    _end_threads()
    _end_jobs()


# The atexit hook of weakref.finalize closes files that threads and jobs use. Python runs the hook that was registered
# last first, and weakref registers its own with the first finalizer. So a finalizer is made before the hook below.
weakref.finalize(_Fork, id, None).detach()
atexit.register(_end_background)
_watch_exit()
util.register_after_fork(JOBS, _watch_exit)

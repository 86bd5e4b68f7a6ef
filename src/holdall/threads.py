"""Threads: how many cores there are to use, a limit for the pools of other libraries, forks, and the end of a program.

In:  how many threads a pool may have, or how many workers share the cores.  Out: nothing changes unless asked.
Every Python thread that runs torch operations gets an OpenMP pool of its own, so a process has about as many threads
as torch threads times workers, and twice more for the main thread and for autograd. Their stacks cost next to no
memory; what they cost is time, once more of them run than there are cores.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from holdall.errors import ArgumentError

VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
    "HOLDALL_THREADS",
)  # fmt: skip
"""What OpenMP, the BLAS libraries, NumExpr and holdall's own pools read when they start."""

_MOST_THREADS = 8
"""Decoding a batch still gains from so many; four copy raw slices as fast, see RAW_HELPERS in C."""
_POOLS_BESIDE_WORKERS = 2
"""The main thread's pool and autograd's."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


@contextmanager
def limit(threads: int | None = None, *, workers: int = 0) -> Iterator[int]:
    """Limit the pools of this process, and of processes started inside, and undo it afterwards.

    torch and the BLAS libraries that are loaded, such as NumPy's, are limited at once; whatever is loaded or started
    later finds the limit in the environment.

    Args:
        threads: Of every pool. None: HOLDALL_THREADS if that is set in the environment, else the cores shared out.
        workers: Threads or processes beside the main thread that compute at the same time.

    Yields:
        The number of threads.
    """
    from threadpoolctl import threadpool_limits  # noqa: PLC0415  # only this call needs it

    number = _chosen(threads, workers)
    before = {name: os.environ.get(name) for name in VARIABLES}
    torch: Any = sys.modules.get("torch")
    torch_before = None if torch is None else torch.get_num_threads()
    os.environ.update(environment(number))
    if torch is not None:
        torch.set_num_threads(number)
    try:
        with threadpool_limits(number, user_api="blas"):
            yield number
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if torch_before is not None:
            torch.set_num_threads(torch_before)


def environment(threads: int | None = None, *, workers: int = 0) -> dict[str, str]:
    """Return the environment that gives a process such a limit, for `subprocess` or a job's description.

    The arguments are those of `limit`.
    """
    return dict.fromkeys(VARIABLES, str(_chosen(threads, workers)))


def usable_cores() -> int:
    """Count the cores that this process may use: its affinity, or its container's share if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def pool_threads(most: int = _MOST_THREADS) -> int:
    """Count the threads of a pool of holdall's own: HOLDALL_THREADS, or the cores that can be used; `most` at most."""
    return min(_wished() or usable_cores(), most)


def left(lock: Any) -> Any:
    """Return a reentrant lock, for `with`, after this thread left it: it may still be in it if it was interrupted.

    For locks that nobody takes twice.
    """
    while lock._is_owned():
        lock.release()
    return lock


def _wished() -> int | None:
    """Return what HOLDALL_THREADS says; None if it is not set."""
    wish = os.environ.get("HOLDALL_THREADS", "")
    if not wish:
        return None
    if not wish.isdecimal() or int(wish) < 1:
        raise ArgumentError(f"HOLDALL_THREADS ({wish}) must be a whole number of at least 1; correct or unset it")
    return int(wish)


def _chosen(threads: Any, workers: Any) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ArgumentError(f"workers ({workers!r}) must be a whole number of at least 0; pass how many compute beside")
    if threads is None:
        return _wished() or max(1, usable_cores() // (workers + _POOLS_BESIDE_WORKERS))
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ArgumentError(f"threads ({threads!r}) must be a whole number of at least 1; pass one, or None")
    return threads


def _quota() -> float | None:
    """Read the share of cores that a control group is given; None if it has no limit."""
    try:
        if _QUOTA.exists():
            most, period = _QUOTA.read_text(encoding="ascii").split()
        else:
            most, period = (path.read_text(encoding="ascii").strip() for path in _QUOTA_V1)
        return int(most) / int(period) if most not in {"max", "-1"} else None
    except (OSError, ValueError, ZeroDivisionError):  # no such control group, or none that says so
        return None


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

    Locks are taken in the order of these calls: one that is taken under another comes later.
    """
    _LOCKS[next(_NUMBERS)] = lock
    return lock


def tell_of_forks(thing: Forked) -> None:
    """Have `after_fork` called in every child, for as long as the thing lives."""
    _FORKED.add(thing)


def fork_number() -> int:
    """Return which of its parent's forks made this process; 0 if none did."""
    return _FORK.number


def _before_fork() -> None:
    deadline = time.monotonic() + _FORK_PATIENCE_S
    for lock in [_LOCKS[number] for number in sorted(_LOCKS) if number in _LOCKS]:
        if lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _FORK.held.append(lock)
    _FORK.made = next(_FORKS)


def _after_fork_in_parent() -> None:
    while _FORK.held:
        _FORK.held.pop().release()


def _after_fork_in_child() -> None:
    _after_fork_in_parent()
    _FORK.number = _FORK.made
    for thing in list(_FORKED):
        thing.after_fork()


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


@atexit.register
def _end_threads() -> None:
    alive = [(thread, stop) for thread, stop in tuple(_ENDED.items()) if thread.is_alive()]
    for _, stop in alive:
        stop()
    for thread, _ in alive:
        thread.join(_END_S)

"""Threads: a limit that keeps pools and workers from taking more cores than there are.

In:  how many threads a pool may have, or how many workers share the cores.  Out: nothing changes unless asked.
Every Python thread that runs torch operations gets an OpenMP pool of its own, so a process has about as many threads
as torch threads times workers, and twice more for the main thread and for autograd. Their stacks cost next to no
memory; what they cost is time, once more of them run than there are cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError

VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
    "HOLDALL_THREADS",
)  # fmt: skip
"""What OpenMP, the BLAS libraries, NumExpr and holdall's own crews read when they start."""

_POOLS_BESIDE_WORKERS = 2
"""The main thread's pool and autograd's."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1 = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


@contextmanager
def limit(threads: int | None = None, *, workers: int = 0) -> Iterator[int]:
    """Limit the pools of this process, and of processes started inside, and undo it afterwards.

    torch is limited at once if it is imported, or else when it is. Pools that already run, such as that of NumPy's
    BLAS library, are left as they are: they obey only what stood in the environment when they were loaded.

    Args:
        threads: Of every pool. None: HOLDALL_THREADS if that is set in the environment, else the cores shared out.
        workers: Threads or processes beside the main thread that compute at the same time.

    Yields:
        The number of threads.
    """
    number = _chosen(threads, workers)
    before = {name: os.environ.get(name) for name in VARIABLES}
    torch: Any = sys.modules.get("torch")
    torch_before = None if torch is None else torch.get_num_threads()
    os.environ.update(environment(number))
    if torch is not None:
        torch.set_num_threads(number)
    try:
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


def pool_threads() -> int:
    """Count the threads that a pool of holdall's own may have: HOLDALL_THREADS, or the cores that can be used."""
    return _wished() or usable_cores()


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


_BYTES_PER_THREAD = 1 << 20
"""A thread is woken only for at least this much to move; waking it costs some 50 us."""
_PIECE_BYTES = 1 << 18
_MOST_THREADS = 4


class ThreadPool:
    """Threads for one memory; started when first needed, and again after a fork."""

    def __init__(self, hands: int | None = None, most: int = _MOST_THREADS) -> None:
        self.hands = hands or min(pool_threads(), most)
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

        hands = min(self.hands, nbytes // _BYTES_PER_THREAD)
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


class CopyThreads:
    """Helpers for one builder; started when they are first needed.

    Args:
        most: Hands, the caller's own among them; fewer where there are not so many cores.
    """

    def __init__(self, library: ctypes.CDLL, most: int) -> None:
        self.helpers = min(pool_threads(), most) - 1
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
        self._end = weakref.finalize(self, _end_threads, self._library, address, threads)


def _end_threads(library: ctypes.CDLL, address: int, threads: list[threading.Thread]) -> None:
    if not all(thread.is_alive() for thread in threads):
        return  # a forked child's copies: nobody waits there
    library.holdall_hands_dismiss(address)
    for thread in threads:
        thread.join()
    library.holdall_hands_free(address)

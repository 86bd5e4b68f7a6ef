"""Limits on the thread pools of torch, NumPy and other libraries, by the number of usable cores.

Every Python thread that runs torch operations gets an OpenMP pool of its own, and so do the main thread and autograd. A
process with many workers therefore has many more threads than cores, and these threads slow each other down. Their
stacks take little memory. Importing this module changes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdall.checks import require_count
from holdall.machine import read_requested_threads, usable_cores

__all__ = ["VARIABLES", "environment", "limit", "usable_cores"]

VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "HOLDALL_THREADS",
)
"""Environment variables that OpenMP, the BLAS libraries, NumExpr and holdall read when they start their pools."""

_POOLS_BESIDE_WORKERS = 2
"""Pools of the main thread and of autograd."""


@contextmanager
def limit(threads: int | None = None, *, workers: int = 0) -> Iterator[int]:
    """Limit the pools of this process, and of processes that are started in the context. Restore them afterwards.

    If torch and BLAS libraries are already loaded, they are limited at once. Libraries that are loaded later read the
    limit from the environment.

    Args:
        threads: Threads of every pool. None: HOLDALL_THREADS if it is set, or else the usable cores divided by the
            number of pools.
        workers: Threads or processes besides the main thread that compute at the same time.

    Yields:
        The number of threads.

    Examples:
        >>> with holdall.threads.limit(2) as count:
        ...     print(count)
        2
    """
    from threadpoolctl import threadpool_limits  # noqa: PLC0415  Only this call needs it.

    number = _choose_threads(threads, workers)
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
    """Return environment variables that limit the pools of a new process, for `subprocess` or a job description.

    The arguments are those of `limit`.

    Examples:
        >>> holdall.threads.environment(2)["OMP_NUM_THREADS"]
        '2'
    """
    return dict.fromkeys(VARIABLES, str(_choose_threads(threads, workers)))


def _choose_threads(threads: Any, workers: Any) -> int:
    """Return `threads`, or the number of threads for every pool if `threads` is None."""
    workers = require_count("workers", workers, 0)
    if threads is None:
        return read_requested_threads() or max(1, usable_cores() // (workers + _POOLS_BESIDE_WORKERS))
    return require_count("threads", threads, 1)

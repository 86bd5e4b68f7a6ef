"""Threads: a limit for the pools of other libraries, by the cores that there are to use.

In:  how many threads a pool may have, or how many workers share the cores.  Out: nothing changes unless asked.
Every Python thread that runs torch operations gets an OpenMP pool of its own, so a process has about as many threads
as torch threads times workers, and twice more for the main thread and for autograd. Their stacks cost next to no
memory; what they cost is time, once more of them run than there are cores.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdall.errors import ArgumentError
from holdall.machine import usable_cores, wished_threads

__all__ = ["VARIABLES", "environment", "limit", "usable_cores"]

VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
    "HOLDALL_THREADS",
)  # fmt: skip
"""What OpenMP, the BLAS libraries, NumExpr and holdall's own pools read when they start."""

_POOLS_BESIDE_WORKERS = 2
"""The main thread's pool and autograd's."""


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


def _chosen(threads: Any, workers: Any) -> int:
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        raise ArgumentError(f"workers ({workers!r}) must be a whole number of at least 0; pass how many compute beside")
    if threads is None:
        return wished_threads() or max(1, usable_cores() // (workers + _POOLS_BESIDE_WORKERS))
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ArgumentError(f"threads ({threads!r}) must be a whole number of at least 1; pass one, or None")
    return threads

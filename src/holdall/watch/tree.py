"""The processes that belong to a training: the one that is watched, and all that it started.

In:  a process id.  Out: its workers, and what each takes.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import psutil

from holdall.machine import held_bytes
from holdall.watch.reading import Part

_SERVANTS = ("resource_tracker", "forkserver")
"""Helpers of multiprocessing, told by what they were started with."""


def worker_parts(pid: int, without: Collection[int] = ()) -> list[Part]:
    """Read every process below `pid`, but the one that reads, and those that are named."""
    parts = []
    passed = {os.getpid(), *without}
    try:
        workers = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    for worker in workers:
        if worker.pid in passed:
            continue
        try:
            held = held_bytes(worker.pid).proportional
            parts.append(Part("workers", f"{worker.pid} {_name(worker)}", held, int(worker.memory_info().vms)))
        except (psutil.Error, OSError):  # it ended, or belongs to somebody else
            continue
    return sorted(parts, key=lambda part: -part.resident)


def _name(worker: psutil.Process) -> str:
    line = " ".join(worker.cmdline())
    return next((servant for servant in _SERVANTS if servant in line), worker.name())[:40]

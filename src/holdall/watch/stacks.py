"""Thread stacks, resident beside virtual.

In:  the mappings of a process.  Out: the ranges of its threads' stacks.
A stack is found by the stack pointer of its thread where the kernel shows that, or by the guard below it: a small range
that nobody may touch, right under one that is at most as long as a stack may be.
"""

from __future__ import annotations

import bisect
import mmap
from itertools import pairwise
from pathlib import Path

from holdall.machine import Mapping

_LARGEST_GUARD = 16 * mmap.PAGESIZE
_WITHOUT_LIMIT = 2 * 2**20
"""What a thread gets where the limit of stacks is none."""


def stack_ranges(pid: int, found: list[Mapping], proc: Path = Path("/proc")) -> dict[int, tuple[int, int]]:
    """Return the range of every thread's stack, by the mapping's start."""
    most = _longest_stack(proc / str(pid) / "limits")
    ranges = {}
    for below, here in pairwise(found):
        is_guard = below.permissions.startswith("---") and below.end == here.start and below.nbytes <= _LARGEST_GUARD
        if is_guard and _may_be_stack(here):
            # The kernel joins neighbours: what lies behind the stack is no part of it.
            ranges[here.start] = (here.start, min(here.end, here.start + most - below.nbytes))
    starts = [one.start for one in found]
    for pointer in _stack_pointers(proc / str(pid) / "task"):
        at = bisect.bisect_right(starts, pointer) - 1
        here = found[at]
        is_inside = at >= 0 and here.start <= pointer < here.end and here.nbytes <= most + _LARGEST_GUARD
        if is_inside and here.start not in ranges and _may_be_stack(here):
            ranges[here.start] = (here.start, here.end)
    return ranges


def _may_be_stack(mapping: Mapping) -> bool:
    return not mapping.name and mapping.permissions.startswith("rw-p")


def _longest_stack(limits: Path) -> int:
    try:
        lines = limits.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 8 * 2**20
    for line in lines:
        if line.startswith("Max stack size"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else _WITHOUT_LIMIT
    return 8 * 2**20


def _stack_pointers(tasks: Path) -> list[int]:
    """Return the stack pointers of threads that wait in the kernel; those that run have none to show."""
    pointers = []
    try:
        threads = list(tasks.iterdir())
    except OSError:
        return []
    for thread in threads:
        try:
            words = (thread / "syscall").read_text(encoding="ascii").split()
        except OSError:  # no right to trace the process, or the thread ended
            continue
        if len(words) >= 2 and words[0] != "running":
            pointers.append(int(words[-2], 16))
    return pointers

"""The machine and the versions that a configuration is judged against.

In:  this machine, or what the user says of another one.  Out: one record of limits.
Invariant: memory is the smallest of RAM and every enclosing control group, as totals and not as what happens to be
free while the file is read; a budget stands for another machine and goes before both.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdall.machine import control_groups, disk, shared_memory
from holdall.plan.buffers import Version, installed_version


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rule may compare a configuration with; None stands for what is not known."""

    cores: int
    ram_bytes: int
    limit_bytes: int
    limit_name: str
    vram_bytes: int | None = None
    shm_bytes: int | None = None
    disk_bytes: int | None = None
    python: tuple[int, int] = (3, 11)
    sb3: Version | None = None

    @property
    def is_contained(self) -> bool:
        """Whether a control group allows less than the machine has."""
        return self.limit_bytes < self.ram_bytes and self.limit_name.startswith("control group")


def detect(budget_bytes: int | None = None, vram_bytes: int | None = None, sb3: Version | None = None) -> Machine:
    """Describe this machine; what the caller says goes before what is found."""
    ram = int(psutil.virtual_memory().total)
    limits = [(ram, "RAM"), *((group.total_bytes, group.name) for group in control_groups())]
    limit, name = min(limits) if budget_bytes is None else (budget_bytes, "the budget")
    shm, free = shared_memory(), disk(Path.cwd())
    return Machine(
        cores=_cores(),
        ram_bytes=max(ram, limit),
        limit_bytes=limit,
        limit_name=name,
        vram_bytes=vram_bytes,
        shm_bytes=shm.total_bytes if shm else None,
        disk_bytes=free.free_bytes if free else None,
        python=sys.version_info[:2],
        sb3=sb3 or installed_version(),
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

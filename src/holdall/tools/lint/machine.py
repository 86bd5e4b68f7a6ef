"""Limits of the machine. Rules compare a run with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdall.machine import Limit, control_groups, disk
from holdall.threads import usable_cores


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of a machine. None stands for an unknown limit."""

    cores: int
    ram_bytes: int
    limit_bytes: int
    """The smallest of RAM and all control groups, or the budget of the user."""
    limit_name: str
    """Where `limit_bytes` comes from: `RAM`, `the budget`, or the name of a control group."""
    vram_bytes: int | None = None
    disk_bytes: int | None = None
    python: tuple[int, int] = (3, 11)

    @property
    def is_contained(self) -> bool:
        """Whether a control group allows less memory than the machine has."""
        return self.limit_bytes < self.ram_bytes and self.limit_name.startswith("control group")


def detect_machine(
    budget_bytes: int | None = None, vram_bytes: int | None = None, groups: Sequence[Limit] | None = None
) -> Machine:
    """Describe this machine. Values that are given replace those of the machine. `groups` are its control groups."""
    ram_bytes = int(psutil.virtual_memory().total)
    if budget_bytes is None:
        found = control_groups() if groups is None else groups
        limits = [(ram_bytes, "RAM"), *((group.total_bytes, group.name) for group in found)]
    else:
        limits = [(budget_bytes, "the budget")]
    limit_bytes, limit_name = min(limits)
    free_disk = disk(Path.cwd())
    return Machine(
        cores=usable_cores(),
        ram_bytes=max(ram_bytes, limit_bytes),
        limit_bytes=limit_bytes,
        limit_name=limit_name,
        vram_bytes=vram_bytes,
        disk_bytes=None if free_disk is None else free_disk.free_bytes,
        python=sys.version_info[:2],
    )


def format_share(part: float, whole: float) -> str:
    """Write a share in per cent: `83 %`."""
    return f"{100 * part / whole:.0f} %"

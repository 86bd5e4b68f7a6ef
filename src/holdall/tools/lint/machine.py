"""The machine that a run is compared with, and the bytes of the run's buffer.

In:  this machine, or what the user says of another one; a run.  Out: one record of limits; the buffer's layout and
bytes, or None where a size is not known; bytes as text in decimal and binary units.
Invariant: memory is the smallest total of RAM and every enclosing control group; a budget replaces both. Where the
action space is not known, its bytes are left out and the size is a lower bound.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from holdall.errors import HoldallError
from holdall.machine import control_groups, disk, shared_memory
from holdall.schema import Leaf
from holdall.threads import usable_cores
from holdall.tools.lint.run import ConfiguredRun, Reference, SpaceInfo
from holdall.tools.plan import buffer_layout

_UNITS = ((10**9, "GB", 2**30, "GiB"), (10**6, "MB", 2**20, "MiB"), (10**3, "kB", 2**10, "KiB"))
_NO_ACTION = Leaf("", (0,), np.dtype(np.uint8))


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
    sb3: buffer_layout.Version | None = None

    @property
    def is_contained(self) -> bool:
        """Whether a control group allows less than the machine has."""
        return self.limit_bytes < self.ram_bytes and self.limit_name.startswith("control group")


def detect_machine(
    budget_bytes: int | None = None, vram_bytes: int | None = None, sb3: buffer_layout.Version | None = None
) -> Machine:
    """Describe this machine; what the caller says goes before what is found."""
    ram = int(psutil.virtual_memory().total)
    limits = [(ram, "RAM"), *((group.total_bytes, group.name) for group in control_groups())]
    limit, name = min(limits) if budget_bytes is None else (budget_bytes, "the budget")
    shm, free = shared_memory(), disk(Path.cwd())
    return Machine(
        cores=usable_cores(),
        ram_bytes=max(ram, limit),
        limit_bytes=limit,
        limit_name=name,
        vram_bytes=vram_bytes,
        shm_bytes=shm.total_bytes if shm else None,
        disk_bytes=free.free_bytes if free else None,
        python=sys.version_info[:2],
        sb3=sb3 or buffer_layout.installed_version(),
    )


def sized(count: float) -> str:
    """Write bytes in decimal and in binary units: `42.63 GB (39.70 GiB)`."""
    for size, name, binary, binary_name in _UNITS:
        if abs(count) >= size:
            return f"{count / size:,.2f} {name} ({count / binary:,.2f} {binary_name})"
    return f"{count:,.0f} B"


def percent(part: float, of: float) -> str:
    """Write a share: `83 %`."""
    return f"{100 * part / of:.0f} %"


@dataclass(frozen=True, slots=True)
class BufferNeed:
    """What a run's buffer takes."""

    layout: buffer_layout.BufferLayout
    resident_bytes: int  # once as full as this run makes it
    peak_bytes: int  # while a rollout is flattened; the same where nothing is
    is_exact: bool  # False: a lower bound
    is_certain: bool  # False: the run may be too short to fill it

    @property
    def words(self) -> str:
        """`takes`, or `takes at least`."""
        return "takes" if self.is_exact else "takes at least"


def buffer_need(run: ConfiguredRun, machine: Machine) -> BufferNeed | None:
    """Return what the buffer of a run takes, or None if that is not known."""
    observation, count = run.environments.observation, run.environments.number
    if observation is None or count is None or not run.algorithm.has_plain_buffer:
        return None
    try:
        layout = _layout(run, observation, count, machine.sb3)
    except HoldallError:  # Stable-Baselines3 refuses it too; other rules say so
        return None
    if layout is None:
        return None
    # A rollout is always collected to its end; a replay buffer holds what there was to add.
    steps = None if run.algorithm.on_policy else run.total_timesteps
    resident, is_certain = layout.resident_bytes(steps), run.algorithm.on_policy or steps is not None
    is_exact = run.environments.action is not None
    return BufferNeed(layout, resident, resident + layout.flatten_bytes, is_exact, is_certain)


def _layout(
    run: ConfiguredRun, observation: SpaceInfo, count: int, sb3: buffer_layout.Version | None
) -> buffer_layout.BufferLayout | None:
    """Lay out the run's buffer; None where a size is not known, or the class is not Stable-Baselines3's."""
    steps = run.count("n_steps")
    given = run.value("rollout_buffer_class" if run.algorithm.on_policy else "replay_buffer_class")
    action = run.environments.action.leaves[0] if run.environments.action else _NO_ACTION
    if steps is None:
        return None
    kind = buffer_layout.default_class(run.algorithm.on_policy, observation.is_dict, steps)
    if run.algorithm.on_policy:
        if given is not None:
            return None
        return buffer_layout.rollout_buffer(observation.leaves, action, steps, count, buffer_class=kind, sb3=sb3)
    if isinstance(given, Reference) and given.dotted.startswith("stable_baselines3"):
        kind, given = given.last, None
    size, optimised = run.count("buffer_size"), run.value("optimize_memory_usage")
    kwargs = {} if (extra := run.value("replay_buffer_kwargs")) is None else extra
    if size is None or given is not None or not isinstance(optimised, bool) or not isinstance(kwargs, dict):
        return None
    options: dict[str, Any] = {"buffer_class": kind, "optimize_memory_usage": optimised, "sb3": sb3}
    options["handle_timeout_termination"] = kwargs.get("handle_timeout_termination", True) is not False
    return buffer_layout.replay_buffer(observation.leaves, action, size, count, **options)

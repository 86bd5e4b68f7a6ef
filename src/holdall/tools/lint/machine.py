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

import numpy as np
import psutil

from holdall.errors import HoldallError
from holdall.machine import control_groups, disk, shared_memory
from holdall.schema import Leaf
from holdall.threads import usable_cores
from holdall.tools.lint.run import ConfiguredRun, Reference
from holdall.tools.plan.buffer_layout import (
    BufferLayout,
    Version,
    default_class,
    installed_version,
    replay_buffer,
    rollout_buffer,
)

_DECIMAL = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_BINARY = {"GB": (2**30, "GiB"), "MB": (2**20, "MiB"), "kB": (2**10, "KiB")}
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
    sb3: Version | None = None

    @property
    def is_contained(self) -> bool:
        """Whether a control group allows less than the machine has."""
        return self.limit_bytes < self.ram_bytes and self.limit_name.startswith("control group")


def detect_machine(
    budget_bytes: int | None = None, vram_bytes: int | None = None, sb3: Version | None = None
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
        sb3=sb3 or installed_version(),
    )


def sized(count: float) -> str:
    """Write bytes in decimal and in binary units: `42.63 GB (39.70 GiB)`."""
    for size, name in _DECIMAL:
        if abs(count) >= size:
            binary, binary_name = _BINARY[name]
            return f"{count / size:,.2f} {name} ({count / binary:,.2f} {binary_name})"
    return f"{count:,.0f} B"


def percent(part: float, of: float) -> str:
    """Write a share: `83 %`."""
    return f"{100 * part / of:.0f} %"


@dataclass(frozen=True, slots=True)
class BufferNeed:
    """What a run's buffer takes."""

    layout: BufferLayout
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
    layout = _layout(run, machine, count)
    if layout is None:
        return None
    # A rollout is always collected to its end; a replay buffer holds what there was to add.
    resident = layout.resident_bytes(None if run.algorithm.on_policy else run.total_timesteps)
    is_certain = run.algorithm.on_policy or run.total_timesteps is not None
    return BufferNeed(
        layout, resident, resident + layout.flatten_bytes, run.environments.action is not None, is_certain
    )


def _layout(run: ConfiguredRun, machine: Machine, count: int) -> BufferLayout | None:
    observation, steps = run.environments.observation, run.count("n_steps")
    if observation is None or steps is None:
        return None
    action = run.environments.action.leaves[0] if run.environments.action else _NO_ACTION
    if run.algorithm.on_policy and run.value("rollout_buffer_class") is not None:
        return None
    try:
        if run.algorithm.on_policy:
            kind = default_class(True, observation.is_dict)
            return rollout_buffer(observation.leaves, action, steps, count, buffer_class=kind, sb3=machine.sb3)
        size, kind_, kwargs = run.count("buffer_size"), _replay_class(run), run.value("replay_buffer_kwargs")
        optimised, extra = run.value("optimize_memory_usage"), {} if kwargs is None else kwargs
        if size is None or kind_ is None or not isinstance(optimised, bool) or not isinstance(extra, dict):
            return None
        handles = extra.get("handle_timeout_termination", True)
        return replay_buffer(
            observation.leaves,
            action,
            size,
            count,
            buffer_class=kind_,
            optimize_memory_usage=optimised,
            handle_timeout_termination=handles is not False,
            sb3=machine.sb3,
        )
    except HoldallError:  # Stable-Baselines3 refuses it too; other rules say so
        return None


def _replay_class(run: ConfiguredRun) -> str | None:
    """Return the name of the buffer class of Stable-Baselines3 that the run uses, or None for another one."""
    given = run.value("replay_buffer_class")
    is_dict = bool(run.environments.observation and run.environments.observation.is_dict)
    if given is None:
        return default_class(False, is_dict, run.count("n_steps") or 1)
    if not isinstance(given, Reference) or not given.dotted.startswith("stable_baselines3"):
        return None
    return given.last

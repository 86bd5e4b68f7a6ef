"""The bytes of a run's buffer, from the layouts of `plan`.

In:  a run and the version of Stable-Baselines3.  Out: its buffer's layout, or None where a size is not known.
Invariant: where the action space is not known, its bytes are left out and the size is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdall.errors import HoldallError
from holdall.lint.machine import Machine
from holdall.lint.run import Run
from holdall.lint.values import UNKNOWN, Reference
from holdall.plan.buffers import BufferLayout, default_class, replay_buffer, rollout_buffer
from holdall.schema import Leaf

_NO_ACTION = Leaf("", (0,), np.dtype(np.uint8))


@dataclass(frozen=True, slots=True)
class Need:
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


def need(run: Run, machine: Machine) -> Need | None:
    """Return what the buffer of a run takes, or None if that cannot be told."""
    observation, count = run.environments.observation, run.environments.number
    if observation is None or count is None or not run.algorithm.has_plain_buffer:
        return None
    layout = _layout(run, machine, count)
    if layout is None:
        return None
    # A rollout is always collected to its end; a replay buffer holds what there was to add.
    resident = layout.resident_bytes(None if run.algorithm.on_policy else run.total_timesteps)
    is_certain = run.algorithm.on_policy or run.total_timesteps is not None
    return Need(layout, resident, resident + layout.flatten_bytes, run.environments.action is not None, is_certain)


def _layout(run: Run, machine: Machine, count: int) -> BufferLayout | None:
    observation = run.environments.observation
    if observation is None:
        return None
    action = run.environments.action.leaves[0] if run.environments.action else _NO_ACTION
    steps = run.count("n_steps")
    if steps is None:
        return None
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


def _replay_class(run: Run) -> str | None:
    """Return the name of the buffer class of Stable-Baselines3 that the run uses, or None for another one."""
    given = run.value("replay_buffer_class")
    is_dict = bool(run.environments.observation and run.environments.observation.is_dict)
    if given is None:
        return default_class(False, is_dict, run.count("n_steps") or 1)
    if given is UNKNOWN or not isinstance(given, Reference):
        return None
    return given.last if given.dotted.startswith("stable_baselines3") else None

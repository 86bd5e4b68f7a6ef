"""Plan from Python: `holdall.plan.model(model)`, `holdall.plan.command(...)`. `holdall.tools.plan` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from holdall.errors import ArgumentError
from holdall.tools.plan.planner import Plan, find_limits, plan_command, plan_snapshot
from holdall.tools.probe.inspection import inspect
from holdall.tools.probe.measurement import measure_model, read_status
from holdall.tools.probe.snapshot import Snapshot
from holdall.units import parse_bytes

__all__ = ["command", "model"]

_MEASURE_S = 10.0
"""Seconds for measuring a model, most of which its environments play."""


def model(
    model: Any, *, total_timesteps: int | None = None, budget: str | int | None = None, measures: bool = False
) -> Plan:
    """Plan the run of a live model of Stable-Baselines3, before `learn`.

    The model is neither changed nor stepped. With `measures=True`, its environments play up to 1,000 steps and it makes
    two updates; make a new model afterwards.

    Args:
        total_timesteps: Argument of `learn`. It shows whether the run fills the buffer.
        budget: A limit in addition to those of the machine: bytes, or text such as "8GiB".
        measures: Measure an update, and the bytes of holdall's memory.

    Examples:
        >>> from holdall import plan
        >>> from stable_baselines3 import DQN
        >>> planned = plan.model(DQN("MlpPolicy", env, buffer_size=10_000), total_timesteps=50_000)
    """
    if not hasattr(model, "observation_space") or not hasattr(model, "policy_class"):
        raise ArgumentError(f"model ({type(model).__name__}) must be a model of Stable-Baselines3.")
    resident = read_status("VmRSS")
    context = {"model": model, "total_timesteps": 0 if total_timesteps is None else total_timesteps}
    found = inspect(context)
    if total_timesteps is None:
        found["models"] = tuple(replace(one, total_timesteps=None) for one in found["models"])
    if measures:
        measured = measure_model(model, _MEASURE_S)
        found |= measured | {"notes": (*found["notes"], *measured["notes"])}
    snapshot = Snapshot("holdall.plan.model", "model", resident_bytes=resident, **found)
    return plan_snapshot(snapshot, None, find_limits(None if budget is None else parse_bytes(budget, "budget")))


def command(
    command: Sequence[str], *, budget: str | int | None = None, timeout_s: float = 300.0, **changes: int
) -> Plan:
    """Run `command` until it is about to train, measure it, and plan it.

    Args:
        budget: A limit in addition to those of the machine: bytes, or text such as "8GiB".
        timeout_s: Seconds after which the command is stopped.
        changes: Other values to plan with, such as `buffer_size=200_000`.
    """
    limits = find_limits(None if budget is None else parse_bytes(budget, "budget"))
    return plan_command(command, changes, limits, timeout_s=timeout_s)

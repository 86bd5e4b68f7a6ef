"""Plan: check whether a training run fits in memory before it starts, what would fit, and what to change.

config (options, a file, a live model) -> spec (a run and its buffer) and environments -> sb3_model and
measure_memory (what is measured, in throwaway processes) -> phases (memory by phase, checks against limits) -> planner
(the Plan, and what would fit). `holdall.cli.plan` shows it.

Nothing is loaded here before it is used: lint needs only the layouts of buffers, and what a process has loaded counts
among what it measures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdall.units import parse_bytes

if TYPE_CHECKING:
    from holdall.tools.plan.planner import Plan


def model(model: Any, *, budget: str | int | None = None, networks: bool = True) -> Plan:
    """Plan the run of a live model of Stable-Baselines3, before `learn`.

    Args:
        budget: Bytes, or text such as "8GiB": a limit beside those of the machine.
        networks: Trace an update, which takes some seconds.
    """
    from holdall.tools.plan.config import spec_from_model  # noqa: PLC0415 lazily, as above
    from holdall.tools.plan.planner import make_plan  # noqa: PLC0415

    budget_bytes = None if budget is None else parse_bytes(budget, "budget")
    return make_plan(spec_from_model(model), budget_bytes=budget_bytes, networks=networks)

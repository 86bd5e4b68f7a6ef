"""Plan from Python: `holdall.plan.model(model)`; the work is in `holdall.tools.plan`."""

from __future__ import annotations

from typing import Any

from holdall.tools.plan.config import spec_from_model
from holdall.tools.plan.planner import Plan, make_plan
from holdall.units import parse_bytes

__all__ = ["model"]


def model(model: Any, *, budget: str | int | None = None, networks: bool = True) -> Plan:
    """Plan the run of a live model of Stable-Baselines3, before `learn`.

    Args:
        budget: Bytes, or text such as "8GiB": a limit beside those of the machine.
        networks: Trace an update, which takes some seconds.
    """
    budget_bytes = None if budget is None else parse_bytes(budget, "budget")
    return make_plan(spec_from_model(model), budget_bytes=budget_bytes, networks=networks)

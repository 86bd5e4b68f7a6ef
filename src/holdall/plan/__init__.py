"""Plan: will a training run fit, what would fit, and what is the cheapest change that makes it fit.

spec (settings, files, live) -> measurements (ask: trial) -> phases -> verdict -> answers -> Plan
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdall.units import parse_bytes

if TYPE_CHECKING:
    from holdall.plan.planned import Plan

__all__ = ["model"]


def model(model: Any, *, budget: str | int | None = None, networks: bool = True) -> Plan:
    """Plan the run of a live model of Stable-Baselines3, before `learn`.

    Args:
        budget: Bytes, or text such as "8GiB": a limit beside those of the machine.
        networks: Trace an update, which takes some seconds.
    """
    # `import holdall.plan.buffers` is on lint's way, and none of this is.
    from holdall.plan.live import spec_of_model  # noqa: PLC0415
    from holdall.plan.planned import make_plan  # noqa: PLC0415

    budget_bytes = None if budget is None else parse_bytes(budget, "budget")
    return make_plan(spec_of_model(model), budget_bytes=budget_bytes, networks=networks)

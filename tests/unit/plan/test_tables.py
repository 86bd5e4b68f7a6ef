"""A plan in the terminal: nothing is cut off at 80 columns."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from holdall.cli.plan import plan_tables
from holdall.machine import Limit
from holdall.tools.plan.config import spec_from_settings
from holdall.tools.plan.phases import HoldallNeed, MachineLimits, MeasuredCosts, PlanInputs
from holdall.tools.plan.planner import Plan, plan_from_inputs

GB = 10**9


def _plan(name: str, limit_bytes: int) -> Plan:
    given = {"algo": "sac", "obs": {"image": "84x84x3:uint8", "vector": "31"}, "action": 8, "capacity": 123_456_789}
    spec, _ = spec_from_settings(given)
    limit = Limit(name, limit_bytes, limit_bytes)
    room = MachineLimits((limit,), disk=limit, largest_mapping=9_999 * GB)
    return plan_from_inputs(
        spec, PlanInputs(MeasuredCosts(400 * 2**20), room, HoldallNeed(21_338.0, 4_400.0, 0, 9, {})), ["as it is"]
    )


def _lines(plan: Plan, width: int) -> list[str]:
    printed = StringIO()
    console = Console(file=printed, width=width)
    for part in plan_tables(plan):
        console.print(part, highlight=False)
    return printed.getvalue().splitlines()


@pytest.mark.parametrize("limit_bytes", [8 * GB, 999 * GB])
@pytest.mark.parametrize(
    "name", ["free memory of this machine", "memory.max of /a/rather/long/control/group/" + 40 * "x"]
)
def test_every_figure_is_whole_at_80_columns(name: str, limit_bytes: int) -> None:
    plan = _plan(name, limit_bytes)
    lines = _lines(plan, 80)
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    words = [" ".join(line.split()) for line in lines]
    for line in _lines(plan, 300):
        figures = " ".join(line.split())
        if line.startswith(tuple("0123456789")):  # the rows of the widest table
            assert figures in words


def test_both_units_stand_in_the_head_of_their_column() -> None:
    lines = _lines(_plan("test", 8 * GB), 80)
    head = next(line for line in lines if line.startswith("capacity"))
    assert head.split() == ["capacity", "SB3,", "GB", "GiB", "the", "run", "holdall,", "GB", "GiB", "the", "run"]


def test_a_size_that_nothing_limits_is_any() -> None:
    spec, _ = spec_from_settings(
        {"algo": "dqn", "obs": "84x84x4:uint8", "action": "discrete(4)", "total_timesteps": 1_000}
    )
    limit = Limit("test", 8 * GB, 8 * GB)
    plan = plan_from_inputs(spec, PlanInputs(MeasuredCosts(400 * 2**20), MachineLimits((limit,)), None), [])
    assert dict(plan.largest_sizes())["capacity with SB3's buffer"] == "any"
    assert any(line.split()[-1] == "any" for line in _lines(plan, 80) if line.startswith("balanced"))

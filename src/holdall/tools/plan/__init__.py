"""Plan: check whether a training run fits in memory before it starts, what would fit, and what to change.

config (options, a file, a live model) -> spec (a run, its environments, its buffer_layout) -> subprocess_probe and
measure_memory (what is measured) -> phases (memory by phase, checks against limits) -> recommend (what would fit) ->
planner (the Plan) -> html_page.

Other packages import from here. A name is loaded when it is first used: lint needs only the layouts of buffers, and
what a process has loaded counts among what it measures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdall.units import parse_bytes

if TYPE_CHECKING:
    from holdall.tools.plan.buffer_layout import (
        ROLLOUTS_KEEP_DTYPES,
        BufferLayout,
        Version,
        default_class,
        installed_version,
        leaves_of,
        parse_version,
        replay_buffer,
        rollout_buffer,
    )
    from holdall.tools.plan.config import parse_count, read_config_file, spec_from_model, spec_from_settings
    from holdall.tools.plan.environments import (
        has_images,
        make_single_env,
        parse_observation,
        random_steps,
        read_vec_env,
        space_from_dict,
        space_to_dict,
    )
    from holdall.tools.plan.html_page import write_plan_page
    from holdall.tools.plan.measure_memory import need_from_spaces
    from holdall.tools.plan.phases import FitVerdict, MachineLimits, MeasuredCosts, PlanInputs, RunPhase, largest_phase
    from holdall.tools.plan.planner import ColumnUnits, Plan, heading, largest_sizes, make_plan, row_name, size_name
    from holdall.tools.plan.recommend import PROFILES, code_to_paste, largest_size, share_profiles
    from holdall.tools.plan.spec import ALGORITHM_CLASSES, ALGORITHMS, Algorithm, Spec
    from holdall.tools.plan.subprocess_probe import run_probe

__all__ = [
    "ALGORITHMS", "ALGORITHM_CLASSES", "PROFILES", "ROLLOUTS_KEEP_DTYPES", "Algorithm", "BufferLayout",
    "ColumnUnits", "FitVerdict", "MachineLimits", "MeasuredCosts", "Plan", "PlanInputs", "RunPhase", "Spec",
    "Version", "code_to_paste", "default_class", "has_images", "heading", "installed_version", "largest_phase",
    "largest_size", "largest_sizes", "leaves_of", "make_plan", "make_single_env", "model", "need_from_spaces",
    "parse_count", "parse_observation", "parse_version", "random_steps", "read_config_file", "read_vec_env",
    "replay_buffer", "rollout_buffer", "row_name", "run_probe", "share_profiles", "size_name", "space_from_dict",
    "space_to_dict", "spec_from_model", "spec_from_settings", "write_plan_page",
]  # fmt: skip

_HOMES = {
    "buffer_layout": (
        "ROLLOUTS_KEEP_DTYPES", "BufferLayout", "Version", "default_class", "installed_version", "leaves_of",
        "parse_version", "replay_buffer", "rollout_buffer",
    ),
    "config": ("parse_count", "read_config_file", "spec_from_model", "spec_from_settings"),
    "environments": (
        "has_images", "make_single_env", "parse_observation", "random_steps", "read_vec_env", "space_from_dict",
        "space_to_dict",
    ),
    "html_page": ("write_plan_page",),
    "measure_memory": ("need_from_spaces",),
    "phases": ("FitVerdict", "MachineLimits", "MeasuredCosts", "PlanInputs", "RunPhase", "largest_phase"),
    "planner": (
        "ColumnUnits", "Plan", "heading", "largest_sizes", "make_plan", "row_name", "size_name",
    ),
    "recommend": ("PROFILES", "code_to_paste", "largest_size", "share_profiles"),
    "spec": ("ALGORITHM_CLASSES", "ALGORITHMS", "Algorithm", "Spec"),
    "subprocess_probe": ("run_probe",),
}  # fmt: skip
"""Which module a name lives in."""


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


if not TYPE_CHECKING:  # a type checker would accept every misspelt name

    def __getattr__(name: str) -> object:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = found  # next time it is found at once
        return found

"""The table of settings, and the values that it accepts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from holdall.cli.plan import plan
from holdall.errors import ArgumentError
from holdall.tools.plan.settings import SETTINGS, find_setting, parse_count
from holdall.tools.plan.stand_in import describe_run


def test_every_setting_except_the_name_is_an_option_of_the_command_line() -> None:
    options = set(inspect.signature(plan).parameters)
    assert set(SETTINGS) - options == {"name"}


def test_no_name_belongs_to_two_settings() -> None:
    names = [name for setting in SETTINGS.values() for name in setting.names]
    assert len(names) == len(set(names))
    assert all(find_setting(name) is setting for setting in SETTINGS.values() for name in setting.names)


@pytest.mark.parametrize(
    ("given", "count"), [("1e6", 1_000_000), ("400_000", 400_000), (5, 5), ("1,000", 1000), (2.0, 2)]
)
def test_a_count_may_have_separators_and_an_exponent(given: Any, count: int) -> None:
    assert parse_count(given, "capacity") == count


@pytest.mark.parametrize("given", ["1.5", "many", True, "nan", "inf", ""])
def test_a_count_that_is_not_a_whole_number_is_refused(given: Any) -> None:
    with pytest.raises(ArgumentError, match="capacity"):
        parse_count(given, "capacity")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "algo"),
        ({"algo": "rainbow"}, "rainbow"),
        ({"algo": "recurrentppo"}, "python train.py"),
        ({"algo": "ppo", "capacity": 5}, "rollouts"),
        ({"algo": "sac"}, "obs"),
        ({"algo": "sac", "obs": "4"}, "action"),
    ],
)
def test_a_description_that_makes_no_run_is_refused_with_its_mistake(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        describe_run(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_envs", 0),
        ("num_envs", 10**8),
        ("vec_env", "threads"),
        ("start_method", "vfork"),
        ("wrapper", "gray"),
        ("uses_holdall", "yes"),
        ("policy_kwargs", 3),
        ("device", "gpu"),  # It was planned as the CPU, and fitted.
        ("device", "cuda:x"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_with_its_name(name: str, value: Any) -> None:
    run = {"algo": "sac", "obs": "3", "action": "2"}
    describe_run(run)
    with pytest.raises(ArgumentError, match=name):
        describe_run(run | {name: value})

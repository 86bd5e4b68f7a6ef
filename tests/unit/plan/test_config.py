"""Settings of a run to plan: from files and options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import ArgumentError
from holdall.tools.plan.config import parse_changes, parse_count, read_config_file
from holdall.tools.plan.stand_in import describe_run


def _file(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_toml_is_read_by_the_names_of_the_options(tmp_path: Path) -> None:
    text = 'algo = "sac"\ncapacity = 4e5\naction = 8\n[obs]\nimage = "84x84x3:uint8"\nvector = 31\n'
    run = describe_run(read_config_file(_file(tmp_path, "run.toml", text)))
    assert run.changes == {"n_envs": 1, "buffer_size": 400_000}
    assert run.arguments["algo"] == "sac"
    assert run.arguments["capacity"] < 400_000  # A stand-in can always be allocated.
    assert set(run.arguments["observation"]["spaces"]) == {"image", "vector"}


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.toml", "algo = ", "TOML"),
        ("a.toml", 'algo = "sac"\nroom = 3\n', "room"),
        ("dqn.yml", "CartPole-v1:\n  buffer_size: 100000\n", "rl_zoo3.train"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        read_config_file(_file(tmp_path, name, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere"):
        read_config_file(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("given", "count"), [("1e6", 1_000_000), ("400_000", 400_000), (5, 5), ("1,000", 1000), (2.0, 2)]
)
def test_counts_are_read_as_people_write_them(given: Any, count: int) -> None:
    assert parse_count(given, "capacity") == count


@pytest.mark.parametrize("given", ["1.5", "many", True, "nan", "inf", ""])
def test_counts_are_whole_numbers(given: Any) -> None:
    with pytest.raises(ArgumentError, match="capacity"):
        parse_count(given, "capacity")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "algo"),
        ({"algo": "rainbow"}, "rainbow"),
        ({"algo": "sac"}, "obs"),
        ({"algo": "sac", "obs": "4"}, "action"),
        ({"algo": "sac", "obs": "4", "action": 1, "num_envs": 0}, "num_envs"),
        ({"algo": "sac", "obs": "4", "action": 1, "vec_env": "threads"}, "vec_env"),
        ({"algo": "sac", "obs": "4", "action": 1, "start_method": "vfork"}, "start_method"),
        ({"algo": "sac", "obs": "4", "action": 1, "wrapper": "gray"}, "wrapper"),
        ({"algo": "sac", "obs": "4", "action": 1, "uses_holdall": "yes"}, "uses_holdall"),
        ({"algo": "ppo", "obs": "4", "action": 1, "capacity": 5}, "rollouts"),
        ({"algo": "recurrentppo", "obs": "4", "action": 1}, "python train.py"),
        ({"algo": "sac", "obs": "4", "action": 1, "policy_kwargs": 3}, "policy_kwargs"),
    ],
)
def test_settings_that_make_no_run_say_what_is_wrong(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        describe_run(settings)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe with a name")
@pytest.mark.timeout(60)  # reading a pipe would wait for ever
def test_a_file_that_is_none_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    for path in (tmp_path / "run.toml", tmp_path):
        with pytest.raises(ArgumentError, match="not a regular file"):
            read_config_file(path)


@pytest.mark.parametrize(
    "wrong", [{"device": "gpu"}, {"device": "cuda:x"}, {"num_envs": 10**8}], ids=["word", "number", "environments"]
)
def test_a_misspelt_setting_never_passes_as_another(wrong: dict[str, Any]) -> None:
    """`device="gpu"` was planned as the CPU, and fitted."""
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        describe_run({"algo": "sac", "obs": "3", "action": "2"} | wrong)


def test_changes_are_names_and_whole_numbers() -> None:
    assert parse_changes(["buffer_size=2e5", "n_envs=4"]) == {"buffer_size": 200_000, "n_envs": 4}
    for wrong in ("buffer_size", "=5", "buffer_size=many"):
        with pytest.raises(ArgumentError, match="--set"):
            parse_changes([wrong])

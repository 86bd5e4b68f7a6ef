"""Settings of a run to plan that are written in files and in texts of the command line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdall.errors import ArgumentError
from holdall.tools.plan.config import parse_changes, read_config_file
from holdall.tools.plan.stand_in import describe_run


def _file(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_keys_may_have_the_names_of_stable_baselines3(tmp_path: Path) -> None:
    file = _file(tmp_path, "run.toml", "buffer_size = 5\nn_envs = 2\nn_timesteps = 7\n")
    assert read_config_file(file) == {"capacity": 5, "num_envs": 2, "total_timesteps": 7}


def test_toml_is_read_by_the_names_of_the_options(tmp_path: Path) -> None:
    text = 'algo = "sac"\ncapacity = 4e5\naction = 8\n[obs]\nimage = "84x84x3:uint8"\nvector = 31\n'
    run = describe_run(read_config_file(_file(tmp_path, "run.toml", text)))
    assert run.changes == {"num_envs": 1, "capacity": 400_000}
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
def test_a_file_without_valid_settings_is_refused(tmp_path: Path, name: str, text: str, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        read_config_file(_file(tmp_path, name, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="nowhere"):
        read_config_file(tmp_path / "nowhere.toml")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe with a name")
@pytest.mark.timeout(60)  # Reading a pipe would wait forever.
def test_a_pipe_or_a_folder_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.toml")
    for path in (tmp_path / "run.toml", tmp_path):
        with pytest.raises(ArgumentError, match="not a regular file"):
            read_config_file(path)


def test_changes_are_names_and_whole_numbers() -> None:
    assert parse_changes(["buffer_size=2e5", "n_envs=4"]) == {"buffer_size": 200_000, "n_envs": 4}
    for wrong in ("buffer_size", "=5", "buffer_size=many"):
        with pytest.raises(ArgumentError, match="--set"):
            parse_changes([wrong])

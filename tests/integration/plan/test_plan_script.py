"""`holdall plan train.py`: the whole plan from a script, other values with --set, and what each exit code means."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from holdall.cli import app
from holdall.tools.lint.plan_input import parse_changes, read_script

SCRIPT = """
import argparse
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.vec_env import VecFrameStack
parser = argparse.ArgumentParser()
parser.add_argument("--buffer-size", type=int, default=1_000_000)
args = parser.parse_args()
env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", n_envs=2), n_stack=4)
DQN("CnnPolicy", env, buffer_size=args.buffer_size, batch_size=64).learn(10_000_000)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file


def plan(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments), "--no-networks"])


def test_a_script_is_read_as_the_options_would_say_it(script: Path) -> None:
    settings = dict(read_script(script).settings)
    assert settings["algo"] == "dqn"
    assert settings["obs"] == ["84x84x1:uint8"]
    assert (settings["frame_stack"], settings["num_envs"]) == (4, 2)
    assert (settings["capacity"], settings["batch_size"], settings["total_timesteps"]) == (1_000_000, 64, 10_000_000)
    assert settings["action"] == "discrete(6)"


@pytest.mark.nightly
def test_the_verdict_is_the_exit_code_and_set_tries_another_value(script: Path) -> None:
    too_large = plan(script, "--memory", "20GB")
    assert too_large.exit_code == 2
    assert "does not fit" in too_large.stdout
    assert plan(script, "--memory", "20GB", "--set", "buffer_size=1000").exit_code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ["--bogus"],
        ["--algo", "ppo", "--obs", "4", "--action", "discrete(2)", "--capacity", "1e6"],
        ["nowhere.py"],
        ["--algo", "sac"],
    ],
)
def test_no_mistake_looks_like_a_verdict(wrong: list[str]) -> None:
    assert plan(*wrong).exit_code == 64


def test_names_of_other_libraries_are_understood_and_others_corrected() -> None:
    assert parse_changes(["buffer_size=5", "n_envs=2"]) == {"capacity": "5", "num_envs": "2"}
    with pytest.raises(ValueError, match="did you mean buffer_size"):
        parse_changes(["bufer_size=5"])


def test_buffers_of_a_script_without_a_model_are_compared_with_memory(tmp_path: Path) -> None:
    file = tmp_path / "loop.py"
    file.write_text(
        "import numpy as np\nclass ReplayBuffer:\n    def __init__(self, n):\n"
        "        self.obs = np.zeros((n, 4, 84, 84), np.uint8)\nbuffer = ReplayBuffer(1_000_000)\n"
    )
    assert plan(file, "--memory", "20GB").exit_code == 2
    assert plan(file, "--memory", "80GB").exit_code == 0


def test_a_reader_that_goes_away_changes_no_exit_code() -> None:
    command = f"{sys.executable} -m holdall lint --explain M05 | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("0")
    assert done.stderr == ""


def test_the_version_is_printed() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.startswith("holdall ")

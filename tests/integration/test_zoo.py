"""`holdall.zoo` with rl_zoo3: its commands train, continue and show models with holdall's buffers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

rl_zoo3 = pytest.importorskip("rl_zoo3", reason="needs rl_zoo3, an extra of its own")

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "rl_zoo.md").read_text(encoding="utf-8")
COMMON = ["--env", "CartPole-v1", "--seed", "3", "--eval-freq", "-1", "--device", "cpu", "--num-threads", "1"]
SHORT = ["-n", "256", "-params", "learning_starts:100", "buffer_size:1000", "train_freq:64", "gradient_steps:32"]
HOLDALL = ["--gym-packages", "holdall.zoo"]

SEVERAL = """
import json, runpy, sys
from stable_baselines3.common.base_class import BaseAlgorithm
kept, begin = [], BaseAlgorithm.__init__
def init(self, *args, **settings):
    kept.append(self)
    begin(self, *args, **settings)
BaseAlgorithm.__init__ = init
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *arguments]
    runpy.run_module(f"rl_zoo3.{script}", run_name="__main__", alter_sys=True)
    model = kept[-1]
    buffer = getattr(model, "replay_buffer", None) or getattr(model, "rollout_buffer", None)
    size = buffer.size() if buffer else 0
    print("BUFFER", type(buffer).__module__, type(buffer).__name__, size, getattr(model, "_n_updates", 0))
"""
"""A program that runs scripts of the zoo in one process, which imports torch once, and prints their buffers."""


def run_scripts(folder: Path, *scripts: list[str]) -> list[list[str]]:
    """Return for every script: module and name of its buffer, the buffer's size, and the number of updates."""
    surroundings = os.environ | {"PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SEVERAL, json.dumps(scripts)]
    done = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("BUFFER ")]


def read_weights(folder: Path, algorithm: str, number: int = 1, env: str = "CartPole-v1") -> bytes:
    with zipfile.ZipFile(folder / algorithm / f"{env}_{number}" / f"{env}.zip") as model:
        return model.read("policy.pth")


@pytest.mark.nightly
def test_one_word_on_the_command_line_gives_the_buffers_and_the_same_weights(tmp_path: Path) -> None:
    """The models are trained with either buffer, saved with the buffer, continued with `-i`, and shown by `enjoy`."""
    dqn = ["train", "--algo", "dqn", *COMMON]
    ppo = ["train", "--algo", "ppo", *COMMON, "-n", "256"]
    saved = "plain/dqn/CartPole-v1_1/CartPole-v1.zip"
    plain, plain_ppo, ours, ours_ppo, on, on_from_plain, shown = run_scripts(
        tmp_path,
        [*dqn, "-f", "plain", "--save-replay-buffer", *SHORT],
        [*ppo, "-f", "plain"],
        [*dqn, "-f", "ours", "--save-replay-buffer", *HOLDALL, *SHORT],
        [*ppo, "-f", "ours", *HOLDALL],
        [*dqn, "-f", "ours", *HOLDALL, "-i", saved.replace("plain", "ours"), *SHORT],
        [*dqn, "-f", "plain", *HOLDALL, "-i", saved, *SHORT],
        ["enjoy", "--algo", "dqn", "--env", "CartPole-v1", "-f", "ours", "-n", "20", "--no-render", "--device", "cpu"],
    )
    assert plain[:2] == ["stable_baselines3.common.buffers", "ReplayBuffer"]
    assert ours[:2] == on[:2] == on_from_plain[:2] == ["holdall.sb3.replay", "ReplayBuffer"]
    assert read_weights(tmp_path / "plain", "dqn") == read_weights(tmp_path / "ours", "dqn")
    assert (int(ours[2]), int(on[2])) == (256, 512), "steps are added to the saved buffer"
    assert int(ours[3]) > 50
    assert read_weights(tmp_path / "plain", "dqn", 2) == read_weights(tmp_path / "ours", "dqn", 2), (
        "a plain buffer is copied"
    )
    assert shown[:2] == ["holdall.sb3.replay", "ReplayBuffer"], "the saved model names the buffer"
    assert plain_ppo[:2] == ["stable_baselines3.common.buffers", "RolloutBuffer"]
    assert ours_ppo[:2] == ["holdall.sb3.rollout", "RolloutBuffer"]
    assert read_weights(tmp_path / "plain", "ppo") == read_weights(tmp_path / "ours", "ppo")


OTHERS: dict[str, Any] = {
    "qrdqn": ("CartPole-v1", "holdall.sb3.replay ReplayBuffer", SHORT),
    "sac": ("Pendulum-v1", "holdall.sb3.replay ReplayBuffer", ["-n", "300", "-params", "learning_starts:250"]),
    "tqc": ("Pendulum-v1", "holdall.sb3.replay ReplayBuffer", ["-n", "300", "-params", "learning_starts:250"]),
    "a2c": ("CartPole-v1", "holdall.sb3.rollout RolloutBuffer", ["-n", "600"]),
    "trpo": ("CartPole-v1", "holdall.sb3.rollout RolloutBuffer", ["-n", "600"]),
    "ppo_lstm": ("CartPoleNoVel-v1", "holdall.sb3.contrib RecurrentRolloutBuffer", ["-n", "600"]),
    "ars": ("CartPole-v1", "builtins NoneType", ["-n", "300"]),
}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", OTHERS)
def test_every_algorithm_of_the_zoo_learns_the_same_weights(algorithm: str, tmp_path: Path) -> None:
    """The hyperparameters are those of the zoo."""
    env, buffer, length = OTHERS[algorithm]
    train = ["train", "--algo", algorithm, *COMMON, "--env", env]
    done = run_scripts(tmp_path, [*train, "-f", "plain", *length], [*train, "-f", "ours", *HOLDALL, *length])
    assert "holdall" not in " ".join(done[0])
    assert " ".join(done[1][:2]) == buffer
    assert read_weights(tmp_path / "plain", algorithm, env=env) == read_weights(tmp_path / "ours", algorithm, env=env)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_class_may_be_named_in_hyperparameters(tmp_path: Path) -> None:
    """It is named in a file or on the command line, as in the guide, without `holdall.zoo`."""
    published = Path(rl_zoo3.__file__).parent / "hyperparams" / "dqn.yml"
    settings = yaml.safe_load(published.read_text())["CartPole-v1"]
    (line,) = (row for row in GUIDE.splitlines() if row.startswith("  replay_buffer_class: "))
    (tmp_path / "with_holdall.yml").write_text(yaml.safe_dump({"CartPole-v1": settings | yaml.safe_load(line)}))
    (command,) = (row for row in GUIDE.splitlines() if "__import__" in row and row.startswith("python"))
    train = ["train", "--algo", "dqn", *COMMON]
    plain, file, on_line, shown = run_scripts(
        tmp_path,
        [*train, "-f", "plain", *SHORT],
        [*train, "-f", "file", "--conf-file", "with_holdall.yml", *SHORT],
        [*train, "-f", "line", *SHORT, shlex.split(command)[-1]],
        ["enjoy", "--algo", "dqn", "--env", "CartPole-v1", "-f", "file", "-n", "20", "--no-render", "--device", "cpu"],
    )
    assert plain[:2] == ["stable_baselines3.common.buffers", "ReplayBuffer"]
    assert file[:2] == on_line[:2] == shown[:2] == ["holdall.sb3.replay", "ReplayBuffer"]
    plain_weights = read_weights(tmp_path / "plain", "dqn")
    assert plain_weights == read_weights(tmp_path / "file", "dqn") == read_weights(tmp_path / "line", "dqn")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    """They run one after another in one folder. One of them uses a file from the guide."""
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "prioritized.py").write_text(program)
    commands = "".join(re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)).splitlines()
    assert len(commands) == 6
    surroundings = os.environ | {"PYTHONPATH": str(ROOT / "src"), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    for command in commands:
        python, *arguments = shlex.split(command)
        assert python == "python"
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=surroundings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, command + done.stdout[-3000:] + done.stderr[-3000:]

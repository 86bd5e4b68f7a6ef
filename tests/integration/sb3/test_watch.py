"""`WatchCallback` in real trainings, and scripts that do not import holdall."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger

from holdall import ArgumentError
from holdall.machine import LINUX
from holdall.sb3 import WatchCallback

pytestmark = pytest.mark.skipif(not LINUX, reason="reads /proc")


class LogKeeper(KVWriter):
    """A log writer that keeps the logged names."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        self.names |= set(key_values)

    def close(self) -> None:
        """Do nothing, because no file is open."""


class UntilRecorded(BaseCallback):
    """Ends a training once the recording has the needed phases and parts."""

    def __init__(self, record: Path) -> None:
        super().__init__()
        self._record = record

    def _on_step(self) -> bool:
        if self.n_calls % 256:
            return True
        lines = _read_lines(self._record) if self._record.exists() else []
        phases = {line["name"] for line in lines if line["kind"] == "phase" and line["count"] > 1}
        seen = [line for line in lines if line["kind"] == "reading" and (line["step"] or 0) > 256]
        is_named = bool(seen) and "optimizer state" in {part["name"] for part in seen[-1]["parts"]}
        return not is_named or phases != {"collect", "train"}


def _read_lines(record: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a recording. The last line may be incomplete."""
    return [json.loads(line) for line in record.read_text(encoding="utf-8").split("\n")[:-1]]


class SlowEnv(gym.Wrapper[Any, Any, Any, Any]):
    """An environment with slow steps, so that the watcher has time for readings."""

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        return super().step(action)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))


def test_a_training_is_logged_and_recorded_with_its_phases(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", SlowEnv(gym.make("CartPole-v1")), n_steps=256, n_epochs=1, device="cpu")
    kept = LogKeeper()
    model.set_logger(Logger(None, [kept]))
    callback = WatchCallback(0.2, record=tmp_path / "run.jsonl")
    model.learn(100_000, callback=[callback, UntilRecorded(tmp_path / "run.jsonl")])
    assert {"memory/total_mib", "memory/buffers_mib", "memory/python_mib", "memory/left_mib"} <= kept.names
    lines = _read_lines(tmp_path / "run.jsonl")
    readings = [line for line in lines if line["kind"] == "reading"]
    names = {part["name"] for part in readings[-1]["parts"]}
    assert {"rollout.observations", "rollout.advantages", "parameters", "optimizer state"} <= names
    assert max(line["step"] for line in readings) > 256
    phases = {line["name"]: line for line in lines if line["kind"] == "phase"}
    assert set(phases) == {"collect", "train"}
    assert all(phase["peak"] > 100 * 2**20 and phase["count"] > 1 for phase in phases.values())
    assert callback.watch is None, "the watcher must end with the training"


def test_on_pressure_checkpoint_needs_a_checkpoint_callback() -> None:
    with pytest.raises(ArgumentError, match="CheckpointCallback"):
        WatchCallback(on_pressure="checkpoint")


@pytest.mark.nightly
def test_a_checkpoint_is_saved_between_two_steps_under_memory_pressure(tmp_path: Path) -> None:
    from holdall import ReplayMemory
    from holdall.machine import held_bytes
    from holdall.sb3 import CheckpointCallback, ReplayBuffer

    saves = CheckpointCallback(10**9, tmp_path / "saved")
    model = DQN("MlpPolicy", SlowEnv(gym.make("CartPole-v1")), buffer_size=5000, replay_buffer_class=ReplayBuffer)
    limit = held_bytes().proportional
    model.learn(600, callback=WatchCallback(0.5, limit=limit, on_pressure="checkpoint", checkpoint=saves))
    deadline = time.monotonic() + 30
    while not (tmp_path / "saved").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with ReplayMemory.load(tmp_path / "saved") as memory:
        assert 0 < len(memory) <= 600


@pytest.mark.nightly
def test_the_parts_of_a_script_without_holdall_have_names(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\n"
        "import gymnasium as gym\n"
        "from stable_baselines3 import DQN\n"
        "from stable_baselines3.common.callbacks import BaseCallback\n"
        "class Slow(BaseCallback):\n"
        "    def _on_step(self):\n"
        "        time.sleep(0.005)\n"
        "        return True\n"
        "DQN('MlpPolicy', gym.make('CartPole-v1'), buffer_size=5000, device='cpu').learn(1500, callback=Slow())\n",
        encoding="utf-8",
    )
    record = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "holdall", "watch", "--interval", "0.5", "--record", str(record), "--"]
    done = subprocess.run([*command, sys.executable, str(script)], capture_output=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    readings = [line for line in lines if line["kind"] == "reading" and line["step"]]
    assert readings[-1]["goal"] == 1500
    assert {"replay.observations", "parameters"} <= {part["name"] for part in readings[-1]["parts"]}
    assert readings[-1]["attributed"] > 0.95
    assert any(line["kind"] == "verdict" and line["name"] == "filling" for line in lines)

"""`save_replay_buffer` and `load_replay_buffer` keep the steps and the training, and make no second copy in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.utils import set_random_seed

from holdall.sb3 import ReplayBuffer

from .comparison import Task, assert_same_learning, make_learning, train
from .environments import BUTTONS, VECTOR, Stacked, Wander, make_dict_space
from .pair import Case, Pair

CASES = [
    Case(VECTOR, lanes=3),
    Case(spaces.Box(0, 255, (4, 36, 36), np.uint8), lanes=2, stacked=True),
    Case(spaces.Box(-1, 1, (60, 7), np.float32), stacked=True),
    Case(make_dict_space((3, 40, 40)), lanes=2, transposed=True),
    Case(spaces.Discrete(5), BUTTONS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ticks", [0, 1, 13, 70, 190], ids=lambda ticks: f"{ticks} ticks")
def test_a_loaded_buffer_has_the_slots_of_the_saved_one(case: Case, ticks: int, tmp_path: Path) -> None:
    """The loaded buffer continues as the saved one does."""
    pair = Pair(case)
    pair.feed(ticks)
    saved = pair.ours
    save_to_pkl(tmp_path / "buffer.pkl", saved)
    pair.ours = load_from_pkl(tmp_path / "buffer.pkl")
    pair.assert_same_arrays()
    pair.feed(110)
    pair.assert_same_arrays()
    pair.assert_same_samples()


def test_saving_does_not_change_the_buffer(tmp_path: Path) -> None:
    """It continues as if it had not been saved."""
    pair = Pair(CASES[1])
    for ticks in (13, 70, 100):
        pair.feed(ticks)
        save_to_pkl(tmp_path / "buffer.pkl", pair.ours)
        pair.assert_same_arrays()
        pair.assert_same_samples()


def test_a_saved_buffer_can_be_saved_again_after_loading(tmp_path: Path) -> None:
    """The buffer is saved and loaded several times."""
    pair = Pair(CASES[3])
    for ticks in (13, 70, 100):
        pair.feed(ticks)
        save_to_pkl(tmp_path / "buffer.pkl", pair.ours)
        pair.ours = load_from_pkl(tmp_path / "buffer.pkl")
    pair.assert_same_arrays()
    pair.assert_same_samples()


@pytest.mark.parametrize(
    "task",
    [
        Task(partial(Wander, VECTOR), "SAC", lanes=2),
        Task(partial(Stacked, BUTTONS), "DQN", "CnnPolicy", buffer_size=60),
        Task(partial(Wander, make_dict_space()), "TD3", "MultiInputPolicy", lanes=2),
    ],
    ids=lambda task: task.policy,
)
def test_training_resumed_from_a_file_gives_the_same_weights(task: Task, tmp_path: Path) -> None:
    """A new model loads weights and buffer from files, and continues the training."""

    def train_and_resume(buffer_class: type[PlainReplayBuffer] | None) -> OffPolicyAlgorithm:
        first = train(task.make_model(buffer_class), make_learning(90))
        first.save(tmp_path / "model")
        first.save_replay_buffer(tmp_path / "buffer")
        second = task.make_model(buffer_class)
        second.set_parameters(str(tmp_path / "model.zip"))
        second.load_replay_buffer(tmp_path / "buffer")
        set_random_seed(11)
        return train(second, make_learning(80))

    assert_same_learning(train_and_resume(None), train_and_resume(ReplayBuffer))


SPIKE = """
import json, pathlib, sys
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from holdall.sb3 import ReplayBuffer

path = pathlib.Path(sys.argv[1])
is_compressed = sys.argv[2] == "compressed"

def kib(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))

def measure_spike(act):
    before = kib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # This resets the peak.
    kept = act()
    return kept, {"peak": (kib("VmHWM") - before) * 1024, "kept": (kib("VmRSS") - before) * 1024}

rng = np.random.default_rng(0)
action, reward = np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
image = spaces.Box(0, 255, (3, 84, 84), np.uint8)
space = spaces.Dict({"camera": image, "state": spaces.Box(-1, 1, (31,), np.float32)})
settings = {"budget": None} if is_compressed else {}
buffer = ReplayBuffer(20_000, space, spaces.Box(-1, 1, (2,), np.float32), device="cpu", **settings)

def observe():
    camera = rng.integers(0, 200 if is_compressed else 256, (1, 3, 84, 84), np.uint8)
    return {"camera": camera, "state": rng.normal(size=(1, 31)).astype(np.float32)}

obs = observe()
for step in range(6_000):
    next_obs = observe()
    done = step % 50 == 49
    buffer.add(obs, next_obs, action, reward, np.array([done]), [{}])
    obs = observe() if done else next_obs

buffer.memory.store.wait_idle()
small = ReplayBuffer(10, space, spaces.Box(-1, 1, (2,), np.float32), device="cpu")
save_to_pkl(path, small), load_from_pkl(path)  # This imports the modules that saving needs.

held = buffer.report().total_bytes
_, saving = measure_spike(lambda: save_to_pkl(path, buffer))
del buffer
loaded, loading = measure_spike(lambda: load_from_pkl(path))
print(json.dumps({"held": held, "file": path.stat().st_size, "saving": saving, "loading": loading}))
"""


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc")
@pytest.mark.parametrize("form", ["raw", "compressed"])
def test_saving_and_loading_take_no_second_copy(form: str, tmp_path: Path) -> None:
    """The buffer has some 130 MB. The peak is less than 48 MB above them, and the file is no larger than the buffer."""
    command = [sys.executable, "-c", SPIKE, str(tmp_path / "buffer.pkl"), form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    mb = 1_000_000
    assert 120 * mb < figures["held"] < 200 * mb, figures
    assert figures["file"] < figures["held"] + mb, figures
    assert figures["saving"]["peak"] < 48 * mb, figures
    assert figures["loading"]["peak"] < figures["held"] + 48 * mb, figures

"""The claims of the lint rules about Stable-Baselines3, Python and torch are true."""

import io
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import CheckpointCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from holdall.tools.lint.rules import RULES


def make_carts(count: int) -> VecEnv:
    return make_vec_env("CartPole-v1", n_envs=count)


def test_weights_do_not_change_before_learning_starts() -> None:  # L03
    model = DQN("MlpPolicy", "CartPole-v1", learning_starts=40, buffer_size=100, seed=0)
    before = [parameter.detach().clone() for parameter in model.policy.parameters()]
    model.learn(40)
    assert all((old == new).all() for old, new in zip(before, model.policy.parameters(), strict=True))
    model.learn(41)
    assert not all((old == new).all() for old, new in zip(before, model.policy.parameters(), strict=True))


def test_a_frequency_counts_calls_and_not_steps(tmp_path: Path) -> None:  # L02, L17
    model = PPO("MlpPolicy", make_carts(2), n_steps=8, batch_size=16, device="cpu")
    model.learn(16, callback=CheckpointCallback(4, str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl_model_16_steps.zip", "rl_model_8_steps.zip"]
    never = tmp_path / "never"
    model.learn(16, callback=CheckpointCallback(16, str(never)))
    assert list(never.iterdir()) == []


def test_an_on_policy_model_saves_no_replay_buffer(tmp_path: Path) -> None:  # S02
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    model.learn(8, callback=CheckpointCallback(8, str(tmp_path), save_replay_buffer=True))
    assert [path.suffix for path in tmp_path.iterdir()] == [".zip"]


def test_an_empty_replay_buffer_is_written_whole(tmp_path: Path) -> None:  # M09, S01
    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=20_000)
    model.save_replay_buffer(tmp_path / "empty.pkl")
    per_transition = 2 * 4 * 4 + 8 + 3 * 4
    assert (tmp_path / "empty.pkl").stat().st_size >= 20_000 * per_transition


def test_rollouts_are_completed_beyond_the_total() -> None:  # L10
    model = PPO("MlpPolicy", make_carts(2), n_steps=8, batch_size=16, device="cpu")
    model.learn(17)
    assert model.num_timesteps == 32


def test_capacity_is_rounded_down_and_there_are_fewer_updates_than_steps() -> None:  # M10, L06
    model = SAC("MlpPolicy", make_vec_env("Pendulum-v1", n_envs=3), buffer_size=100, learning_starts=0)
    assert model.replay_buffer is not None
    assert model.replay_buffer.buffer_size * 3 == 99
    model.learn(30)
    assert model._n_updates == 10


def test_a_target_interval_below_the_environments_is_every_call() -> None:  # L15
    with pytest.warns(UserWarning, match="greater than the target network update interval"):
        DQN("MlpPolicy", make_carts(4), target_update_interval=2, buffer_size=100)


def test_each_learn_counts_from_zero_by_default() -> None:  # L11
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, device="cpu")
    model.learn(8)
    model.learn(8)
    assert model.num_timesteps == 8
    model.learn(8, reset_num_timesteps=False)
    assert model.num_timesteps == 16


def test_a_reset_by_hand_is_not_seen_by_the_model() -> None:  # L12, L18
    env = make_vec_env("CartPole-v1", n_envs=1, seed=0)
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu")
    model.learn(8)
    seen = env.reset()
    assert model._last_obs is not None
    assert not np.array_equal(np.asarray(model._last_obs), np.asarray(seen))


def test_a_loaded_model_has_an_empty_replay_buffer(tmp_path: Path) -> None:  # S06
    model = DQN("MlpPolicy", "CartPole-v1", buffer_size=100, learning_starts=10)
    model.learn(20)
    model.save(tmp_path / "agent")
    loaded = DQN.load(tmp_path / "agent", env=model.get_env())
    assert loaded.replay_buffer is not None
    assert loaded.replay_buffer.size() == 0
    assert loaded.num_timesteps == 20


class _Nowhere(io.RawIOBase):
    """A file that discards its content."""

    def write(self, data: object) -> int:
        return memoryview(data).nbytes  # type: ignore[arg-type]  # It accepts every object with a buffer.

    def writable(self) -> bool:
        return True


@pytest.mark.parametrize(("protocol", "copies"), [(4, True), (5, False)])
def test_pickle_copies_arrays_before_protocol_5(protocol: int, copies: bool) -> None:  # S03
    array = np.ones(4_000_000, dtype=np.uint8)
    tracemalloc.start()
    pickle.dump(array, _Nowhere(), protocol=protocol)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (peak > array.nbytes) is copies


@pytest.mark.nightly
def test_processes_without_a_main_guard_are_stopped_by_python(tmp_path: Path) -> None:  # M12
    script = tmp_path / "train.py"
    script.write_text(RULES["M12"].doc.bad[0].source.replace("n_envs=4", "n_envs=1"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode != 0
    assert "bootstrapping phase" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(("order", "threads"), [("before", 1), ("after", None)])
def test_the_number_of_openmp_threads_is_read_once(order: str, threads: int | None) -> None:  # P11
    lines = ["import os", "os.environ['OMP_NUM_THREADS'] = '1'", "import torch", "print(torch.get_num_threads())"]
    if order == "after":
        lines[1], lines[2] = lines[2], lines[1]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    default = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) == (threads or int(default.stdout))

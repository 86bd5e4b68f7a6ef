"""A training that was killed and resumed ends with the weights of one that was not, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

from holdall import ArgumentError, CheckpointError, ReplayMemory
from holdall.sb3 import CheckpointCallback, PrioritizedReplayBuffer, resume

from .resumed import ARM, ENV_STATE, SEED, VECTOR, DriftEnv, environments, new_model

KINDS = ["SAC", "SAC normalized", "DQN", "PrioritizedDQN", "PrioritizedQRDQN", "DDPG", "HER"]
OTHERS = [("SAC", "reset"), ("HER", "state"), ("HER", "reset")]
STEPS = 120
SECOND_SEED = 77


def assert_same_weights(model: Any, expected: Any) -> None:
    for name, mine in model.get_parameters().items():
        _assert_same(mine, expected.get_parameters()[name], name)
    assert model.num_timesteps == expected.num_timesteps
    assert model._n_updates == expected._n_updates


def _assert_same(mine: Any, other: Any, name: str) -> None:
    if isinstance(other, dict):
        assert mine.keys() == other.keys(), name
        for key in other:
            _assert_same(mine[key], other[key], f"{name}.{key}")
    elif isinstance(other, list | tuple):
        for index, (one, two) in enumerate(zip(mine, other, strict=True)):
            _assert_same(one, two, f"{name}.{index}")
    elif hasattr(other, "numpy"):
        assert mine.numpy().tobytes() == other.numpy().tobytes(), name
    else:
        assert mine == other, name


def killed(kind: str, path: Path, steps: int, state: str) -> None:
    """Train in a process of its own until it is killed behind its first checkpoint."""
    program = [sys.executable, "-m", "tests.integration.sb3.resumed", kind, str(steps), str(path), state]
    root = Path(__file__).parents[3]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_one_that_reset_its_environments(kind: str, tmp_path: Path) -> None:
    """With the same seed, at the step of the checkpoint."""
    first = new_model(kind)
    first.learn(STEPS, callback=CheckpointCallback(STEPS // 2, tmp_path))
    first.get_env().seed(SECOND_SEED)  # type: ignore[union-attr]
    first._last_obs = None
    first.learn(STEPS, reset_num_timesteps=False)

    env = environments(kind)
    model = resume(tmp_path, env)
    env.seed(SECOND_SEED)
    model.learn(STEPS, reset_num_timesteps=False)
    assert_same_weights(model, first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_one_that_was_never_interrupted(kind: str, tmp_path: Path) -> None:
    """With environments that return their state, in the middle of episodes and of updates."""
    whole = new_model(kind)
    callback = CheckpointCallback(30, tmp_path, keep=1, env_state=ENV_STATE)
    whole.learn(STEPS + 60, callback=callback)

    part = new_model(kind)
    part.learn(STEPS + 60, callback=_Until(30, tmp_path / "part", STEPS, env_state=ENV_STATE))
    assert part.num_timesteps < whole.num_timesteps
    model = resume(tmp_path / "part", environments(kind), env_state=ENV_STATE)
    assert model.num_timesteps == STEPS
    model.learn(60, reset_num_timesteps=False)
    assert_same_weights(model, whole)


class _Until(CheckpointCallback):
    """Stops a training some steps after a checkpoint."""

    def __init__(self, save_freq: int, path: Path, last: int, **settings: Any) -> None:
        super().__init__(save_freq, path, **settings)
        self._last = last

    def _on_step(self) -> bool:
        super()._on_step()
        self._is_due = self._is_due and self.num_timesteps <= self._last
        return self.num_timesteps < self._last + 10


@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [STEPS, pytest.param(2_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "state"),
    [("SAC", "state"), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHERS)],
)
def test_a_training_that_was_killed_goes_on(tmp_path: Path, steps: int, kind: str, state: str) -> None:
    """In another process, with everything of the first one gone."""
    killed(kind, tmp_path, steps, state)
    whole = new_model(kind)
    env_state = ENV_STATE if state == "state" else None
    if env_state is None:
        whole.learn(steps)
        whole.get_env().seed(SECOND_SEED)  # type: ignore[union-attr]
        whole._last_obs = None
        whole.learn(steps, reset_num_timesteps=False)
    else:
        whole.learn(2 * steps)
    env = environments(kind)
    model = resume(tmp_path, env, env_state=env_state)
    assert model.num_timesteps == steps
    if env_state is None:
        env.seed(SECOND_SEED)
    model.learn(steps, reset_num_timesteps=False)
    assert_same_weights(model, whole)


def test_on_policy_models_are_saved_without_a_memory(tmp_path: Path) -> None:
    """PPO forgets its rollouts by itself."""
    env = environments("PPO")
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=SEED, device="cpu")
    model.learn(64, callback=CheckpointCallback(16, tmp_path))
    env.seed(SECOND_SEED)
    model._last_obs = None
    model.learn(64, reset_num_timesteps=False)
    env = environments("PPO")
    again = resume(tmp_path, env, device="cpu")
    assert again.num_timesteps == 64
    env.seed(SECOND_SEED)
    again.learn(64, reset_num_timesteps=False)
    assert_same_weights(again, model)


@pytest.mark.parametrize("wrapped", [False, True], ids=["an Env", "a Monitor"])
def test_a_plain_environment_is_enough(tmp_path: Path, wrapped: bool) -> None:
    """As for Stable-Baselines3's own `load`: an environment that is not vectorised is accepted."""
    model = new_model("SAC", lanes=1)
    model.learn(60, callback=CheckpointCallback(30, tmp_path))
    model.get_env().seed(SECOND_SEED)  # type: ignore[union-attr]
    model._last_obs = None
    model.learn(40, reset_num_timesteps=False)
    env: Any = Monitor(DriftEnv()) if wrapped else DriftEnv()
    again = resume(tmp_path, env, device="cpu")
    again.get_env().seed(SECOND_SEED)
    again.learn(40, reset_num_timesteps=False)
    assert_same_weights(again, model)


def test_environments_may_be_set_later(tmp_path: Path) -> None:
    """`load(env=None)`, and `set_env` before training continues."""
    new_model("SAC").learn(60, callback=CheckpointCallback(30, tmp_path))
    again = resume(tmp_path, None, device="cpu")
    again.set_env(environments("SAC"))
    again.learn(20, reset_num_timesteps=False)
    assert again.num_timesteps == 80


def test_a_resumed_run_keeps_its_limits(tmp_path: Path) -> None:
    """Budget, preference and disk tier are those of the saved run, unless they are given."""
    spill = tmp_path / "spilled"
    other = tmp_path / "other"
    limits: dict[str, Any] = {"budget": "64MiB", "prefer": "memory", "spill_dir": spill}
    further = {"handle_timeout_termination": False}
    model = new_model("SAC", replay_buffer_kwargs=limits | further)
    model.learn(60, callback=CheckpointCallback(30, tmp_path / "run"))
    again = resume(tmp_path / "run", environments("SAC"), device="cpu")
    assert again.replay_buffer.tiers == limits | {"spill_dir": str(spill)}
    assert _limits_of(again.replay_buffer) == _limits_of(model.replay_buffer)  # type: ignore[attr-defined]  # has one
    again.replay_buffer.memory.close()
    model.replay_buffer.memory.close()  # type: ignore[attr-defined]  # it still holds the place that it saved to

    again = resume(tmp_path / "run", environments("SAC"), device="cpu", budget=None, spill_dir=other)
    asked = {"budget": None, "prefer": "memory", "spill_dir": other}
    assert again.replay_buffer.tiers == asked
    assert again.replay_buffer_kwargs == asked | further
    again.learn(60, reset_num_timesteps=False, callback=CheckpointCallback(30, tmp_path / "run"))
    third = resume(tmp_path / "run", environments("SAC"), device="cpu")
    assert third.replay_buffer.tiers == asked | {"spill_dir": str(other)}
    third.replay_buffer.reset()  # a new memory, with the same limits
    assert str(third.replay_buffer.memory.spill_dir) == str(other)


def test_a_limit_is_kept_that_only_the_buffer_knows(tmp_path: Path) -> None:
    """The buffer was made by hand, so the model's own file does not know of it."""
    model: Any = new_model("SAC")
    kind = type(model.replay_buffer)
    model.replay_buffer = kind(150, model.observation_space, model.action_space, "cpu", 2, budget="50MiB")
    model.learn(60, callback=CheckpointCallback(30, tmp_path))
    again = resume(tmp_path, environments("SAC"), device="cpu")
    assert again.replay_buffer.tiers["budget"] == "50MiB"
    assert _limits_of(again.replay_buffer) == _limits_of(model.replay_buffer)


def _limits_of(buffer: Any) -> Any:
    return buffer.report().budget_bytes, str(buffer.memory.spill_dir)


def test_priorities_and_episodes_of_other_buffers_come_back(tmp_path: Path) -> None:
    """A prioritized buffer continues with its priorities."""
    model: Any = new_model("DQN")
    model.replay_buffer = PrioritizedReplayBuffer(150, model.observation_space, model.action_space, "cpu", 2)
    model.replay_buffer_class = PrioritizedReplayBuffer
    model.learn(60)
    batch = model.replay_buffer.sample(16)
    model.replay_buffer.update_priorities(batch.ids, np.arange(16.0))
    callback = CheckpointCallback(1, tmp_path)
    callback.init_callback(model)
    callback.save().result()
    expected = model.replay_buffer.sample(64).ids.tolist()
    place = (model.replay_buffer.pos, model.replay_buffer.full)
    model.replay_buffer.memory.close()
    again = resume(tmp_path, environments("DQN"))
    assert again.replay_buffer.sample(64).ids.tolist() == expected
    assert (again.replay_buffer.pos, again.replay_buffer.full) == place


def test_a_plain_buffer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """Its arrays are not holdall's."""
    model: Any = new_model("SAC")
    model.replay_buffer = PlainReplayBuffer(50, model.observation_space, model.action_space, "cpu", 2)
    callback = CheckpointCallback(1, tmp_path)
    callback.init_callback(model)
    with pytest.raises(CheckpointError, match="replay_buffer_class"):
        callback.save()


def test_environments_that_are_wrapped_otherwise_are_refused(tmp_path: Path) -> None:
    """Averages need a VecNormalize."""
    model = new_model("SAC normalized")
    model.learn(40, callback=CheckpointCallback(10, tmp_path))
    with pytest.raises(ArgumentError, match=r"saved with VecNormalize, but env is not wrapped in it\. Wrap env"):
        resume(tmp_path, DummyVecEnv([DriftEnv] * 2))
    with pytest.raises(ArgumentError, match="env_state"):
        resume(tmp_path, environments("SAC normalized"), env_state=ENV_STATE)


def test_an_environment_that_was_not_normalised_before_is_refused(tmp_path: Path) -> None:
    new_model("SAC").learn(40, callback=CheckpointCallback(10, tmp_path))
    with pytest.raises(ArgumentError, match=r"saved without VecNormalize, but env is wrapped in it\. Pass env"):
        resume(tmp_path, environments("SAC normalized"))


def test_the_checkpoint_of_a_memory_alone_is_refused(tmp_path: Path) -> None:
    with ReplayMemory(VECTOR, ARM, 10) as memory:
        memory.save(tmp_path).result()
    with pytest.raises(CheckpointError, match=r"a memory, without a model\. Load it with holdall\.ReplayMemory"):
        resume(tmp_path, None)


def test_another_number_of_environments_is_refused(tmp_path: Path) -> None:
    """With the way to its transitions."""
    new_model("SAC").learn(40, callback=CheckpointCallback(10, tmp_path))
    with pytest.raises(ArgumentError, match=r"env has 3 environments.*num_envs=3"):
        resume(tmp_path, environments("SAC", lanes=3))


@pytest.mark.parametrize("save_freq", [0, -1, True, "often"])
def test_save_freq_is_a_count(save_freq: Any, tmp_path: Path) -> None:
    """Of calls."""
    with pytest.raises(ArgumentError, match="save_freq"):
        CheckpointCallback(save_freq, tmp_path)

"""A training that was killed and resumed has the weights of an uninterrupted one, bit for bit."""

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

from .resumed import ARM, ENV_STATE, SEED, VECTOR, DriftEnv, make_environments, make_model

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


def train_until_killed(kind: str, path: Path, steps: int, state: str) -> None:
    """Train in another process, which kills itself after its first checkpoint."""
    program = [sys.executable, "-m", "tests.integration.sb3.resumed", kind, str(steps), str(path), state]
    root = Path(__file__).parents[3]
    done = subprocess.run(program, cwd=root, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_has_the_weights_of_one_that_reset_its_environments(kind: str, tmp_path: Path) -> None:
    """The other training resets its environments at the step of the checkpoint, with the same seed."""
    first = make_model(kind)
    first.learn(STEPS, callback=CheckpointCallback(STEPS // 2, tmp_path))
    first.get_env().seed(SECOND_SEED)  # type: ignore[union-attr]
    first._last_obs = None
    first.learn(STEPS, reset_num_timesteps=False)

    env = make_environments(kind)
    model = resume(tmp_path, env)
    env.seed(SECOND_SEED)
    model.learn(STEPS, reset_num_timesteps=False)
    assert_same_weights(model, first)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_with_env_state_has_the_weights_of_an_uninterrupted_one(kind: str, tmp_path: Path) -> None:
    """The checkpoint has the state of the environments, in the middle of episodes."""
    whole = make_model(kind)
    callback = CheckpointCallback(30, tmp_path, keep=1, env_state=ENV_STATE)
    whole.learn(STEPS + 60, callback=callback)

    part = make_model(kind)
    part.learn(STEPS + 60, callback=StoppingCallback(30, tmp_path / "part", STEPS, env_state=ENV_STATE))
    assert part.num_timesteps < whole.num_timesteps
    model = resume(tmp_path / "part", make_environments(kind), env_state=ENV_STATE)
    assert model.num_timesteps == STEPS
    model.learn(60, reset_num_timesteps=False)
    assert_same_weights(model, whole)


class StoppingCallback(CheckpointCallback):
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
def test_a_killed_training_is_resumed_in_another_process(tmp_path: Path, steps: int, kind: str, state: str) -> None:
    train_until_killed(kind, tmp_path, steps, state)
    whole = make_model(kind)
    env_state = ENV_STATE if state == "state" else None
    if env_state is None:
        whole.learn(steps)
        whole.get_env().seed(SECOND_SEED)  # type: ignore[union-attr]
        whole._last_obs = None
        whole.learn(steps, reset_num_timesteps=False)
    else:
        whole.learn(2 * steps)
    env = make_environments(kind)
    model = resume(tmp_path, env, env_state=env_state)
    assert model.num_timesteps == steps
    if env_state is None:
        env.seed(SECOND_SEED)
    model.learn(steps, reset_num_timesteps=False)
    assert_same_weights(model, whole)


def test_on_policy_models_are_saved_without_a_memory(tmp_path: Path) -> None:
    """PPO needs no experience from before the checkpoint."""
    env = make_environments("PPO")
    model = PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=SEED, device="cpu")
    model.learn(64, callback=CheckpointCallback(16, tmp_path))
    env.seed(SECOND_SEED)
    model._last_obs = None
    model.learn(64, reset_num_timesteps=False)
    env = make_environments("PPO")
    again = resume(tmp_path, env, device="cpu")
    assert again.num_timesteps == 64
    env.seed(SECOND_SEED)
    again.learn(64, reset_num_timesteps=False)
    assert_same_weights(again, model)


@pytest.mark.parametrize("wrapped", [False, True], ids=["an Env", "a Monitor"])
def test_a_plain_environment_is_enough(tmp_path: Path, wrapped: bool) -> None:
    """`resume` accepts an environment that is not vectorised, as Stable-Baselines3's `load` does."""
    model = make_model("SAC", lanes=1)
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
    make_model("SAC").learn(60, callback=CheckpointCallback(30, tmp_path))
    again = resume(tmp_path, None, device="cpu")
    again.set_env(make_environments("SAC"))
    again.learn(20, reset_num_timesteps=False)
    assert again.num_timesteps == 80


def test_a_resumed_run_keeps_its_limits(tmp_path: Path) -> None:
    """Budget, preference and disk tier are those of the saved run, unless they are passed to `resume`."""
    spill = tmp_path / "spilled"
    other = tmp_path / "other"
    limits: dict[str, Any] = {"budget": "64MiB", "prefer": "memory", "spill_dir": spill}
    further = {"handle_timeout_termination": False}
    model = make_model("SAC", replay_buffer_kwargs=limits | further)
    model.learn(60, callback=CheckpointCallback(30, tmp_path / "run"))
    again = resume(tmp_path / "run", make_environments("SAC"), device="cpu")
    assert again.replay_buffer.tiers == limits | {"spill_dir": str(spill)}
    assert _get_limits(again.replay_buffer) == _get_limits(model.replay_buffer)  # type: ignore[attr-defined]  # The model has a buffer.
    again.replay_buffer.memory.close()
    model.replay_buffer.memory.close()  # type: ignore[attr-defined]  # It still has the lock of its checkpoints.

    again = resume(tmp_path / "run", make_environments("SAC"), device="cpu", budget=None, spill_dir=other)
    asked = {"budget": None, "prefer": "memory", "spill_dir": other}
    assert again.replay_buffer.tiers == asked
    assert again.replay_buffer_kwargs == asked | further
    again.learn(60, reset_num_timesteps=False, callback=CheckpointCallback(30, tmp_path / "run"))
    third = resume(tmp_path / "run", make_environments("SAC"), device="cpu")
    assert third.replay_buffer.tiers == asked | {"spill_dir": str(other)}
    third.replay_buffer.reset()  # A new memory with the same limits.
    assert str(third.replay_buffer.memory.spill_dir) == str(other)


def test_a_resumed_run_keeps_limits_that_only_the_buffer_has(tmp_path: Path) -> None:
    """The buffer was not made by the model, so the file of the model does not have its settings."""
    model: Any = make_model("SAC")
    kind = type(model.replay_buffer)
    model.replay_buffer = kind(150, model.observation_space, model.action_space, "cpu", 2, budget="50MiB")
    model.learn(60, callback=CheckpointCallback(30, tmp_path))
    again = resume(tmp_path, make_environments("SAC"), device="cpu")
    assert again.replay_buffer.tiers["budget"] == "50MiB"
    assert _get_limits(again.replay_buffer) == _get_limits(model.replay_buffer)


def _get_limits(buffer: Any) -> Any:
    return buffer.report().budget_bytes, str(buffer.memory.spill_dir)


def test_priorities_of_a_buffer_are_resumed(tmp_path: Path) -> None:
    """For example, a prioritized buffer continues with its priorities."""
    model: Any = make_model("DQN")
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
    again = resume(tmp_path, make_environments("DQN"))
    assert again.replay_buffer.sample(64).ids.tolist() == expected
    assert (again.replay_buffer.pos, again.replay_buffer.full) == place


def test_a_plain_buffer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """A plain buffer has no memory of holdall."""
    model: Any = make_model("SAC")
    model.replay_buffer = PlainReplayBuffer(50, model.observation_space, model.action_space, "cpu", 2)
    callback = CheckpointCallback(1, tmp_path)
    callback.init_callback(model)
    with pytest.raises(CheckpointError, match="replay_buffer_class"):
        callback.save()


def test_an_environment_without_its_vecnormalize_is_refused(tmp_path: Path) -> None:
    """The saved averages belong to a VecNormalize."""
    model = make_model("SAC normalized")
    model.learn(40, callback=CheckpointCallback(10, tmp_path))
    with pytest.raises(ArgumentError, match=r"saved with VecNormalize, but env is not wrapped in it\. Wrap env"):
        resume(tmp_path, DummyVecEnv([DriftEnv] * 2))
    with pytest.raises(ArgumentError, match="env_state"):
        resume(tmp_path, make_environments("SAC normalized"), env_state=ENV_STATE)


def test_an_environment_with_a_new_vecnormalize_is_refused(tmp_path: Path) -> None:
    make_model("SAC").learn(40, callback=CheckpointCallback(10, tmp_path))
    with pytest.raises(ArgumentError, match=r"saved without VecNormalize, but env is wrapped in it\. Pass env"):
        resume(tmp_path, make_environments("SAC normalized"))


def test_a_checkpoint_without_a_model_is_refused(tmp_path: Path) -> None:
    with ReplayMemory(VECTOR, ARM, 10) as memory:
        memory.save(tmp_path).result()
    with pytest.raises(CheckpointError, match=r"a memory, without a model\. Load it with holdall\.ReplayMemory"):
        resume(tmp_path, None)


def test_another_number_of_environments_is_refused(tmp_path: Path) -> None:
    """The error says how to load the transitions."""
    make_model("SAC").learn(40, callback=CheckpointCallback(10, tmp_path))
    with pytest.raises(ArgumentError, match=r"env has 3 environments.*num_envs=3"):
        resume(tmp_path, make_environments("SAC", lanes=3))


@pytest.mark.parametrize("save_freq", [0, -1, True, "often"])
def test_a_wrong_save_freq_is_refused(save_freq: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="save_freq"):
        CheckpointCallback(save_freq, tmp_path)

"""Environments that are pickled with a checkpoint continue in the middle of their episodes, also in wrappers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("stable_baselines3", reason="needs the extra [sb3]")

from stable_baselines3 import DQN
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

from holdall.errors import ArgumentError
from holdall.sb3 import CheckpointCallback, ReplayBuffer, resume
from holdall.sb3.checkpoint import get_pickled


class Counter(gym.Env[Any, Any]):
    """An image environment whose pixels count the steps of an episode of 37 steps."""

    observation_space = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(), float(action), self.steps == 37, False, {}

    def _observe(self) -> Any:
        return np.full((36, 36, 3), self.steps, np.uint8)


def make_env(stack: bool) -> Any:
    env = DummyVecEnv([Counter, Counter])
    return VecFrameStack(env, 3) if stack else env


def make_model(env: Any) -> Any:
    return DQN(
        "CnnPolicy", env, replay_buffer_class=ReplayBuffer, buffer_size=400, learning_starts=200, seed=3, device="cpu"
    )


@pytest.mark.parametrize("stack", [False, True])
def test_wrapped_image_environments_continue(tmp_path: Path, stack: bool) -> None:
    """The transitions after a resume are those of a training that was not interrupted."""
    whole = make_model(make_env(stack))
    whole.learn(128)
    part = make_model(make_env(stack))
    part.learn(64, callback=CheckpointCallback(10, tmp_path, env_state="pickle"))
    part = resume(tmp_path, make_env(stack), env_state="pickle", device="cpu")
    part.learn(64, reset_num_timesteps=False)
    assert part.num_timesteps == 128
    ids = np.arange(128)
    expected = whole.replay_buffer.memory.gather(ids)
    found = part.replay_buffer.memory.gather(ids)
    for name in ("obs", "next_obs", "action", "reward", "terminated"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_environments_that_cannot_be_pickled_are_refused(tmp_path: Path) -> None:
    """These are environments in other processes. A wrong value of `env_state` is refused, too."""
    with pytest.raises(ArgumentError, match="env_state \\('pickles'\\)"):
        CheckpointCallback(10, tmp_path, env_state="pickles")  # type: ignore[arg-type]
    env = SubprocVecEnv([partial(gym.make, "CartPole-v1")])
    try:
        with pytest.raises(ArgumentError, match="SubprocVecEnv"):
            get_pickled(env)
    finally:
        env.close()

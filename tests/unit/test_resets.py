"""Resets that were added as steps: both wrong loops over vector environments cause one warning, right loops none."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import holdall

LANES = 3
STEPS = 600


class Walk(gym.Env[Any, Any]):
    """A random walk that begins far from where it ends. It ends by itself, or by a time limit."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, *, terminates: bool = False, pays: float = 1.0, far: float = 20.0) -> None:
        self._terminates = terminates
        self._pays = pays
        self._far = far

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._place = self.np_random.normal(size=3) + self._far
        self._left = int(self.np_random.integers(5, 15))
        return self._place.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._place = self._place * 0.7 + self.np_random.normal(size=3) * 0.1
        self._left -= 1
        reward = float(self.np_random.normal()) if self.np_random.random() < self._pays else 0.0
        ends = self._left <= 0
        return self._place.astype(np.float32), reward, ends and self._terminates, ends and not self._terminates, {}


def make_envs(mode: AutoresetMode, **settings: Any) -> Any:
    return SyncVectorEnv([lambda: Walk(**settings)] * LANES, autoreset_mode=mode)


def add_plainly(memory: Any, stepped: Any) -> None:
    """Add what `step` returns, whatever the autoreset mode. This loop is wrong in two modes."""
    obs, _ = stepped.reset(seed=1)
    for _ in range(STEPS):
        action = stepped.action_space.sample()
        next_obs, reward, terminated, truncated, _ = stepped.step(action)
        memory.add(obs, action, reward, next_obs, terminated, truncated)
        obs = next_obs.copy()


def add_with_a_recorder(memory: Any, stepped: Any) -> None:
    """Add the same steps with a `Recorder`."""
    recorder = holdall.Recorder(stepped, memory)
    recorder.reset(seed=1)
    for _ in range(STEPS):
        recorder.step(stepped.action_space.sample())


def collect_warnings(fill: Callable[[Any, Any], None], stepped: Any) -> list[str]:
    """Fill a memory, sample from it, and return the warnings."""
    memory = holdall.ReplayMemory(stepped.single_observation_space, stepped.single_action_space, 10_000, LANES)
    with memory, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fill(memory, stepped)
        for _ in range(3):
            memory.sample(32)
        assert [warning.filename for warning in caught] == [__file__] * len(caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("terminates", [True, False])
def test_a_reset_that_is_added_as_a_transition_causes_one_warning(terminates: bool) -> None:
    (message,) = collect_warnings(add_plainly, make_envs(AutoresetMode.NEXT_STEP, terminates=terminates))
    assert "next-step autoreset" in message
    assert "holdall.Recorder(envs, memory)" in message


def test_a_reset_observation_that_is_added_as_the_final_one_causes_one_warning() -> None:
    (message,) = collect_warnings(add_plainly, make_envs(AutoresetMode.SAME_STEP))
    assert "same-step autoreset" in message
    assert "holdall.Recorder(envs, memory)" in message


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("settings", [{}, {"terminates": True}, {"pays": 0.05}, {"far": 0.0}])
def test_a_recorded_environment_causes_no_warning(mode: AutoresetMode, settings: dict[str, Any]) -> None:
    assert collect_warnings(add_with_a_recorder, make_envs(mode, **settings)) == []


def make_continuing_loop(pays: float, *, terminates: bool, constant: bool = False) -> Callable[[Any, Any], None]:
    """Return a loop with ends but without resets: lost lives, or time limits of an environment that continues."""

    def fill(memory: Any, _: Any) -> None:
        generator = np.random.default_rng(0)
        obs = np.zeros((LANES, 3), np.float32)
        for _ in range(STEPS):
            change = 0 if constant else generator.normal(size=obs.shape)
            next_obs = (obs + change).astype(np.float32)
            ends = generator.random(LANES) < 0.1
            reward = generator.normal(size=LANES) * (generator.random(LANES) < pays)
            never = np.zeros(LANES, np.bool_)
            flags = (ends, never) if terminates else (never, ends)
            memory.add(obs, generator.integers(0, 2, LANES), reward, next_obs, *flags)
            obs = next_obs

    return fill


@pytest.mark.parametrize("pays", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("terminates", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_ends_without_a_reset_cause_no_warning(pays: float, terminates: bool, constant: bool) -> None:
    loop = make_continuing_loop(pays, terminates=terminates, constant=constant)
    assert collect_warnings(loop, make_envs(AutoresetMode.NEXT_STEP)) == []


def test_resets_that_are_marked_invalid_cause_no_warning() -> None:
    def fill(memory: Any, stepped: Any) -> None:
        obs, _ = stepped.reset(seed=1)
        ended = np.zeros(LANES, np.bool_)
        for _ in range(STEPS):
            action = stepped.action_space.sample()
            next_obs, reward, terminated, truncated, _ = stepped.step(action)
            memory.add(obs, action, reward, next_obs, terminated, truncated, valid=~ended)
            obs = next_obs.copy()
            ended = terminated | truncated

    assert collect_warnings(fill, make_envs(AutoresetMode.NEXT_STEP)) == []


@pytest.mark.parametrize("seed", range(4))
def test_random_environments_in_a_right_loop_cause_no_warning(seed: int) -> None:
    """Observations, rewards and ends are random, and some episodes begin where another one ended."""
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(generator.integers(1, 30), 3)).astype(np.float32)
    pays, ends = generator.random(2)

    def fill(memory: Any, _: Any) -> None:
        obs = states[generator.integers(0, len(states), LANES)]
        for _ in range(STEPS):
            next_obs = states[generator.integers(0, len(states), LANES)]
            done, cut = generator.random((2, LANES)) < ends / 4
            reward = (generator.random(LANES) < pays).astype(np.float64)
            memory.add(obs, generator.integers(0, 2, LANES), reward, next_obs, done, cut)
            started = states[generator.integers(0, len(states), LANES)]
            obs = np.where((done | cut)[:, None], started, next_obs)

    assert collect_warnings(fill, make_envs(AutoresetMode.NEXT_STEP)) == []

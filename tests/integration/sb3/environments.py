"""Small environments for trainings of some seconds.

They have observations of any space, and episodes that terminate or are truncated. One seed gives one stream of
observations, rewards and ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

FRAME_PX = 14
STACK = 4

VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
ARM = spaces.Box(-2.0, 2.0, (2,), np.float32)
BUTTONS = spaces.Discrete(3)


class Wander(gym.Env[Any, Any]):
    """An environment whose observations are random samples of a space.

    Args:
        terminates: Probability of a termination at each step.
        max_steps: Steps until an episode is truncated.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] = VECTOR,
        action_space: spaces.Space[Any] = ARM,
        terminates: float = 0.06,
        max_steps: int = 11,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self._terminates = terminates
        self._max_steps = max_steps
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self.steps = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        terminated = bool(self.np_random.random() < self._terminates)
        # Both at once is legal. Stable-Baselines3 then does not regard it as a time limit.
        truncated = self.steps >= self._max_steps
        reward = float(self.np_random.normal() - np.square(np.asarray(action, np.float64)).mean())
        return self._look(), reward, terminated, truncated, {}

    def _look(self) -> Any:
        return draw(self.observation_space, self.np_random)


class Stacked(Wander):
    """Frames of a film, in which some frames are repeated. The last four frames are stacked along the last axis."""

    def __init__(self, action_space: spaces.Space[Any] = BUTTONS, **endings: Any) -> None:
        shape = (FRAME_PX, FRAME_PX, STACK)
        super().__init__(spaces.Box(0, 255, shape, np.uint8), action_space, **endings)
        self._frames = np.zeros(shape, np.uint8)

    def _look(self) -> NDArray[np.uint8]:
        newest = self.np_random.integers(0, 256, (FRAME_PX, FRAME_PX, 1), np.uint8)
        if self.steps == 0:
            self._frames = np.repeat(newest, STACK, axis=-1)
        elif self.np_random.random() < 0.8:  # Otherwise the frame is repeated.
            self._frames = np.concatenate([self._frames[..., 1:], newest], axis=-1)
        return self._frames


class Stretched(VecEnvWrapper):
    """Observations in a wider dtype than their space has, as some wrappers return them."""

    def reset(self) -> Any:
        return self._stretch(self.venv.reset())

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = self.venv.step_wait()
        for info in infos:
            if "terminal_observation" in info:
                info["terminal_observation"] = self._stretch(info["terminal_observation"])
        return self._stretch(observations), rewards, dones, infos

    @staticmethod
    def _stretch(observation: Any) -> NDArray[np.float64]:
        return np.asarray(observation, np.float64) * np.pi


def make_dict_space(image: tuple[int, int, int] = (FRAME_PX, FRAME_PX, 3)) -> spaces.Dict:
    """Return a space with a camera, a vector and a gear."""
    camera = spaces.Box(0, 255, image, np.uint8)
    return spaces.Dict({"camera": camera, "state": VECTOR, "gear": spaces.Discrete(4)})


def draw(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    """Draw an observation with `rng`, because an environment does not seed the generator of its space."""
    if isinstance(space, spaces.Dict):
        return {key: draw(part, rng) for key, part in space.items()}
    if isinstance(space, spaces.Discrete):
        return np.int64(space.start + rng.integers(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        return (space.start + rng.integers(space.nvec)).astype(space.dtype)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, space.shape).astype(space.dtype)
    if not isinstance(space, spaces.Box):
        raise TypeError(f"cannot draw from {space}")
    if space.dtype.kind == "f":
        return rng.normal(size=space.shape).astype(space.dtype)
    return rng.integers(0, 2 if space.dtype.kind == "b" else 100, space.shape).astype(space.dtype)


def repeat(environment: Callable[[], gym.Env[Any, Any]], lanes: int) -> list[Callable[[], gym.Env[Any, Any]]]:
    """Return the constructors of `lanes` environments."""
    return [environment] * lanes

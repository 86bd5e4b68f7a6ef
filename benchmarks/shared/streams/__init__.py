"""Streams: endless experience to measure with. Each module has one source.

A stream yields steps as a vectorised environment gives them to a buffer: new arrays with a leading lane axis. The same
seed gives the same stream. A stream holds no references to earlier steps, so its memory does not grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Step:
    """One transition in every lane. `next_obs` is the final observation where an episode ended."""

    obs: Any
    action: NDArray[Any]
    reward: NDArray[np.float32]  # (lanes,)
    next_obs: Any
    terminated: NDArray[np.bool_]  # (lanes,)
    truncated: NDArray[np.bool_]  # (lanes,)


@dataclass(frozen=True, slots=True)
class Stream:
    """A source of steps, and the spaces that they are drawn from."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    lanes: int
    steps: Iterator[Step]


def play(env: gym.Env[Any, Any], seed: int) -> Iterator[Step]:
    """Act at random in one environment for ever."""
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    obs = lane_of(obs)
    while True:
        action = np.asarray(env.action_space.sample())
        seen, reward, terminated, truncated, _ = env.step(action)
        next_obs = lane_of(seen)
        yield Step(
            obs=obs,
            action=action[None],
            reward=np.array([reward], np.float32),
            next_obs=next_obs,
            terminated=np.array([terminated]),
            truncated=np.array([truncated and not terminated]),
        )
        obs = lane_of(env.reset()[0]) if terminated or truncated else next_obs


def lane_of(observation: Any) -> Any:
    """Give an observation a lane axis, in an array of its own, as Stable-Baselines3's vectorised environments do."""
    if isinstance(observation, dict):
        return {key: lane_of(part) for key, part in observation.items()}
    return np.array(observation)[None]


def channels_first(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Move the last axis to the front of an image, as a view: so Stable-Baselines3 hands its images over."""
    return np.moveaxis(image, -1, -3)

"""A camera and a vector: the demo's rover with as many sensors as a robot dog, 84 x 84 x 3 uint8 and 31 float32.

A buffer gets images as Stable-Baselines3 makes them: channels first, as views that are not contiguous. Episodes end at
the beacon (terminated) or after 500 steps (truncated). With noise, one value in 20 is off by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.tools.demo import VIEW_PX, CameraRover
from shared.streams import Step, Stream, channels_first, play

VECTOR_FLOATS = 31
MAX_STEPS = 500
NOISY_SHARE = 0.05


def stream(seed: int = 0, *, noisy: bool = False) -> Stream:
    """Drive for ever."""
    env = CameraRover(max_steps=MAX_STEPS)
    space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, VIEW_PX, VIEW_PX), np.uint8),
            "vector": spaces.Box(-np.inf, np.inf, (VECTOR_FLOATS,), np.float32),
        }
    )
    noise = np.random.default_rng(seed) if noisy else None
    return Stream(space, env.action_space, 1, _sensed(play(env, seed), noise))


def _sensed(steps: Iterator[Step], noise: np.random.Generator | None) -> Iterator[Step]:
    obs: Any = None
    continued: Any = None
    for step in steps:
        obs = obs if step.obs is continued else _sense(step.obs, noise)
        next_obs = _sense(step.next_obs, noise)
        yield Step(obs, step.action, step.reward, next_obs, step.terminated, step.truncated)
        obs = next_obs
        continued = step.next_obs


def _sense(observation: dict[str, NDArray[Any]], noise: np.random.Generator | None) -> dict[str, NDArray[Any]]:
    """Add joint angles that follow the rover's movement, up to the number of floats wanted."""
    state = observation["state"]
    joints = np.arange(VECTOR_FLOATS - state.shape[1], dtype=np.float32)
    angles = np.sin(joints + 7 * state.sum(axis=1, keepdims=True))
    vector = np.concatenate([state, angles], axis=1).astype(np.float32)
    image = observation["camera"]
    if noise is not None:
        image = image ^ (noise.random(image.shape, np.float32) < NOISY_SHARE)
    return {"image": channels_first(image), "vector": vector}

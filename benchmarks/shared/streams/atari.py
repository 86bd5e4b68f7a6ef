"""A game, Seaquest unless another is named, played live by ale-py: 84 x 84 gray, four frames stacked.

It is prepared as Stable-Baselines3 prepares it. Episodes end with a life (terminated) or after 100 steps (truncated).
"""

from __future__ import annotations

from typing import Any, ClassVar, SupportsFloat

import ale_py
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.atari_wrappers import AtariWrapper

from shared.streams import Stream, play

STACK = 4
SCREEN_PX = 84
MAX_STEPS = 100

Stacks = NDArray[np.uint8]  # (STACK, SCREEN_PX, SCREEN_PX)


class FirstAxisStack(gym.Wrapper[Stacks, Any, NDArray[np.uint8], Any]):
    """The newest frames along the first axis, the oldest first. After a reset, the first frame is repeated."""

    space: ClassVar = spaces.Box(0, 255, (STACK, SCREEN_PX, SCREEN_PX), np.uint8)

    def __init__(self, env: gym.Env[NDArray[np.uint8], Any]) -> None:
        super().__init__(env)
        self.observation_space = self.space
        self._stack = np.zeros(self.space.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Stacks, dict[str, Any]]:
        """Reset, and repeat the first frame."""
        frame, info = self.env.reset(seed=seed, options=options)
        self._stack = np.repeat(frame[None, ..., 0], STACK, axis=0)
        return self._stack, info

    def step(self, action: Any) -> tuple[Stacks, SupportsFloat, bool, bool, dict[str, Any]]:
        """Push the new frame in at the end."""
        frame, reward, terminated, truncated, info = self.env.step(action)
        self._stack = np.concatenate([self._stack[1:], frame[None, ..., 0]])
        return self._stack, reward, terminated, truncated, info


def stream(seed: int = 0, game: str = "Seaquest") -> Stream:
    """Play for ever."""
    gym.register_envs(ale_py)
    screen = AtariWrapper(
        gym.make(f"{game}NoFrameskip-v4")
    )  # no-op starts, skipped frames, lives as episodes, clipped rewards
    env = FirstAxisStack(gym.wrappers.TimeLimit(screen, MAX_STEPS))
    return Stream(env.observation_space, env.action_space, 1, play(env, seed))

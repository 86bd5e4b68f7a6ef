# /// script
# dependencies = ["holdall[sb3]"]
# ///
"""A trader that sees a window of past days. Consecutive windows share all days but one, and each day is stored once.

    python examples/market_windows.py [STEPS]

holdall finds and verifies the shift by itself; there is nothing to set. The prices are a random walk.
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3 import DQN

from holdall.sb3 import ReplayBuffer  # 1

DAYS = 2_000
STOCKS = 12
WINDOW = 120


class Market(gym.Env[Any, Any]):
    """An environment whose action holds the first stock or not. The reward is the gain of the day."""

    def __init__(self) -> None:
        returns = np.random.default_rng(0).normal(0.0, 0.01, (DAYS, STOCKS))
        self.prices = np.exp(np.cumsum(returns, axis=0)).astype(np.float32)
        self.observation_space = spaces.Box(0.0, np.inf, (WINDOW, STOCKS), np.float32)
        self.action_space = spaces.Discrete(2)
        self.day = WINDOW
        self.first = WINDOW

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin on a random day."""
        super().reset(seed=seed)
        self.first = int(self.np_random.integers(WINDOW, DAYS - 300))
        self.day = self.first
        return self.prices[self.day - WINDOW : self.day], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move to the next day."""
        earned = float(self.prices[self.day, 0] / self.prices[self.day - 1, 0] - 1.0)
        self.day += 1
        window = self.prices[self.day - WINDOW : self.day]
        return window, earned * int(action), False, self.day - self.first >= 250, {}


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
model = DQN(
    "MlpPolicy",
    Market(),
    buffer_size=200_000,
    replay_buffer_class=ReplayBuffer,  # 2
    learning_starts=100,
    verbose=1,
)
model.learn(steps)
print(model.replay_buffer.memory.report())  # 3

"""A short vector, as most tasks have: 17 float32 of MuJoCo's size and 6 of action, in one lane or many.

Lanes end on their own, by a fall (terminated) or after 1,000 steps (truncated).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gymnasium import spaces

from shared.streams import Step, Stream

FLOATS = 17
ACTION_FLOATS = 6
MAX_STEPS = 1_000
FALL_A_STEP = 0.001
_DRAWN_AT_ONCE = 64


def stream(lanes: int, seed: int = 0) -> Stream:
    """Walk for ever."""
    observed = spaces.Box(-np.inf, np.inf, (FLOATS,), np.float32)
    return Stream(observed, spaces.Box(-1, 1, (ACTION_FLOATS,), np.float32), lanes, _walk(lanes, seed))


def _walk(lanes: int, seed: int) -> Iterator[Step]:
    rng = np.random.default_rng(seed)
    age = np.zeros(lanes, np.int64)
    obs = rng.normal(size=(lanes, FLOATS)).astype(np.float32)
    while True:
        moves = rng.normal(size=(_DRAWN_AT_ONCE, lanes, FLOATS + ACTION_FLOATS + 1)).astype(np.float32)
        falls = rng.random((_DRAWN_AT_ONCE, lanes)) < FALL_A_STEP
        for move, terminated in zip(moves, falls, strict=True):
            next_obs = obs + move[:, :FLOATS]
            age += 1
            truncated = (age >= MAX_STEPS) & ~terminated
            action = move[:, FLOATS : FLOATS + ACTION_FLOATS].copy()
            yield Step(obs, action, move[:, -1].copy(), next_obs, terminated, truncated)
            ended = terminated | truncated
            obs = next_obs
            if ended.any():
                age[ended] = 0
                obs = np.where(ended[:, None], np.float32(0.01) * move[:, :FLOATS], next_obs)

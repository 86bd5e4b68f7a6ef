"""A trader's view of a market: the last 504 days of 117 shares in 8 features, float32, over a table of 4,000 days.

An episode begins on a random day and lasts 125 (truncated), or ends early in ruin (terminated). The table is a random
walk drawn from the seed, unless a recorded one is given. With noise, every observation is disturbed anew, so that no
two share a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from shared.streams import Step, Stream

DAYS = 4_000
WINDOW_DAYS = 504
SHARES = 117
FEATURES = 8
EPISODE_DAYS = 125
RUIN_A_DAY = 0.002


def stream(seed: int = 0, *, noise: float = 0.0, table: NDArray[np.float32] | None = None) -> Stream:
    """Trade for ever.

    Args:
        noise: Standard deviation of the Gaussian noise that is added to every observation.
        table: Recorded prices: days, shares and features.
    """
    rng = np.random.default_rng(seed)
    if table is None:
        table = np.cumsum(rng.normal(size=(DAYS, SHARES, FEATURES)), axis=0).astype(np.float32)
    shares = table.shape[1]
    observed = spaces.Box(-np.inf, np.inf, (WINDOW_DAYS, *table.shape[1:]), np.float32)
    weights = spaces.Box(-1, 1, (shares,), np.float32)
    return Stream(observed, weights, 1, _trade(table, rng, noise))


def _trade(table: NDArray[np.float32], rng: np.random.Generator, noise: float) -> Iterator[Step]:
    while True:
        first = int(rng.integers(WINDOW_DAYS, len(table) - EPISODE_DAYS))
        obs = _window(table, first, rng, noise)
        for day in range(first + 1, first + EPISODE_DAYS + 1):
            next_obs = _window(table, day, rng, noise)
            ruined = bool(rng.random() < RUIN_A_DAY)
            yield Step(
                obs=obs,
                action=rng.uniform(-1, 1, (1, table.shape[1])).astype(np.float32),
                reward=rng.normal(size=1).astype(np.float32),
                next_obs=next_obs,
                terminated=np.array([ruined]),
                truncated=np.array([day == first + EPISODE_DAYS and not ruined]),
            )
            if ruined:
                break
            obs = next_obs


def _window(table: NDArray[np.float32], day: int, rng: np.random.Generator, noise: float) -> NDArray[np.float32]:
    window = table[None, day - WINDOW_DAYS : day].copy()
    if noise:
        window += np.float32(noise) * rng.standard_normal(window.shape, np.float32)
    return window

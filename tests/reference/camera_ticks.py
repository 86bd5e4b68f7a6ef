"""Steps of environments with cameras, for tests that compare large memories with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Observe = Callable[..., dict[str, Any]]

RARE = np.array([0x7FF4000000000001, 0xFFF8000000000123, 0x8000000000000000, 0], np.uint64).view("f8")
"""NaNs with payloads, and zeros of either sign."""


def smooth(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return images whose pixels resemble their neighbours."""
    return generator.integers(0, 3, shape, np.uint8).cumsum(axis=-1, dtype=np.uint8)


def make_ticks(observe: Observe, lanes: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield arguments of `add`. All lanes end an episode at every 17th tick.

    `observe` returns the observations of all lanes. Its arguments are a generator, the number of lanes, and the
    observations before, or nothing at the start of an episode.
    """
    generator = np.random.default_rng(seed)
    obs = observe(generator, lanes)
    for tick in range(1 << 30):
        next_obs = observe(generator, lanes, obs)
        ends = np.full(lanes, tick % 17 == 16)
        yield {
            "obs": obs,
            "action": generator.integers(0, 3, lanes),
            "reward": generator.normal(size=lanes).astype("f4"),
            "next_obs": next_obs,
            "terminated": ends,
            "truncated": np.zeros(lanes, np.bool_),
        }
        obs = observe(generator, lanes) if ends[0] else next_obs

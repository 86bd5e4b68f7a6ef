"""Pearson's chi-square test of a million draws. A fair sampler has a value near 1, and a biased one a larger value."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall import ReplayMemory

DRAWS = 1_000_000


def draw_ids(memory: ReplayMemory) -> NDArray[np.int64]:
    """Return the ids of a million draws."""
    return np.concatenate([memory.batch_source.draw(200_000).ids for _ in range(DRAWS // 200_000)])


def compute_chi_square(drawn: NDArray[np.int64], ids: NDArray[np.int64], probability: NDArray[np.float64]) -> float:
    """Return the statistic divided by its degrees of freedom. `ids` ascend, and have every id that may be drawn."""
    place = np.searchsorted(ids, drawn)
    assert (ids[np.minimum(place, len(ids) - 1)] == drawn).all(), "an id was drawn that is not in `ids`"
    counts = np.bincount(place, minlength=len(ids))
    expected = len(drawn) * probability / probability.sum()
    return float(((counts - expected) ** 2 / expected).sum() / (len(ids) - 1))

"""Pearson's test over a million draws: a fair draw stays near 1, one that is off by a percent does not."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DRAWS = 1_000_000


def chi_square(drawn: NDArray[np.int64], ids: NDArray[np.int64], probability: NDArray[np.float64]) -> float:
    """Return the statistic over its degrees of freedom. `ids` ascend, and all that was drawn is among them."""
    place = np.searchsorted(ids, drawn)
    assert (ids[np.minimum(place, len(ids) - 1)] == drawn).all(), "something was drawn that must not be"
    counts = np.bincount(place, minlength=len(ids))
    expected = len(drawn) * probability / probability.sum()
    return float(((counts - expected) ** 2 / expected).sum() / (len(ids) - 1))

"""The probability that counts differ as much from the expected counts as they do."""

from __future__ import annotations

from math import erfc, sqrt

import numpy as np
from numpy.typing import NDArray


def chi_square_p(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> float:
    """Return the p-value of counts under chances, for thousands of degrees of freedom, after Wilson and Hilferty."""
    expected = counts.sum() * chances / chances.sum()
    assert expected.min() > 20, "too few draws for so many kinds"
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    normal = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / sqrt(2 / (9 * degrees))
    return erfc(normal / sqrt(2)) / 2

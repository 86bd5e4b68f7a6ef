"""The line through readings of what a process holds."""

from __future__ import annotations

import numpy as np


def line_through(readings: list[tuple[int, int]]) -> tuple[float, float]:
    """Return slope and intercept of the line of Theil and Sen through (count, bytes).

    The slope is the median of the slopes between any two readings. Memory that a process uses for a while, such as for
    the choice of a codec, would bend a least-squares line.
    """
    count, nbytes = np.array(readings, np.float64).T
    first, second = np.triu_indices(len(count), 1)
    slope = np.median((nbytes[second] - nbytes[first]) / (count[second] - count[first]))
    return float(slope), float(np.median(nbytes - slope * count))

"""Lines through readings of (count, bytes) of what a process holds. Both functions return slope and intercept."""

from __future__ import annotations

import numpy as np


def fit_line(readings: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the least-squares line. For memory that grows evenly, or in steps, such as huge pages."""
    count, nbytes = np.array(readings, np.float64).T
    slope, intercept = np.polyfit(count, nbytes, 1)
    return float(slope), float(intercept)


def fit_median_line(readings: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the line of Theil and Sen, whose slope is the median of the slopes between any two readings.

    For memory that a process also uses for a while, such as for the choice of a codec. That would bend a least-squares
    line.
    """
    count, nbytes = np.array(readings, np.float64).T
    first, second = np.triu_indices(len(count), 1)
    slope = np.median((nbytes[second] - nbytes[first]) / (count[second] - count[first]))
    return float(slope), float(np.median(nbytes - slope * count))

"""Trends that a few wild readings cannot bend.

In:  a series.  Out: the slope, and the interval in which it lies.
The slope is the median over all pairs of points (Theil 1950, Sen 1968), and the interval comes from how many pairs
would have to disagree (Kendall's statistic). Points are first gathered in bins, since neighbours
in time are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_BINS = 48
_FEWEST_BINS = 12
_DEVIATIONS = 3.0
"""Standard deviations of Kendall's statistic: one clean series in 370 would lie outside, if it were all of the test."""
_EVEN_SHARE = 0.4
"""What each quarter of a window has to contribute of its share: one jump is no steady growth."""

_TIMES_NOISE = 6.0
"""What grew, over how far readings lie from the line: a level that wanders ends somewhere else, too."""


class Trend(NamedTuple):
    """A slope and the interval around it."""

    slope: float
    low: float
    high: float
    first: float  # where the series was looked at from
    last: float


def trend(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """Return the slope of a series; None if there are too few points, or they all stand at one place."""
    points = _binned(xs, ys)
    if len(points) < _FEWEST_BINS:
        return None
    slopes = sorted(
        (later - earlier) / (right - left)
        for i, (left, earlier) in enumerate(points)
        for right, later in points[i + 1 :]
        if right > left
    )
    if not slopes:
        return None
    count = len(points)
    spread = _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(int((len(slopes) - spread) / 2), 0)
    high = min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)
    return Trend(median(slopes), slopes[low], slopes[high], points[0][0], points[-1][0])


def steady_growth(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """Return the slope of a series that grows all the time, and not in one jump; None for all others."""
    found = trend(xs, ys)
    if found is None or found.low <= 0:
        return None
    points = _binned(xs, ys)
    quarter = len(points) // 4
    levels = [median(y for _, y in points[i * quarter : (i + 1) * quarter]) for i in range(4)]
    steps = [after - before for before, after in pairwise(levels)]
    mean = sum(steps) / len(steps)
    is_even = mean > 0 and min(steps) >= _EVEN_SHARE * mean
    centre = median(y - found.slope * x for x, y in points)
    noise = median(abs(y - found.slope * x - centre) for x, y in points)
    return found if is_even and found.slope * (found.last - found.first) >= _TIMES_NOISE * noise else None


def _binned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Gather a series in bins of equal counts: the medians of each."""
    points = sorted(zip(xs, ys, strict=True))
    count = min(_BINS, len(points))
    edges = [round(i * len(points) / count) for i in range(count + 1)] if count else []
    bins = [points[start:end] for start, end in pairwise(edges) if end > start]
    return [(median(x for x, _ in one), median(y for _, y in one)) for one in bins]

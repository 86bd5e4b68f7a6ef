"""Robust slopes of series of readings.

The slope is the median of the slopes between all pairs of points (Theil 1950, Sen 1968). Its confidence interval
follows from Kendall's statistic. Readings are first joined to bins, because neighbouring readings depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_MAX_BINS = 48
_MIN_BINS = 12
_DEVIATIONS = 3.0
"""Half width of the interval, in standard deviations of Kendall's statistic."""
_MIN_QUARTER_SHARE = 0.4
"""Minimum growth from one quarter of the series to the next, as a share of the mean of the three growths. It excludes
series that grow in a single jump."""
_MIN_TIMES_NOISE = 6.0
"""Minimum growth of the whole series, as a multiple of the median distance of the points from the fitted line. It
excludes series that rise and fall, and end higher by chance."""


class Trend(NamedTuple):
    """A slope with its interval, and the positions between which it was measured."""

    slope: float
    low: float
    high: float
    first: float
    last: float

    @property
    def growth(self) -> float:
        """Growth between the first and the last position."""
        return self.slope * (self.last - self.first)


def fit_trend(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """Return the slope of a series. None if there are too few points, or if all `xs` are equal."""
    points = _gather_bins(xs, ys)
    if len(points) < _MIN_BINS:
        return None
    slopes = []
    for index, (left, earlier) in enumerate(points):
        for right, later in points[index + 1 :]:
            if right > left:
                slopes.append((later - earlier) / (right - left))
    if not slopes:
        return None
    slopes.sort()
    count = len(points)
    spread = _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(int((len(slopes) - spread) / 2), 0)
    high = min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)
    return Trend(median(slopes), slopes[low], slopes[high], points[0][0], points[-1][0])


def fit_steady_growth(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """Return the slope of a series that grows steadily. None for every other series."""
    trend = fit_trend(xs, ys)
    if trend is None or trend.low <= 0:
        return None
    points = _gather_bins(xs, ys)
    quarter = len(points) // 4
    levels = [median(y for _, y in points[number * quarter : (number + 1) * quarter]) for number in range(4)]
    rises = [after - before for before, after in pairwise(levels)]
    mean = sum(rises) / len(rises)
    if mean <= 0 or min(rises) < _MIN_QUARTER_SHARE * mean:
        return None
    centre = median(y - trend.slope * x for x, y in points)
    noise = median(abs(y - trend.slope * x - centre) for x, y in points)
    return trend if trend.growth >= _MIN_TIMES_NOISE * noise else None


def _gather_bins(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Sort the points into bins of nearly equal counts. Return the median of each bin."""
    points = sorted(zip(xs, ys, strict=True))
    count = min(_MAX_BINS, len(points))
    if count == 0:
        return []
    edges = [round(i * len(points) / count) for i in range(count + 1)]
    bins = [points[start:end] for start, end in pairwise(edges) if end > start]
    return [(median(x for x, _ in one), median(y for _, y in one)) for one in bins]

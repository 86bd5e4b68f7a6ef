"""Means over a few runs, and how far they can be trusted.

In:  one value a run.  Out: the mean, and the half width of its 95 % confidence interval by Student's t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 % on both sides, by degrees of freedom from 1 on; the normal one beyond."""
_NORMAL = 1.96


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where the true one lies with 95 %; None: one run alone does not show it."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Work it out; there is at least one value."""
        count = len(values)
        if count < 2:
            return cls(fmean(values), None)
        quantile = _QUANTILES[count - 2] if count - 2 < len(_QUANTILES) else _NORMAL
        return cls(fmean(values), quantile * stdev(values) / sqrt(count))

    @property
    def low(self) -> float:
        """The lower end; the mean itself if there is no interval."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """The upper end, likewise."""
        return self.mean + (self.half or 0.0)

    def overlaps(self, other: Interval) -> bool:
        """Whether the two do not differ clearly."""
        if self.half is None or other.half is None:
            return True
        return abs(self.mean - other.mean) <= self.half + other.half

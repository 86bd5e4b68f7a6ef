"""The least-squares line through readings of a process's memory."""

from __future__ import annotations

import numpy as np


def line_through(readings: list[tuple[int, int]]) -> tuple[float, float]:
    """Return the slope and the intercept of the least-squares line."""
    held, taken = np.array(readings, np.float64).T
    slope, intercept = np.polyfit(held, taken, 1)
    return float(slope), float(intercept)

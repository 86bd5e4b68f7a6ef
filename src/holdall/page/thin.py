"""Thinning: fewer points, and every peak and every low still there.

In:  a long series.  Out: the positions to draw, in order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def kept(values: Floats, most: int) -> NDArray[np.int64]:
    """Choose at most about `most` positions: of every stretch the smallest and the largest value; both ends."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    stretches = np.array_split(np.arange(count), max(most // 2 - 1, 1))
    ends = [0, count - 1]
    lowest = [int(stretch[np.argmin(values[stretch])]) for stretch in stretches]
    highest = [int(stretch[np.argmax(values[stretch])]) for stretch in stretches]
    return np.unique(np.array(ends + lowest + highest, np.int64))

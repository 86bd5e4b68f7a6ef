"""Runs: arrays that grow at one end and are given up at the other.

In:  rows, in order.  Out: rows by their number since the first one ever.
Invariant: a number names the same row for as long as the row is held.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array

_FIRST_ROOM = 256


class Run:
    """Rows of one shape and dtype. Not locked: whoever owns it is."""

    def __init__(self, dtype: Any, shape: tuple[int, ...] = ()) -> None:
        self._rows: Array = np.empty((_FIRST_ROOM, *shape), dtype)
        self._origin = 0  # number of the row at place 0
        self._first = 0
        self.end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held."""
        return (self.end - self._first) * self._rows[:1].nbytes

    def append(self, rows: Array) -> int:
        """Add rows, and return the number of the first."""
        start, count = self.end, len(rows)
        if start + count - self._origin > len(self._rows):
            self._make_room(count)
        place = start - self._origin
        self._rows[place : place + count] = rows
        self.end = start + count
        return start

    def drop_before(self, number: int) -> None:
        """Give up the rows before a number."""
        self._first = max(self._first, min(number, self.end))

    def begin_at(self, number: int) -> None:
        """Give the first row this number; nothing was added yet."""
        self._origin = self._first = self.end = number

    def take(self, numbers: NDArray[np.int64]) -> Array:
        """Copy the rows of some numbers, all of them held."""
        return self._rows.take(numbers - self._origin, axis=0)

    def between(self, first: int, end: int) -> Array:
        """Look at a stretch of rows; what is added next may change it."""
        return self._rows[first - self._origin : end - self._origin]

    @property
    def held(self) -> Array:
        """Look at all rows held; what is added next may change it."""
        return self.between(self._first, self.end)

    def put(self, numbers: NDArray[np.int64], rows: Array) -> None:
        """Overwrite rows."""
        self._rows[numbers - self._origin] = rows

    def _make_room(self, count: int) -> None:
        """Move what is held to the front, of a larger array unless half of this one is free."""
        kept = self.held
        needed = len(kept) + count
        if 2 * needed <= len(self._rows):
            self._rows[: len(kept)] = kept.copy()
        else:
            larger = np.empty((max(needed, len(kept) + len(kept) // 2, _FIRST_ROOM), *kept.shape[1:]), kept.dtype)
            larger[: len(kept)] = kept
            self._rows = larger
        self._origin = self._first

"""Kept rows: whole observations that stand apart from their lanes' streams.

In:  rows and their ids, in ascending order.  Out: all of them.
Invariant: `clear` keeps the memory, so what one rollout needed the next one has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Leaf

_FIRST_ROWS = 8


class KeptRows:
    """Rows of several leaves under one list of ids, in arrays that double when they are full."""

    def __init__(self, leaves: tuple[Leaf, ...]) -> None:
        self._ids = np.empty(0, np.int64)
        self._rows = [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ids of the rows; a view."""
        return self._ids[: self._count]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and ids held."""
        return self.ids.nbytes + sum(rows[: self._count].nbytes for rows in self._rows)

    def rows(self, leaf: int) -> Array:
        """Return one leaf's rows; a view."""
        return self._rows[leaf][: self._count]

    def arrays(self) -> list[Array]:
        """Return the arrays held, with the room kept for more."""
        return [self._ids, *self._rows]

    def append(self, ids: NDArray[np.int64], rows: list[Array]) -> None:
        """Keep rows, leaf by leaf."""
        end = self._count + len(ids)
        if end > len(self._ids):
            room = max(2 * len(self._ids), end, _FIRST_ROWS)
            self._ids = _longer(self._ids, room, self._count)
            self._rows = [_longer(old, room, self._count) for old in self._rows]
        self._ids[self._count : end] = ids
        for kept, new in zip(self._rows, rows, strict=True):
            kept[self._count : end] = new
        self._count = end

    def clear(self) -> None:
        """Forget every row and keep the memory."""
        self._count = 0


def _longer(old: Array, room: int, used: int) -> Array:
    new = np.empty((room, *old.shape[1:]), old.dtype)
    new[:used] = old[:used]
    return new

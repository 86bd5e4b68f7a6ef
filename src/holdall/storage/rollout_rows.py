"""Kept rows: whole observations that stand apart from their lanes' streams.

In:  rows and their ids, in ascending order.  Out: all of them.
Invariant: `clear` keeps the memory, so what one rollout needed the next one has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Leaf

_FIRST_ROWS = 8


class FinalObservations:
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


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where every sequence begins, and how long it is."""

    first_place: NDArray[np.int64]  # tick * lanes + lane
    length: NDArray[np.int64]
    lanes: int

    @classmethod
    def of(cls, ends: NDArray[np.bool_], made: NDArray[np.bool_], longest: int) -> Sequences:
        """Cut a rollout of (ticks, lanes) at the ends of episodes, at steps not made, and after `longest` steps."""
        ticks, lanes = ends.shape
        begins = np.ones((lanes, ticks), np.bool_)
        begins[:, 1:] = (ends | ~made)[:-1].T
        begins |= ~made.T  # a run of its own, which is left out
        index = np.arange(lanes * ticks)
        begun = np.maximum.accumulate(np.where(begins.reshape(-1), index, 0))
        begins |= ((index - begun) % longest == 0).reshape(lanes, ticks)
        starts = np.flatnonzero(begins)
        length = np.diff(starts, append=lanes * ticks)
        lane, tick = np.divmod(starts, ticks)
        real = made.T.reshape(-1)[starts]
        return cls((tick * lanes + lane)[real], length[real], lanes)

    def batches(self, most_steps: int, generator: np.random.Generator) -> Iterator[NDArray[np.int64]]:
        """Yield all sequences in random order, together up to `most_steps` steps at a time, at least one."""
        order = generator.permutation(len(self.length))
        reach = np.cumsum(self.length[order])
        first, before = 0, 0
        while first < len(order):
            end = max(int(np.searchsorted(reach, before + most_steps, side="right")), first + 1)
            yield self._places(order[first:end])
            first, before = end, int(reach[end - 1])

    def _places(self, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
        length = self.length[chosen]
        step = np.arange(length.max())
        places = self.first_place[chosen][:, None] + step * self.lanes
        return np.where(step < length[:, None], places, -1)

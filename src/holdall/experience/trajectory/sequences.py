"""Sequences: a rollout's steps as runs within one episode and one lane.

In:  which steps end an episode and which were made.  Out: matrices of places, a sequence a row.
Invariant: every step that was made is in exactly one sequence; -1 stands behind a sequence's end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

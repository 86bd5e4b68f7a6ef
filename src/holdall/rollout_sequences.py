"""The sequences of a rollout: consecutive steps of one lane within one episode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdall.batch import Flags, Ids


@dataclass(frozen=True, slots=True)
class RolloutSequences:
    """The first steps and the lengths of sequences. A place is `tick * lanes + lane`."""

    first_places: Ids  # Place of the first step of each sequence.
    lengths: Ids  # Number of steps of each sequence.
    lanes: int

    @classmethod
    def cut(cls, is_end: Flags, is_valid: Flags, max_length: int) -> RolloutSequences:
        """Cut a rollout at the ends of episodes, at invalid steps, and after `max_length` steps.

        `is_end` and `is_valid` have shape (ticks, lanes).
        """
        ticks, lanes = is_end.shape
        is_start = np.ones((lanes, ticks), np.bool_)
        is_start[:, 1:] = (is_end | ~is_valid)[:-1].T
        is_start |= ~is_valid.T  # Every invalid step is a sequence of its own, which is left out below.
        index = np.arange(lanes * ticks)
        latest_start = np.maximum.accumulate(np.where(is_start.reshape(-1), index, 0))
        is_start |= ((index - latest_start) % max_length == 0).reshape(lanes, ticks)
        starts = np.flatnonzero(is_start)
        lengths = np.diff(starts, append=lanes * ticks)
        lane, tick = np.divmod(starts, ticks)
        is_kept = is_valid.T.reshape(-1)[starts]
        return cls((tick * lanes + lane)[is_kept], lengths[is_kept], lanes)

    def iterate_batches(self, max_steps: int, generator: np.random.Generator) -> Iterator[Ids]:
        """Yield the places of all sequences once, in random order, as arrays of shape (sequences, time).

        A batch has at most `max_steps` steps, or a single sequence. Places after the end of a sequence are -1.
        """
        order = generator.permutation(len(self.lengths))
        steps_so_far = np.cumsum(self.lengths[order])
        first = 0
        steps_before = 0
        while first < len(order):
            fitting = int(np.searchsorted(steps_so_far, steps_before + max_steps, side="right"))
            end = max(fitting, first + 1)
            yield self._find_places(order[first:end])
            first = end
            steps_before = int(steps_so_far[end - 1])

    def _find_places(self, chosen: Ids) -> Ids:
        """Return the places of the chosen sequences, padded with -1."""
        lengths = self.lengths[chosen]
        step = np.arange(lengths.max())
        places = self.first_places[chosen][:, None] + step * self.lanes
        return np.where(step < lengths[:, None], places, -1)

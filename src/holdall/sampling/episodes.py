"""Episodes: where those of every lane begin and end, kept up with a growing memory.

In:  the flags of transitions, as they are added.  Out: first and last step of the episodes of given ids.
Invariant: it depends on the memory alone, so it is never saved; flags set anew make it begin anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall.sampling.draw import Held, Ids

_LANE = np.int64(1) << 40
"""A place is lane * _LANE + tick: sorted by lane, then by tick. A trillion ticks are enough."""
_AT_ONCE = 1 << 20


class Episodes:
    """The last steps of all episodes held, sorted by lane and tick."""

    def __init__(self) -> None:
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)  # places
        self._next_id = 0
        self._flags_changed = 0

    def bounds(self, held: Held, ids: Ids) -> tuple[Ids, Ids]:
        """Return the ids of the first and last held step of the episode of each of `ids`.

        An episode that goes on ends, so far, with the newest step of its lane.
        """
        self._catch_up(held)
        tick, lane = np.divmod(ids, held.lanes)
        place = lane * _LANE + tick
        behind = np.searchsorted(self._ends, place)
        first_tick, next_tick = held.first_id // held.lanes, held.next_id // held.lanes
        end, before = self._at(behind, lane), self._at(behind - 1, lane)
        last = np.where(end < 0, next_tick - 1, end)
        first = np.maximum(before + 1, first_tick)
        return first * held.lanes + lane, last * held.lanes + lane

    def _at(self, index: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ticks of the ends at `index`, -1 where they are none of the lane's."""
        if self._ends.size == 0:
            return np.full(len(index), -1)
        inside = (index >= 0) & (index < len(self._ends))
        end = self._ends[np.where(inside, index, 0)]
        return np.where(inside & (end // _LANE == lane), end % _LANE, -1)

    def _catch_up(self, held: Held) -> None:
        if held.fields.flags_changed != self._flags_changed:
            self._flags_changed = held.fields.flags_changed
            self._ends, self._next_id = self._ends[:0], 0
        first = max(self._next_id, held.first_id)
        for begin in range(first, held.next_id, _AT_ONCE):
            ids = np.arange(begin, min(begin + _AT_ONCE, held.next_id))
            # A lane that made no transition stands alone: an episode ends before it and one begins after it.
            missing = ids[~held.fields.are_valid(ids)]
            before = missing[missing >= held.lanes] - held.lanes
            borders = np.concatenate([ids[held.fields.are_ends(ids)], missing, before])
            tick, lane = np.divmod(borders, held.lanes)
            new = np.sort(lane * _LANE + tick)
            self._ends = np.insert(self._ends, np.searchsorted(self._ends, new), new)
        self._next_id = held.next_id
        stale = self._ends % _LANE < held.first_id // held.lanes - 1
        if 2 * np.count_nonzero(stale) > len(stale):
            self._ends = self._ends[~stale]

"""Steps of the same episode as drawn transitions.

Guarantee: steps of two episodes are never mixed, unless `is_crossing` asks for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdall.batch import Flags, Ids
from holdall.sampling.held import Held
from holdall.sampling.row_order import PLACES_PER_LANE

_MAX_IDS_AT_ONCE = 1 << 20
"""Ids whose flags are read in one call. Limits the memory that a call takes."""
_CLEANUP_DIVISOR = 8
"""Ends of evicted episodes are removed each time that the capacity divided by this number was evicted."""


def find_steps_around(held: Held, ids: Ids, first: int, stop: int, *, is_crossing: bool = False) -> tuple[Ids, Flags]:
    """Return the ids `first` to `stop - 1` steps after each of `ids`, and which of them are real.

    A step is real if it is held, is a transition, and belongs to the same episode. Both arrays have shape (ids, steps).
    All returned ids are held, also those of steps that are not real.

    Args:
        held: What the memory holds.
        ids: Transitions that are held.
        first: 0 for the transitions and the steps after them, or negative for the steps before them.
        stop: At most 0 if `first` is negative.
        is_crossing: Whether steps of other episodes are real, too.
    """
    steps, is_real = held.find_steps(ids, first, stop)
    steps = np.where(is_real, steps, ids[:, None])
    if not held.fields.all_valid:
        is_real &= held.fields.are_valid(steps)
    if is_crossing:
        return steps, is_real
    if first < 0:
        is_real &= ~held.fields.are_ends(steps)
        return steps, np.logical_and.accumulate(is_real[:, ::-1], axis=1)[:, ::-1]
    is_real[:, 1:] &= ~held.fields.are_ends(steps[:, :-1])
    return steps, np.logical_and.accumulate(is_real, axis=1)


def pad_steps(steps: Ids, is_real: Flags) -> Ids:
    """Replace steps that are not real by the preceding real step, or else by the first real one."""
    columns = np.where(is_real, np.arange(steps.shape[1]), -1)
    nearest = np.maximum.accumulate(columns, axis=1)
    nearest = np.where(nearest < 0, is_real.argmax(axis=1)[:, None], nearest)
    return np.take_along_axis(steps, nearest, axis=1)


class _Ends(NamedTuple):
    """The known ends of episodes. Replaced in one assignment, so that an interrupt cannot split a change."""

    # Places of the last steps of episodes, sorted.
    places: Ids
    # Lowest id that was held when ends of evicted episodes were last removed.
    first_id: int
    # First id whose flags were not read yet.
    next_id: int
    # `flags_changed` of the memory when the flags were read.
    flags_changed: int


_NO_ENDS = _Ends(np.empty(0, np.int64), 0, 0, 0)


class Episodes:
    """Index of the ends of episodes in one memory. Reads the flags of every transition once."""

    def __init__(self) -> None:
        self._ends = _NO_ENDS

    def __reduce__(self) -> tuple[type[Episodes], tuple[()]]:
        """Pickle an empty index. A copy reads the flags of its own memory."""
        return Episodes, ()

    def find_bounds(self, held: Held, ids: Ids) -> tuple[Ids, Ids]:
        """Return the places of the first and the last held step of the episode of each of `ids`.

        The last step of an episode that has not ended is the newest step of its lane.
        """
        self._catch_up(held)
        ends = self._ends.places
        first, last = held.find_pieces(ids)
        if not ends.size:
            return first, last
        next_end = np.searchsorted(ends, held.find_places(ids))
        # Ends of other lanes are before the first or after the last held place of this lane.
        after_previous = np.maximum(ends[next_end - 1] + 1, first)
        until_next = np.minimum(ends[np.minimum(next_end, len(ends) - 1)], last)
        first = np.where(next_end > 0, after_previous, first)
        last = np.where(next_end < len(ends), until_next, last)
        return first, last

    def _catch_up(self, held: Held) -> None:
        """Read the flags of transitions that were added since the last call."""
        ends = self._ends
        if held.fields.flags_changed != ends.flags_changed:
            ends = ends._replace(places=ends.places[:0], next_id=0, flags_changed=held.fields.flags_changed)
        places = ends.places
        for begin in range(max(ends.next_id, held.first_id), held.next_id, _MAX_IDS_AT_ONCE):
            ids = np.arange(begin, min(begin + _MAX_IDS_AT_ONCE, held.next_id))
            new = _find_ends(held, ids)
            places = np.insert(places, np.searchsorted(places, new), new)
        first_id = ends.first_id
        if _CLEANUP_DIVISOR * (held.first_id - first_id) >= held.capacity:
            is_held = held.find_ids(places)[1]
            places = places[is_held]
            first_id = held.first_id
        self._ends = _Ends(places, first_id, held.next_id, ends.flags_changed)


def _find_ends(held: Held, ids: Ids) -> Ids:
    """Return the sorted places of the steps among `ids` that end an episode.

    An entry that is not a transition interrupts its lane: an episode ends before it, and another one begins after it.
    """
    gaps = held.find_places(ids[~held.fields.are_valid(ids)])
    before_gaps = gaps[gaps % PLACES_PER_LANE > 0] - 1
    return np.sort(np.concatenate([held.find_places(ids[held.fields.are_ends(ids)]), gaps, before_gaps]))

"""The order in time of the rows of a shard, which holds pieces of the lanes of many writers.

The shard adds every run of rows to a `RowOrder` as it arrives. `RowOrder` finds the place of a row in its lane, and the
row at a place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdall.batch import Flags, Ids

PLACES_PER_LANE = np.int64(1) << 40
"""The place of a step is `lane * PLACES_PER_LANE + tick`. No lane ever has as many ticks."""


class WriterRun(NamedTuple):
    """Rows of a shard that one writer sent together. Row r of the run is tick `r // lanes` and lane `r % lanes`."""

    # Name of the writer.
    writer: str
    # Tick of the first row, counted by the writer. -1: the order of the rows is not known.
    first_tick: int
    # Number of lanes of the writer.
    lanes: int
    # Number of the first row in the shard.
    first_row: int
    # Number of rows.
    rows: int


# Runs are columns of an int64 array. These are its rows.
_ROW = 0
"""First row of the run."""
_TICKS = 1
"""Number of ticks of the run."""
_LANES = 2
"""Number of lanes of the run."""
_PLACE = 3
"""Place of the first row of the run."""
_SPACING = 4
"""Distance of the places of two ticks."""
_PAST = 5
"""Row after the previous run of the same writer, or -1 if that run is not held."""
_FIELDS = 6

_UNORDERED_SPACING = 2**19
"""Distance of the places of rows whose order is not known. Every sequence is shorter, so none has two such rows."""


class RowOrder:
    """Order in time of the rows of a shard. Not thread-safe.

    Every lane of every writer has its own number, so steps of two writers never follow each other. The next step of a
    lane is its next tick, if this shard holds that tick.
    """

    def __init__(self) -> None:
        # The runs, sorted by their first row.
        self._by_row = np.empty((_FIELDS, 0), np.int64)
        # The runs, sorted by the place of their first row.
        self._by_place = np.empty((_FIELDS, 0), np.int64)
        # First lane by the name and the number of lanes of a writer.
        self._lanes: dict[tuple[str, int], int] = {}
        # First lanes of all writers, sorted.
        self._first_lanes: Ids = np.empty(0, np.int64)
        # Number of the next new lane.
        self._next_lane = 0
        # Lowest row that is held.
        self._first_row = 0

    def add(self, run: WriterRun, first_row: int) -> None:
        """Add a run of new rows. Rows before `first_row` were evicted."""
        self.evict_before(first_row)
        if run.first_tick >= 0:
            lanes = run.lanes
            spacing = 1
            place = self._assign_lanes(run.writer, lanes) * PLACES_PER_LANE + run.first_tick
        else:
            # The order of these rows is not known, so they are far apart in a new lane.
            lanes = 1
            spacing = _UNORDERED_SPACING
            place = self._assign_lanes("", lanes) * PLACES_PER_LANE
        index = int(np.searchsorted(self._by_place[_PLACE], place))
        past = -1
        if index:
            previous = self._by_place[:, index - 1]
            if previous[_PLACE] + previous[_TICKS] == place:
                past = int(previous[_ROW] + previous[_TICKS] * previous[_LANES])
        entry = np.array([run.first_row, run.rows // lanes, lanes, place, spacing, past], np.int64)
        self._by_row = np.concatenate([self._by_row, entry[:, None]], axis=1)
        self._by_place = np.insert(self._by_place, index, entry, axis=1)

    def _assign_lanes(self, writer: str, lanes: int) -> int:
        """Return the number of the writer's first lane. A writer without a name gets new lanes every time."""
        known = self._lanes.get((writer, lanes)) if writer else None
        if known is not None:
            return known
        first_lane = self._next_lane
        self._next_lane += lanes
        self._first_lanes = np.append(self._first_lanes, first_lane)
        if writer:
            self._lanes[writer, lanes] = first_lane
        return first_lane

    def evict_before(self, first_row: int) -> None:
        """Remove the runs of which all rows are before `first_row`."""
        if first_row == self._first_row:
            return
        self._first_row = first_row
        ends = self._by_row[_ROW] + self._by_row[_TICKS] * self._by_row[_LANES]
        evicted = int(np.searchsorted(ends, first_row, "right"))
        if evicted:
            is_evicted = np.isin(self._by_place[_ROW], self._by_row[_ROW, :evicted])
            self._by_place = self._by_place[:, ~is_evicted]
            self._by_row = self._by_row[:, evicted:]

    def find_places(self, ids: Ids) -> Ids:
        """Return the places of held ids. The next step of the same lane has the next place."""
        run = self._by_row[:, np.searchsorted(self._by_row[_ROW], ids, "right") - 1]
        tick, lane = np.divmod(ids - run[_ROW], run[_LANES])
        return np.asarray(run[_PLACE] + lane * PLACES_PER_LANE + tick * run[_SPACING])

    def find_ids(self, places: Ids) -> tuple[Ids, Flags]:
        """Return the ids at `places`, of any shape, and which of them are held. The other ids are arbitrary numbers."""
        if not self._by_place.shape[1]:
            return places, np.zeros(places.shape, np.bool_)
        lane, first_lane_places = self._move_to_first_lanes(places)
        index = np.searchsorted(self._by_place[_PLACE], first_lane_places, "right") - 1
        run = self._by_place[:, index]
        tick, rest = np.divmod(first_lane_places - run[_PLACE], run[_SPACING])
        rows = run[_ROW] + tick * run[_LANES] + lane
        is_in_run = (index >= 0) & (rest == 0) & (tick < run[_TICKS]) & (lane >= 0) & (lane < run[_LANES])
        return rows, is_in_run & (rows >= self._first_row)

    def _move_to_first_lanes(self, places: Ids) -> tuple[Ids, Ids]:
        """Return the lane of each place, counted from its writer's first lane, and the place of the same tick there."""
        lane, tick = np.divmod(places, PLACES_PER_LANE)
        first_lane = self._first_lanes[np.searchsorted(self._first_lanes, lane, "right") - 1]
        return lane - first_lane, first_lane * PLACES_PER_LANE + tick

    def find_pieces(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the first and the last place of the held steps around each id that follow each other without a gap."""
        runs = self._by_place
        ends = runs[_PLACE] + (runs[_TICKS] - 1) * runs[_SPACING] + 1
        # Indices of runs that the next run does not continue.
        breaks = np.flatnonzero(ends[:-1] != runs[_PLACE, 1:])
        places = self.find_places(ids)
        lane, first_lane_places = self._move_to_first_lanes(places)
        run = np.searchsorted(runs[_PLACE], first_lane_places, "right") - 1
        piece = np.searchsorted(breaks, run)
        first_run = np.append(-1, breaks)[piece] + 1
        last_run = np.append(breaks, len(ends) - 1)[piece]
        # Rows of the oldest run may be evicted.
        evicted_ticks = -((runs[_ROW, first_run] + lane - self._first_row) // runs[_LANES, first_run])
        first = runs[_PLACE, first_run] + np.maximum(0, evicted_ticks) + lane * PLACES_PER_LANE
        last = ends[last_run] + lane * PLACES_PER_LANE - 1
        is_unordered = runs[_SPACING, first_run] > 1
        return np.where(is_unordered, places, first), np.where(is_unordered, places, last)

    def find_ids_without_past(self, first_id: int) -> Ids:
        """Return the held ids whose previous step was evicted since `first_id` was the lowest held id.

        May also return other held ids.
        """
        runs = self._by_row
        first_row = self._first_row
        # The previous step may be evicted for rows of the oldest run, and for the first rows after an evicted run.
        is_cut = runs[_ROW] < first_row
        follows_evicted = (runs[_PAST] > first_id) & (runs[_PAST] - runs[_LANES] < first_row)
        begin = np.maximum(runs[_ROW], first_row)
        end = np.minimum(begin + runs[_LANES], runs[_ROW] + runs[_TICKS] * runs[_LANES])
        found = [np.arange(begin[run], end[run]) for run in np.flatnonzero(is_cut | follows_evicted)]
        return np.concatenate([np.empty(0, np.int64), *found])

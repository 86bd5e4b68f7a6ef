"""Which steps follow each other in time, in a memory that holds pieces of many writers' lanes: a shard.

In:  runs of rows, in the order in which they came.  Out: places of rows, and rows at places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

LANE = np.int64(1) << 40
"""A place is lane * LANE + tick: sorted by lane, then by tick. A trillion ticks are enough."""


class WriterRun(NamedTuple):
    """Rows of a shard that one writer sent together; row r is tick r // lanes and lane r % lanes of the run."""

    writer: str
    first_tick: int  # of the writer's own ticks; -1: not known
    lanes: int
    first_row: int
    rows: int


_ROW, _TICKS, _LANES, _PLACE, _SPACING, _PAST = range(6)
"""Of a run: its first row; its ticks and lanes; the place of its first row; how far apart the places of its ticks are;
the row behind the run before it, or -1."""
_FAR = 2**19
"""Places between rows that are not known to follow each other: no sequence is as long."""


class RowOrder:
    """Which rows of a shard follow each other in time: it holds pieces of many writers' lanes, in the order they came.

    Invariant: a lane of a writer has a number of its own, and its steps their ticks, so the step after one is the next
    tick of that lane, or is not held here. Steps of two writers never follow each other.
    """

    def __init__(self) -> None:
        self._by_row = np.empty((6, 0), np.int64)
        self._by_place = np.empty((6, 0), np.int64)
        self._lanes: dict[tuple[str, int], int] = {}  # the first lane of a writer with so many
        self._first_lanes: Ids = np.empty(0, np.int64)
        self._next_lane = 0
        self._first_row = 0

    def add(self, run: WriterRun, first_row: int) -> None:
        """Take a run over whose rows are the newest; those before `first_row` have left."""
        self.forget_before(first_row)
        # Rows that are not known to follow each other lie far apart, in a lane of their own.
        is_ordered = run.first_tick >= 0
        lanes, tick, spacing = (run.lanes, run.first_tick, 1) if is_ordered else (1, 0, _FAR)
        place = self._lane_of(run.writer if is_ordered else "", lanes) * LANE + tick
        at = int(np.searchsorted(self._by_place[_PLACE], place))
        past = -1
        if at and self._by_place[_PLACE, at - 1] + self._by_place[_TICKS, at - 1] == place:
            before = self._by_place[:, at - 1]
            past = int(before[_ROW] + before[_TICKS] * before[_LANES])
        entry = np.array([run.first_row, run.rows // lanes, lanes, place, spacing, past], np.int64)
        self._by_row = np.concatenate([self._by_row, entry[:, None]], axis=1)
        self._by_place = np.insert(self._by_place, at, entry, axis=1)

    def _lane_of(self, writer: str, lanes: int) -> int:
        """Return the number of a writer's first lane; who has no name gets another one every time."""
        known = self._lanes.get((writer, lanes)) if writer else None
        if known is None:
            known, self._next_lane = self._next_lane, self._next_lane + lanes
            self._first_lanes = np.append(self._first_lanes, known)
            if writer:
                self._lanes[writer, lanes] = known
        return known

    def forget_before(self, first_row: int) -> None:
        """Note that the rows before this one were evicted."""
        if first_row == self._first_row:
            return
        self._first_row = first_row
        ends = self._by_row[_ROW] + self._by_row[_TICKS] * self._by_row[_LANES]
        left = int(np.searchsorted(ends, first_row, "right"))
        if left:
            self._by_place = self._by_place[:, ~np.isin(self._by_place[_ROW], self._by_row[_ROW, :left])]
            self._by_row = self._by_row[:, left:]

    def places(self, ids: Ids) -> Ids:
        """Return the places of held ids: the step after one has the next place."""
        run = self._by_row[:, np.searchsorted(self._by_row[_ROW], ids, "right") - 1]
        tick, lane = np.divmod(ids - run[_ROW], run[_LANES])
        return np.asarray(run[_PLACE] + lane * LANE + tick * run[_SPACING])

    def at(self, places: Ids) -> tuple[Ids, Flags]:
        """Return the ids at places of any shape, and which of them are held; the others are any number."""
        if not self._by_place.shape[1]:
            return places, np.zeros(places.shape, np.bool_)
        lane, wanted = self._in_first_lanes(places)
        index = np.searchsorted(self._by_place[_PLACE], wanted, "right") - 1
        run = self._by_place[:, index]
        tick, between = np.divmod(wanted - run[_PLACE], run[_SPACING])
        rows = run[_ROW] + tick * run[_LANES] + lane
        known = (index >= 0) & (between == 0) & (tick < run[_TICKS]) & (rows >= self._first_row)
        return rows, known & (lane >= 0) & (lane < run[_LANES])

    def _in_first_lanes(self, places: Ids) -> tuple[Ids, Ids]:
        """Return which lane of its writer each place is of, and the place of the same tick in the writer's first."""
        lane, tick = np.divmod(places, LANE)
        first = self._first_lanes[np.searchsorted(self._first_lanes, lane, "right") - 1]
        return lane - first, first * LANE + tick

    def pieces(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the first and last place of the held steps around each id that follow each other without a gap."""
        runs = self._by_place
        end = runs[_PLACE] + (runs[_TICKS] - 1) * runs[_SPACING] + 1
        breaks = np.flatnonzero(end[:-1] != runs[_PLACE, 1:])
        places = self.places(ids)
        lane, wanted = self._in_first_lanes(places)
        piece = np.searchsorted(breaks, np.searchsorted(runs[_PLACE], wanted, "right") - 1)
        begin, last = np.append(-1, breaks)[piece] + 1, np.append(breaks, len(end) - 1)[piece]
        # Of the oldest run some rows may have left.
        left = np.maximum(0, -((runs[_ROW, begin] + lane - self._first_row) // runs[_LANES, begin]))
        first, behind = runs[_PLACE, begin] + left + lane * LANE, end[last] + lane * LANE
        is_alone = runs[_SPACING, begin] > 1
        return np.where(is_alone, places, first), np.where(is_alone, places, behind - 1)

    def without_past(self, first_id: int) -> Ids:
        """Return at least those held ids whose step before was held when `first_id` was the first one held."""
        runs, held_from = self._by_row, self._first_row
        # Rows of the oldest run, behind those that left; and the first rows of runs that follow one that left.
        is_cut = runs[_ROW] < held_from
        follows = (runs[_PAST] > first_id) & (runs[_PAST] - runs[_LANES] < held_from)
        begin = np.maximum(runs[_ROW], held_from)
        end = np.minimum(begin + runs[_LANES], runs[_ROW] + runs[_TICKS] * runs[_LANES])
        found = [np.arange(begin[run], end[run]) for run in np.flatnonzero(is_cut | follows)]
        return np.concatenate([np.empty(0, np.int64), *found])

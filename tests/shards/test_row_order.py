"""The order in time of a shard's rows, compared with dictionaries of every writer's steps."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from holdall.sampling import PLACES_PER_LANE, RowOrder, WriterRun


class Shard:
    """Rows of some writers, and the model: a dictionary of the steps of every lane."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.order = RowOrder()
        self.first = 0
        self.next = 0
        self.steps: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)  # Rows by tick, by writer and lane.
        self.names: dict[int, tuple[tuple[str, int], int]] = {}
        self.ticks: dict[str, int] = defaultdict(int)

    def add(self, writer: str, lanes: int) -> None:
        if self.generator.random() < 0.2:
            self.ticks[writer] += int(self.generator.integers(1, 9))  # The writer sent these ticks to another shard.
        ticks = int(self.generator.integers(1, 6))
        begin = self.ticks[writer]
        self.ticks[writer] += ticks
        is_ordered = self.generator.random() < 0.9
        run = WriterRun(
            writer, begin if is_ordered else -1, lanes if is_ordered else ticks * lanes, self.next, ticks * lanes
        )
        for row in range(ticks * lanes):
            lane = (writer, row % lanes) if is_ordered else (f"alone {self.next + row}", 0)
            self.steps[lane][begin + row // lanes] = self.next + row
            self.names[self.next + row] = lane, begin + row // lanes
        self.next += ticks * lanes
        self.first = max(self.first, self.next - 60)
        self.order.add(run, self.first)

    def neighbour(self, row: int, away: int) -> int:
        lane, tick = self.names[row]
        found = self.steps[lane].get(tick + away, -1)
        return found if found >= self.first else -1


@pytest.mark.parametrize("seed", range(10))
def test_rows_follow_each_other_as_their_writers_stepped(seed: int) -> None:
    shard = Shard(seed)
    lanes = {"a": 1, "b": 3, "c": 2}
    for _ in range(60):
        writer = str(shard.generator.choice(list(lanes)))
        before = shard.first
        new_from = shard.next
        shard.add(writer, lanes[writer])
        if shard.generator.random() < 0.3:
            shard.first = min(shard.next - 1, shard.first + int(shard.generator.integers(0, 9)))
            shard.order.evict_before(shard.first)
        rows = np.arange(shard.first, shard.next)
        places = shard.order.find_places(rows)
        assert (shard.order.find_ids(places)[0] == rows).all()
        assert shard.order.find_ids(places)[1].all()
        found, known = shard.order.find_ids(places[:, None] + np.arange(-7, 8))
        expected = [[shard.neighbour(row, away) for away in range(-7, 8)] for row in rows.tolist()]
        assert np.where(known, found, -1).tolist() == expected
        first, last = shard.order.find_pieces(rows)
        for row, place, begin, end in zip(rows.tolist(), places, first, last, strict=True):
            assert shard.neighbour(row, int(begin - place) - 1) == shard.neighbour(row, int(end - place) + 1) == -1
            assert shard.order.find_ids(np.arange(begin, end + 1))[1].all()
            assert begin // PLACES_PER_LANE == place // PLACES_PER_LANE == end // PLACES_PER_LANE
        lost = {
            row
            for row in range(shard.first, new_from)
            if before <= shard.steps[shard.names[row][0]].get(shard.names[row][1] - 1, -1) < shard.first
        }
        found_rows = shard.order.find_ids_without_past(before)
        assert lost <= set(found_rows.tolist()) <= set(rows.tolist())

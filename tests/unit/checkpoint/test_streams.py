"""Streams: the order in time of the transitions of several shards."""

from __future__ import annotations

import numpy as np

from holdall.checkpoint.streams import Streams
from holdall.sampling.row_order import WriterRun


def list_stretches(streams: Streams) -> list[list[tuple[int, int]]]:
    """Return shard and id of each transition, in one list per uninterrupted stretch of time."""
    found: list[list[tuple[int, int]]] = [[]]
    for number in range(len(streams.count)):
        ids = streams.first_id[number] + streams.stride[number] * np.arange(streams.count[number])
        found[-1] += [(int(streams.source[number]), int(one)) for one in ids]
        if not streams.continues[number]:
            found.append([])
    assert found.pop() == []
    return found


def test_runs_of_one_writer_continue_each_other_lane_by_lane() -> None:
    """On any shard. Rows without a known tick continue nothing."""
    first = [
        WriterRun("a", 0, lanes=2, first_row=0, rows=6),
        WriterRun("b", 0, lanes=2, first_row=6, rows=4),
        WriterRun("c", -1, lanes=1, first_row=10, rows=1),
    ]
    second = [WriterRun("a", 3, lanes=2, first_row=0, rows=4), WriterRun("c", 0, lanes=1, first_row=4, rows=1)]
    assert list_stretches(Streams.of_shards([(0, 11, first), (0, 5, second)])) == [
        [(0, 0), (0, 2), (0, 4), (1, 0), (1, 2)],
        [(0, 1), (0, 3), (0, 5), (1, 1), (1, 3)],
        [(0, 6), (0, 8)],
        [(0, 7), (0, 9)],
        [(0, 10)],
        [(1, 4)],
    ]


def test_evicted_rows_interrupt_a_stream() -> None:
    """Shard 1 no longer holds the first tick of its run."""
    first = [WriterRun("a", 0, lanes=2, first_row=0, rows=4)]
    second = [WriterRun("a", 2, lanes=2, first_row=0, rows=6)]
    assert list_stretches(Streams.of_shards([(0, 4, first), (2, 6, second)])) == [
        [(0, 0), (0, 2)],
        [(1, 2), (1, 4)],
        [(0, 1), (0, 3)],
        [(1, 3), (1, 5)],
    ]

"""How long before it is returned a batch is drawn, and how many are drawn at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall.cluster.learner import BatchRequest, BatchStream
from holdall.delivery.loader import Loader
from holdall.ray import ReplayMemory


class Numbers:
    """Draws batches that are numbers, and remembers how many had been returned by then."""

    def __init__(self) -> None:
        self.returned = 0
        self.calls: list[int] = []
        self.drawn_after: list[int] = []

    def draw(self, count: int) -> list[BatchRequest]:
        self.calls.append(count)
        first = len(self.drawn_after)
        self.drawn_after += [self.returned] * count
        return [BatchRequest(number) for number in range(first, first + count)]


def identity(value: Any) -> Any:
    return value


@pytest.mark.parametrize("batches", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4, 9])
def test_no_batch_is_drawn_earlier_than_prefetch_says(prefetch: int, batches: int) -> None:
    if batches > max(1, prefetch):
        pytest.skip("a loader never draws more at once than it may prefetch")
    numbers = Numbers()
    stream = BatchStream(numbers.draw, batches)
    draw: Any = lambda: partial(identity, stream.take().count)  # noqa: E731
    with Loader(draw, identity, max(0, prefetch - batches + 1)) as loader:
        for expected in range(30):
            number: Any = next(loader)
            assert number == expected
            assert len(numbers.drawn_after) <= expected + 1 + prefetch
            numbers.returned += 1
    before = [number - after for number, after in enumerate(numbers.drawn_after)]
    assert max(before) == prefetch
    assert set(numbers.calls) == {batches}
    if batches == 1:
        assert set(before[prefetch:]) == {prefetch}  # as a local memory draws them
    if prefetch >= 2:
        assert min(before[prefetch:]) >= 1  # one is always on its way


SPACE = spaces.Box(-1, 1, (2,), np.float32)


def add(memory: Any, first: int, end: int) -> None:
    """Add transitions whose reward tells which one they are."""
    row, no = np.zeros((end - first, 1, 2), np.float32), np.zeros((end - first, 1), np.bool_)
    memory.extend(row, no.astype(np.int64), np.arange(first, end, dtype=np.float64)[:, None], row, no, no)
    memory.flush()


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_batches_drawn_at_once_are_the_same_for_the_same_seed() -> None:
    found = []
    for _ in range(2):
        with ReplayMemory(SPACE, spaces.Discrete(2), 80_000, shards=4, seed=5, patience_s=60.0) as memory:
            memory._streams._generator = np.random.default_rng(0)  # chooses the shards of segments
            for first in range(0, 3_000, 100):  # so that every shard has room for each
                add(memory, first, first + 100)
            with memory.loader(64, prefetch=4) as loader:
                found.append([next(loader).reward.tolist() for _ in range(9)])
    assert found[0] == found[1]

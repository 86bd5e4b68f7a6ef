"""How long before it is handed out a batch is drawn, and how many at once."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")

from holdall import Prioritized, ShardError
from holdall.cluster.learner import BatchesAhead, Drawing, Request, together
from holdall.cluster.protocol import shards_of
from holdall.delivery.loader import Loader
from holdall.ray import ReplayMemory

from .processes import kill, process_of, wait_until


class Numbers:
    """Draws batches that are numbers, and remembers how many had been handed out by then."""

    def __init__(self) -> None:
        self.handed_out = 0
        self.calls: list[int] = []
        self.drawn_after: list[int] = []
        self.drawn_in: list[Any] = []
        self.now: Any = None

    def state(self) -> Any:
        return self.now

    def give_up(self, requests: Any) -> None:
        pass

    def draw(self, count: int) -> list[Request]:
        self.calls.append(count)
        first = len(self.drawn_after)
        self.drawn_after += [self.handed_out] * count
        self.drawn_in += [self.now] * count
        return [Request(number) for number in range(first, first + count)]

    def finish(self, request: Request) -> Any:
        return request.count


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 4, 9])
def test_no_batch_is_drawn_earlier_than_prefetch_says(prefetch: int, shards: int) -> None:
    numbers, batches = Numbers(), together(prefetch, shards)
    ahead = BatchesAhead(cast("Drawing", numbers), numbers.draw, batches)
    with Loader(ahead, max(0, prefetch - batches + 1)) as loader:
        for expected in range(30):
            assert cast("Any", next(loader)) == expected
            assert len(numbers.drawn_after) <= expected + 1 + prefetch
            numbers.handed_out += 1
    before = [number - after for number, after in enumerate(numbers.drawn_after)]
    assert max(before) == prefetch
    if shards < 4:
        assert set(numbers.calls) == {1}
        assert set(before[prefetch:]) == {prefetch}  # as a local memory draws them
    if shards >= 4 and prefetch >= 2:
        assert set(numbers.calls) == {min(prefetch, shards)}
        assert min(before[prefetch:]) >= 1  # there is always one on its way


@given(
    batches=st.integers(1, 4),
    most=st.integers(1, 9),
    states=st.lists(st.tuples(st.sampled_from([None, (1,), (2,), (3,)]), st.integers(1, 12)), min_size=1, max_size=6),
)
def test_a_batch_is_handed_out_late_only_if_nothing_has_changed_since(
    batches: int, most: int, states: list[tuple[Any, int]]
) -> None:
    """Whether that was seen: None says that it could not be."""
    numbers = Numbers()
    ahead = BatchesAhead(cast("Drawing", numbers), numbers.draw, batches, most)
    last = -1
    for state, count in states:
        numbers.now = state
        for _ in range(count):
            number = ahead.next().count
            assert number > last
            last = number
            is_early = numbers.handed_out - numbers.drawn_after[number] < batches
            assert is_early or (state is not None and numbers.drawn_in[number] == state)
            numbers.handed_out += 1
    assert max(numbers.calls) <= max(batches, most)
    for before, after in pairwise(numbers.calls):
        assert after <= max(batches, 2 * before)


def test_while_nothing_changes_twice_as_many_are_drawn_each_time() -> None:
    numbers = Numbers()
    numbers.now = (0,)
    ahead = BatchesAhead(cast("Drawing", numbers), numbers.draw, 1, 8)
    assert [ahead.next().count for _ in range(31)] == list(range(31))
    assert numbers.calls == [1, 2, 4, 8, 8, 8]


SPACE = spaces.Box(-1, 1, (2,), np.float32)


def add(memory: Any, first: int, end: int) -> None:
    """Add transitions whose reward tells which one they are."""
    row, no = np.zeros((end - first, 1, 2), np.float32), np.zeros((end - first, 1), np.bool_)
    memory.extend(row, no.astype(np.int64), np.arange(first, end, dtype=np.float64)[:, None], row, no, no)
    memory.flush()


def calls_of(memory: ReplayMemory, batches: int) -> int:
    """Draw batches, and count the calls that they took."""
    calls: list[Any] = []
    call = memory._cluster.call

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return call(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory._cluster, "call", counted)
        for _ in range(batches):
            memory.sample(64)
    return len(calls)


def wait_for_spare(memory: ReplayMemory) -> None:
    """Draw until a batch waits that was drawn with another."""
    wait_until(lambda: memory.sample(64) is not None and waiting(memory) > 0)


def waiting(memory: ReplayMemory) -> int:
    return 0 if memory._asked is None else len(memory._asked[1].drawn)


@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is shared so on Linux alone")
def test_a_batch_that_was_drawn_with_another_is_handed_out_only_while_nothing_changes() -> None:
    """Also while most shards are empty, until one of them gets something."""
    settings: dict[str, Any] = {"sampler": Prioritized(alpha=1.0, beta=1.0), "on_shard_loss": "raise"}
    with ReplayMemory(SPACE, spaces.Discrete(2), 80_000, shards=4, seed=0, patience_s=60.0, **settings) as memory:
        add(memory, 0, 64)
        assert sum(counters.transitions == 0 for counters in memory._cluster.refresh().values()) == 3
        wait_for_spare(memory)
        with memory.writer() as other:
            for first in range(5_000, 5_800, 100):  # to other shards, too
                add(other, first, first + 100)
        wait_until(lambda: memory.sample(64).reward.max() >= 5_000)
        wait_for_spare(memory)
        add(memory, 0, 4_000)
        assert calls_of(memory, 4) >= 6
        shards = sum(counters.transitions > 0 for counters in memory._cluster.refresh().values())
        # Two draws of eight batches at most, as soon as the shards have told of all that was added.
        wait_until(lambda: calls_of(memory, 8) <= 2 * shards)
        wait_for_spare(memory)
        with memory.writer() as other:  # as in another process: nobody tells the learner
            add(other, 10_000, 14_000)
        assert memory.sample(64).reward.max() >= 10_000
        wait_for_spare(memory)
        add(memory, 20_000, 28_000)
        batch = memory.sample(64)
        assert batch.reward.max() >= 20_000
        wait_for_spare(memory)
        memory.update_priorities(batch.ids[:1], np.array([1e12]))
        assert (memory.sample(64).ids == batch.ids[0]).all()
        for _ in range(4):  # who updates after every batch draws none for nothing
            memory.update_priorities(batch.ids[:1], np.array([1e12]))
            memory.sample(64)
            assert not waiting(memory)
        wait_for_spare(memory)
        kill(process_of(memory._cluster.handle(int(shards_of(batch.ids)[0]))))
        wait_until(lambda: memory._cluster.changes() is None)
        with pytest.raises(ShardError, match="shard"):
            memory.sample(64)


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_batches_drawn_at_once_are_the_same_for_the_same_seed() -> None:
    found = []
    for _ in range(2):
        with ReplayMemory(SPACE, spaces.Discrete(2), 80_000, shards=4, seed=5, patience_s=60.0) as memory:
            memory._groups[0]._generator = np.random.default_rng(0)  # which shards segments go to
            batches = []
            for part in range(3):
                for first in range(1_000 * part, 1_000 * (part + 1), 100):  # so that every shard has room for each
                    add(memory, first, first + 100)
                batches += [memory.sample(64).reward.tolist() for _ in range(7)]
            found.append(batches)
    assert found[0] == found[1]

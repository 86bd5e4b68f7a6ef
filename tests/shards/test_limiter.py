"""The limiter: the error stays within its bounds, and nobody waits for a process that died with a grant."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from holdall import ArgumentError, ClosedError, HoldallError, Prioritized
from holdall.cluster.limiter import Limiter
from holdall.ray import RateLimit, ReplayMemory, Writer

from .processes import wait_until

# Workers cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "insert", "die", "sample", "wait"]), st.integers(0, 3)), max_size=120
)


@given(
    ratio=st.sampled_from([0.25, 1.0, 4.0, 8.0]),
    min_size=st.integers(1, 600),
    slack=st.floats(0, 500),
    steps=STEPS,
)
def test_the_error_stays_within_its_bounds_and_expired_grants_block_nobody(
    ratio: float, min_size: int, slack: float, steps: list[tuple[str, int]]
) -> None:
    block = 128
    batch = 64
    limit = RateLimit(ratio, min_size, max(block * ratio, batch) + slack)
    limiter = Limiter(limit)
    now = 0.0
    held: dict[int, tuple[int | None, float]] = {}
    truly_inserted = 0

    def require_bounds() -> None:
        error = truly_inserted * ratio - limiter.sampled
        assert error <= limit.highest
        assert limiter.sampled == 0 or error >= limit.lowest

    for what, who in steps:
        if what == "ask" and who not in held:
            lease = limiter.lease_insert(block, now)
            if lease is not None:
                held[who] = lease, now + 29
        elif what == "insert" and who in held:
            lease, until = held.pop(who)
            if now < until and lease is not None:
                truly_inserted += block
                limiter.observe(truly_inserted)
                limiter.end_insert(lease)
        elif what == "die":
            held.pop(who, None)
        elif what == "sample":
            limiter.take_samples(batch)
        elif what == "wait":
            now += 10 * who
        require_bounds()
    # When all grants have expired, an insert or a draw is possible.
    for _ in range(5):
        now += 100
        lease = limiter.lease_insert(block, now)
        if lease is not None:
            truly_inserted += block
            limiter.observe(truly_inserted)
            limiter.end_insert(lease)
        assert lease is not None or limiter.take_samples(batch)
        require_bounds()


def test_nothing_is_drawn_before_min_size_is_reached() -> None:
    limiter = Limiter(RateLimit(2.0, 100, 300))
    limiter.observe(99)
    assert not limiter.take_samples(1)
    limiter.observe(100)
    assert limiter.take_samples(300)
    assert not limiter.take_samples(1)


@pytest.mark.parametrize("wrong", [(0.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, -1.0)])
def test_wrong_limits_are_refused(wrong: tuple[float, int, float]) -> None:
    with pytest.raises(ArgumentError):
        RateLimit(*wrong)


def test_a_call_that_could_never_be_granted_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"tolerance \(100\) must be at least 1024, a segment of 128 rows"):
        RateLimit(8.0, 100, 100).require("add", 128)
    with pytest.raises(ArgumentError, match=r"tolerance \(100\) must be at least 256, the number of rows of a batch"):
        RateLimit(8.0, 100, 100).require("sample", 256)


@ray.remote(num_cpus=0)
def feed(writer: Writer, count: int) -> None:
    row = np.zeros((1, 3), np.float32)
    action = np.zeros(1, np.int64)
    no = np.zeros(1, np.bool_)
    for _ in range(count):
        writer.add(row, action, np.zeros(1, np.float32), row, no, no)
    writer.flush()


def add(memory: Any, count: int) -> None:
    row = np.zeros((1, 3), np.float32)
    no = np.zeros(1, np.bool_)
    for _ in range(count):
        memory.add(row, np.zeros(1, np.int64), np.zeros(1, np.float32), row, no, no)


def read_counts(memory: ReplayMemory) -> tuple[float, float, float]:
    """Return the limiter's counts of inserts and samples and its error, with the present counters of all shards."""
    roster = memory._fleet.roster
    known = memory._members.refresh()
    ray.get(roster.__ray_call__.remote(lambda it: [it._record(*each) for each in known.items()] and None))
    figures = ray.get(roster.limiter.remote())
    return figures["inserted"], figures["sampled"], figures["error"]


@pytest.mark.nightly  # In make test, chaos/test_limiter_model.py has the rule.
@pytest.mark.usefixtures("cluster")
def test_transitions_from_before_the_start_do_not_count_as_inserts(tmp_path: Path) -> None:
    """Neither those that shards held already, nor those of a checkpoint."""
    space = spaces.Box(-1, 1, (3,), np.float32)
    settings: dict[str, Any] = {"limit": RateLimit(1.0, 1, 4_000), "patience_s": 60.0}
    with ReplayMemory(space, spaces.Discrete(2), 10_000, shards=2, **settings) as memory:
        roster = memory._fleet.roster
        assert not ray.get(roster.__ray_call__.remote(lambda it: it._must_recentre))
        add(memory, 1_000)
        memory.flush()
        assert read_counts(memory) == (1_000, 0, 1_000)
        memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path, shards=1, **settings) as memory:
        assert (len(memory), read_counts(memory)) == (1_000, (1_000, 999, 1))


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
def test_writers_and_learners_wait_for_each_other(tmp_path: Path) -> None:
    limit = RateLimit(samples_per_insert=2.0, min_size=256, tolerance=512)
    space = spaces.Box(-1, 1, (3,), np.float32)
    settings: dict[str, Any] = {"limit": limit, "sampler": Prioritized(), "patience_s": 60.0}
    with ReplayMemory(space, spaces.Discrete(2), 10_000, shards=2, **settings) as memory:
        fed = [feed.remote(memory.writer(), 1_024) for _ in range(2)]
        drawn = 0
        while drawn < 3_600:  # Then all inserts are granted.
            memory.sample(100)
            drawn += 100
            counters = ray.get(memory._fleet.roster.limiter.remote())
            assert counters["lowest"] <= counters["error"] <= counters["highest"]
            assert len(memory) * 2.0 - drawn <= limit.highest
        ray.get(fed, timeout=60)
        assert len(memory) == 2_048
        # Two threads use one handle. A thread that waits in `add` does not stop the other one from drawing.
        added = threading.Event()
        errors = []

        def feed_here(count: int) -> None:
            try:
                add(memory, count)
            except HoldallError as error:
                errors.append(error)
            added.set()

        adding = threading.Thread(target=feed_here, args=(1_500,))
        adding.start()
        while not added.is_set() or memory.waiting_rows:
            memory.update_priorities(memory.sample(100).ids, np.ones(100))
        adding.join()
        assert (len(memory), errors) == (3_548, [])
        # Nor from saving and closing.
        adding = threading.Thread(target=feed_here, args=(10**9,))
        adding.start()
        wait_until(lambda: memory._is_waiting)
        assert memory.save(tmp_path).result().transitions >= 3_548
    adding.join()
    assert isinstance(errors[0], ClosedError)

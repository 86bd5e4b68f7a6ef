"""Threads add, draw, gather, report and close at once: no row is torn or wrong, and no thread waits for ever.

Every field of a transition is computed from its id, so the tests notice rows that are torn, mixed or of another id.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import Batch, ClosedError, ReplayMemory, TransitionIdError
from holdall.store.tuning import Tuning
from holdall.testing.strategies import box

LANES = 2
SECONDS = 1.0 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 0.4
PATIENCE_S = 60
STACK = 4
FRAME = (24, 60)
SPACES: dict[str, spaces.Space[Any]] = {
    "vector": box((6,), "i8"),
    "stack": box((STACK, *FRAME), "i4"),
    "dict": spaces.Dict(state=box((6,), "i8"), stack=box((STACK, *FRAME), "i4"), rows=box((90, 3), "i4")),
}


def make_observation(space: spaces.Space[Any], ticks: NDArray[np.int64], lanes: NDArray[np.int64]) -> Any:
    """Return the observations of the given ticks and lanes. Every frame is computed from its tick and lane."""
    if isinstance(space, spaces.Dict):
        return {key: make_observation(child, ticks, lanes) for key, child in space.spaces.items()}
    assert isinstance(space, spaces.Box)
    count = 1 if space.dtype == np.int64 else space.shape[0]
    # The shape is (batch, count). The window moves by one frame in each tick.
    stamps = (ticks[:, None] + np.arange(count)) * LANES + lanes[:, None]
    shape = (len(ticks), count, *[1] * (len(space.shape) - 1))
    full = (len(ticks), *space.shape)
    return np.broadcast_to(stamps[:, :1] if count == 1 else stamps.reshape(shape), full).astype(space.dtype)


def make_tick(space: spaces.Space[Any], tick: int) -> dict[str, Any]:
    ticks = np.full(LANES, tick)
    lanes = np.arange(LANES)
    ids = ticks * LANES + lanes
    return {
        "obs": make_observation(space, ticks, lanes),
        "action": ids.copy(),
        "reward": ids.astype("f8"),
        "next_obs": make_observation(space, ticks + (7 if tick % 11 == 0 else 1), lanes),
        "terminated": ids % 3 == 0,
        "truncated": ids % 5 == 0,
    }


def assert_consistent(batch: Batch, space: spaces.Space[Any]) -> None:
    """Check that every row is the row of its own id, in every field and byte."""
    ids = np.asarray(batch.ids)
    ticks, lanes = np.divmod(ids, LANES)
    following = ticks + np.where(ticks % 11 == 0, 7, 1)
    expected = [
        (batch.obs, make_observation(space, ticks, lanes)),
        (batch.next_obs, make_observation(space, following, lanes)),
        (batch.action, ids),
        (batch.reward, ids.astype("f8")),
        (batch.terminated, ids % 3 == 0),
        (batch.truncated, ids % 5 == 0),
    ]
    for got, want in expected:
        for key in want if isinstance(want, dict) else [None]:
            left, right = (got, want) if key is None else (got[key], want[key])
            assert np.array_equal(np.asarray(left), right)


class Crowd:
    """Threads that repeat their work until the time is over and each one had a turn, or until one of them fails."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self.threads: list[threading.Thread] = []

    def repeat(self, name: str, work: Callable[[], object]) -> None:
        def loop() -> None:
            try:
                while not self.stop.is_set():
                    work()
                    self.rounds[name] = self.rounds.get(name, 0) + 1
            except ClosedError:
                pass
            except BaseException as error:
                self.failures.append(error)
                self.stop.set()

        self.threads.append(threading.Thread(target=loop, name=name, daemon=True))

    def run(self, seconds: float) -> None:
        for thread in self.threads:
            thread.start()
        self.stop.wait(seconds)
        end = time.monotonic() + PATIENCE_S
        while len(self.rounds) < len(self.threads) and not self.stop.wait(0.01):
            assert time.monotonic() < end, f"only {sorted(self.rounds)} had a turn"
        self.stop.set()
        self.join()

    def join(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not [thread.name for thread in self.threads if thread.is_alive()], "these threads did not end"
        for failure in self.failures:
            raise failure


class Users:
    """What the threads do with one memory."""

    def __init__(self, memory: ReplayMemory, space: spaces.Space[Any]) -> None:
        self.memory = memory
        self.space = space
        self.tick = 0

    def add(self) -> None:
        """Add a tick. Only one thread may call this, because the data is computed from the next id."""
        self.memory.add(**make_tick(self.space, self.tick))
        self.tick += 1

    def sample(self) -> None:
        assert_consistent(self.memory.sample(64), self.space)

    def gather(self) -> None:
        first = self.memory.first_id
        following = self.memory.next_id
        ids = np.random.default_rng(following).integers(first, following, 50)
        try:
            batch = self.memory.gather(ids)
        except TransitionIdError:
            return  # Some ids were evicted meanwhile.
        assert batch.ids.tolist() == ids.tolist()
        assert_consistent(batch, self.space)

    def report(self) -> None:
        report = self.memory.report()
        assert report.total_bytes > 0
        assert 0 < report.transitions <= self.memory.capacity
        assert str(report)

    def count(self) -> None:
        held = len(self.memory)
        first = self.memory.first_id
        following = self.memory.next_id
        assert 0 < held <= self.memory.capacity
        assert 0 <= first <= following


SMALL = Tuning(block_bytes=1, min_segment_ticks=4, bytes_per_thread=10_000)
"""Segments are closed every few ticks, and threads share small batches."""


def make_users(space: spaces.Space[Any], capacity_ticks: int = 60, **options: Any) -> Users:
    memory = ReplayMemory(
        space, spaces.Discrete(2**40), capacity_ticks * LANES, LANES, seed=0, _tuning=SMALL, **options
    )
    users = Users(memory, space)
    for _ in range(capacity_ticks + 5):
        users.add()
    return users


OPTIONS: dict[str, dict[str, Any]] = {"raw": {}, "tensors": {"device": "cpu"}, "compressed": {"budget": None}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SPACES)
def test_rows_drawn_while_others_are_added_are_whole_and_right(name: str, options: dict[str, Any]) -> None:
    """Meanwhile segments are closed, compressed and evicted, and logs grow."""
    users = make_users(SPACES[name], **options)
    crowd = Crowd()
    for work in (users.add, users.sample, users.sample, users.gather, users.report, users.count):
        crowd.repeat(f"{work.__name__} {len(crowd.threads)}", work)
    crowd.run(SECONDS / 2)
    assert users.tick > 70
    assert all(crowd.rounds.values())
    users.memory.close()


@pytest.mark.parametrize("budget", ["auto", None])
def test_batches_that_several_threads_fill_are_whole_and_right(budget: str | None) -> None:
    """Several threads draw large batches at once, and several helpers fill each of them."""
    users = make_users(SPACES["stack"], capacity_ticks=400, budget=budget)
    crowd = Crowd()

    def large() -> None:
        assert_consistent(users.memory.sample(300), users.space)

    for number in range(3):
        crowd.repeat(f"large {number}", large)
    crowd.repeat("add", users.add)
    crowd.run(SECONDS)
    assert len(crowd.rounds) == 4
    users.memory.close()


@pytest.mark.parametrize("name", SPACES)
def test_close_ends_the_calls_of_other_threads_with_a_clear_error(name: str) -> None:
    """Calls after `close` raise ClosedError. Batches in the making are returned whole, and no thread hangs."""
    for number in range(6):
        users = make_users(SPACES[name], capacity_ticks=200, budget=("auto", None)[number % 2])
        crowd = Crowd()

        def large(users: Users = users) -> None:
            assert_consistent(users.memory.sample(250), users.space)

        for work in (users.add, users.sample, users.gather, users.report, large):
            crowd.repeat(work.__name__, work)
        for thread in crowd.threads:
            thread.start()
        time.sleep(0.01 * number)
        closers = [threading.Thread(target=users.memory.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(PATIENCE_S)
            assert not closer.is_alive()
        crowd.join()
        with pytest.raises(ClosedError):
            len(users.memory)


def test_several_adders_lose_no_tick_and_tear_none() -> None:
    """Ticks are added in any order, but each one as a whole and exactly once."""
    space = SPACES["dict"]
    adders = 4
    each = 60
    memory = ReplayMemory(space, spaces.Discrete(2**40), 1000 * LANES, LANES, _tuning=SMALL)

    def add(adder: int) -> None:
        for number in range(each):
            memory.add(**make_tick(space, adder * 1000 + number))

    threads = [threading.Thread(target=add, args=(adder,)) for adder in range(adders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert memory.next_id == adders * each * LANES
    batch = memory.gather(np.arange(memory.next_id))
    stamps = np.asarray(batch.action)
    assert sorted(stamps // LANES) == sorted(
        tick for adder in range(adders) for tick in range(adder * 1000, adder * 1000 + each) for _ in range(LANES)
    )
    for adder in range(adders):
        mine = stamps[(stamps // LANES) // 1000 == adder]
        assert (np.diff(mine) > 0).all(), "the ticks of each adder are in the order of its calls"
    assert_consistent(Batch(**{**_list_fields(batch), "ids": stamps}), space)


def _list_fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__slots__}


def test_a_batch_that_a_thread_holds_does_not_change() -> None:
    """All threads share the staging. No thread gets memory that another thread still uses."""
    users = make_users(SPACES["stack"])
    crowd = Crowd()

    def hold() -> None:
        held = [users.memory.sample(64) for _ in range(6)]
        time.sleep(0.001)
        for batch in held:
            assert_consistent(batch, users.space)

    for number in range(3):
        crowd.repeat(f"hold {number}", hold)
    crowd.repeat("add", users.add)
    crowd.run(SECONDS)
    users.memory.close()


@pytest.mark.parametrize("name", ["stack", "vector"])
def test_readers_see_both_flags_of_a_set_flags_call_together(name: str) -> None:
    """No reader sees one old and one new flag of a transition."""
    space = SPACES[name]
    memory = ReplayMemory(space, spaces.Discrete(2**40), 20 * LANES, LANES, seed=0)
    for tick in range(20):
        memory.add(**{**make_tick(space, tick), "terminated": np.zeros(2, np.bool_), "truncated": np.ones(2, np.bool_)})
    ids = np.arange(40)
    crowd = Crowd()
    turn = [False]

    def flip() -> None:
        turn[0] = not turn[0]
        memory.set_flags(ids, np.full(40, turn[0]), np.full(40, not turn[0]))

    def look() -> None:
        batch = memory.sample(40)
        assert (batch.terminated != batch.truncated).all()
        assert len(set(batch.terminated.tolist())) == 1

    for work in (flip, look, look):
        crowd.repeat(f"{work.__name__} {len(crowd.threads)}", work)
    crowd.run(SECONDS / 2)
    memory.close()


@pytest.mark.parametrize("name", ["vector", "stack"])
def test_a_pickle_that_is_made_while_others_read_is_whole(name: str) -> None:
    """Calls that read do not change the pickle."""
    users = make_users(SPACES[name])
    crowd = Crowd()

    def copy_and_check() -> None:
        other = pickle.loads(pickle.dumps(users.memory))
        assert_consistent(other.gather(np.arange(other.first_id, other.next_id)), users.space)

    for work in (copy_and_check, users.sample, users.gather, users.report):
        crowd.repeat(work.__name__, work)
    crowd.run(SECONDS / 2)
    users.memory.close()

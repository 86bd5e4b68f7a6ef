"""Threads that add, draw, gather, report and close at once: no torn row, no wrong row, no deadlock.

Every transition says its id in every byte of it, so a row that is torn, mixed or another's is seen.
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


def observation(space: spaces.Space[Any], ticks: NDArray[np.int64], lanes: NDArray[np.int64]) -> Any:
    """Return the observations of the given ticks and lanes: every frame or row says its tick and lane."""
    if isinstance(space, spaces.Dict):
        return {key: observation(child, ticks, lanes) for key, child in space.spaces.items()}
    assert isinstance(space, spaces.Box)
    count = 1 if space.dtype == np.int64 else space.shape[0]
    stamps = (ticks[:, None] + np.arange(count)) * LANES + lanes[:, None]  # (batch, count): slides by one a tick
    shape = (len(ticks), count, *[1] * (len(space.shape) - 1))
    full = (len(ticks), *space.shape)
    return np.broadcast_to(stamps[:, :1] if count == 1 else stamps.reshape(shape), full).astype(space.dtype)


def tick_of(space: spaces.Space[Any], tick: int) -> dict[str, Any]:
    ticks = np.full(LANES, tick)
    lanes = np.arange(LANES)
    ids = ticks * LANES + lanes
    return {
        "obs": observation(space, ticks, lanes),
        "action": ids.copy(),
        "reward": ids.astype("f8"),
        "next_obs": observation(space, ticks + (7 if tick % 11 == 0 else 1), lanes),
        "terminated": ids % 3 == 0,
        "truncated": ids % 5 == 0,
    }


def assert_consistent(batch: Batch, space: spaces.Space[Any]) -> None:
    """Every row is the row of its own id, in every field and byte."""
    ids = np.asarray(batch.ids)
    ticks, lanes = np.divmod(ids, LANES)
    following = ticks + np.where(ticks % 11 == 0, 7, 1)
    expected = [
        (batch.obs, observation(space, ticks, lanes)),
        (batch.next_obs, observation(space, following, lanes)),
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
    """Threads that each repeat one piece of work until the time is over, and all had a turn, or one of them fails."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.failures: list[BaseException] = []
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []

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

        self._threads.append(threading.Thread(target=loop, name=name, daemon=True))

    def run(self, seconds: float) -> None:
        for thread in self._threads:
            thread.start()
        self.stop.wait(seconds)
        end = time.monotonic() + PATIENCE_S
        while len(self.rounds) < len(self._threads) and not self.stop.wait(0.01):
            assert time.monotonic() < end, f"only {sorted(self.rounds)} had a turn"
        self.stop.set()
        self.join()

    def join(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not [thread.name for thread in self._threads if thread.is_alive()], "these never came back"
        for failure in self.failures:
            raise failure


class Users:
    """What the threads do with one memory."""

    def __init__(self, memory: ReplayMemory, space: spaces.Space[Any]) -> None:
        self.memory = memory
        self.space = space
        self.tick = 0

    def add(self) -> None:
        """Only one thread adds: the next id has to be known to be written into the data."""
        self.memory.add(**tick_of(self.space, self.tick))
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
            return  # evicted in the meantime
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


def users_of(space: spaces.Space[Any], capacity_ticks: int = 60, **options: Any) -> Users:
    memory = ReplayMemory(
        space, spaces.Discrete(2**40), capacity_ticks * LANES, LANES, seed=0, _tuning=SMALL, **options
    )
    users = Users(memory, space)
    for _ in range(capacity_ticks + 5):
        users.add()
    return users


OPTIONS: dict[str, dict[str, Any]] = {"raw": {}, "tensors": {"device": "cpu"}, "sealing": {"budget": None}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SPACES)
def test_rows_drawn_while_others_are_added_are_whole_and_right(name: str, options: dict[str, Any]) -> None:
    """Adding evicts, closes and compresses segments and grows logs under the readers. No row suffers from it."""
    users = users_of(SPACES[name], **options)
    crowd = Crowd()
    for work in (users.add, users.sample, users.sample, users.gather, users.report, users.count):
        crowd.repeat(f"{work.__name__} {len(crowd._threads)}", work)
    crowd.run(SECONDS / 2)
    assert users.tick > 70
    assert all(crowd.rounds.values())
    users.memory.close()


@pytest.mark.parametrize("budget", ["auto", None])
def test_batches_shared_out_to_a_crew_are_whole_and_right(budget: str | None) -> None:
    """Large batches are filled by several threads each, in several threads at once."""
    users = users_of(SPACES["stack"], capacity_ticks=400, budget=budget)
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
def test_closing_beside_all_others_ends_them_and_nothing_else(name: str) -> None:
    """Whoever comes after close is told so. Batches on their way arrive, and no thread hangs."""
    for number in range(6):
        users = users_of(SPACES[name], capacity_ticks=200, budget=("auto", None)[number % 2])
        crowd = Crowd()

        def large(users: Users = users) -> None:
            assert_consistent(users.memory.sample(250), users.space)

        for work in (users.add, users.sample, users.gather, users.report, large):
            crowd.repeat(work.__name__, work)
        for thread in crowd._threads:
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
    """Whole ticks are added one after another, in whatever order. All of them are there, once."""
    space = SPACES["dict"]
    adders = 4
    each = 60
    memory = ReplayMemory(space, spaces.Discrete(2**40), 1000 * LANES, LANES, _tuning=SMALL)

    def add(adder: int) -> None:
        for number in range(each):
            memory.add(**tick_of(space, adder * 1000 + number))

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
        assert (np.diff(mine) > 0).all(), "each adder's ticks stand in its own order"
    assert_consistent(Batch(**{**_fields(batch), "ids": stamps}), space)


def _fields(batch: Batch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in batch.__slots__}


def test_batches_held_in_threads_stay_as_they_were() -> None:
    """Staging is shared by all threads. No thread gets memory that another thread still holds."""
    users = users_of(SPACES["stack"])
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
def test_flags_set_beside_readers_are_seen_as_pairs(name: str) -> None:
    """Both flags of a transition change together: no reader sees one old and one new."""
    space = SPACES[name]
    memory = ReplayMemory(space, spaces.Discrete(2**40), 20 * LANES, LANES, seed=0)
    for tick in range(20):
        memory.add(**{**tick_of(space, tick), "terminated": np.zeros(2, np.bool_), "truncated": np.ones(2, np.bool_)})
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
        crowd.repeat(f"{work.__name__} {len(crowd._threads)}", work)
    crowd.run(SECONDS / 2)
    memory.close()


@pytest.mark.parametrize("name", ["vector", "stack"])
def test_a_pickle_made_beside_readers_is_whole(name: str) -> None:
    """Reading does not disturb a pickle."""
    users = users_of(SPACES[name])
    crowd = Crowd()

    def copied() -> None:
        other = pickle.loads(pickle.dumps(users.memory))
        assert_consistent(other.gather(np.arange(other.first_id, other.next_id)), users.space)

    for work in (copied, users.sample, users.gather, users.report):
        crowd.repeat(work.__name__, work)
    crowd.run(SECONDS / 2)
    users.memory.close()

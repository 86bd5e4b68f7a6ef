"""Shards that are killed, and those that come: nothing acknowledged is lost or doubled, and draws stay right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces
from numpy.typing import NDArray
from ray.actor import ActorHandle

from holdall import Prioritized, ShardError
from holdall.cluster import members
from holdall.cluster.ids import shards_of_ids
from holdall.cluster.messages import ShardCounters
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import MemoryHandle, ReplayMemory, attach

from .processes import handle_with, kill, process_of, wait_until

pytestmark = pytest.mark.usefixtures("cluster")

SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = spaces.Discrete(2)


def numbered(memory: Any, first: int, end: int, width: int = 3) -> None:
    """Add transitions whose reward tells which one they are."""
    row = np.zeros((1, width), np.float32)
    action = np.zeros(1, np.int64)
    no = np.zeros(1, np.bool_)
    for number in range(first, end):
        memory.add(row, action, np.array([number], np.float64), row, no, no)


def held(memory: ReplayMemory) -> list[int]:
    """Return which transitions are held, from all shards: one that is being restarted is waited for."""
    memory.flush()
    found: list[int] = []
    wait_until(lambda: len(memory._members.refresh()) == len(memory._members.numbers))
    for shard, counters in memory._members.refresh().items():
        rows = np.arange(counters.first_row, counters.next_row) + (shard << 48)
        found += memory.gather(rows).reward.astype(int).tolist()
    return sorted(found)


def all_answer(memory: MemoryHandle) -> bool:
    return len(memory._members.masses()) == len(memory._members.numbers)


def draw_often(memory: MemoryHandle) -> None:
    for _ in range(1_000):
        memory.sample(100)


def chi_square_p(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """Return how likely counts are that differ this much, by Wilson and Hilferty's approximation."""
    from math import erfc, sqrt

    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    normal = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / sqrt(2 / (9 * degrees))
    return erfc(normal / sqrt(2)) / 2


def drawn(memory: ReplayMemory, draws: int, transitions: int) -> NDArray[np.int64]:
    counts = np.zeros(transitions, np.int64)
    size = 2_048
    for _ in range(draws // size):
        counts += np.bincount(memory.sample(size).reward.astype(np.int64), minlength=transitions)
    return counts


@pytest.fixture(scope="module")
def durable(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMemory]:
    """A memory of two shards or more. Tests add numbers of their own, and may not rely on which shards there are."""
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path_factory.mktemp("url"), "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 80_000, shards=2, seed=1, **settings) as memory:
        yield memory


@pytest.fixture(scope="module")
def volatile(cluster: None) -> Iterator[ReplayMemory]:
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, seed=1, patience_s=60.0) as memory:
        yield memory


def test_nothing_acknowledged_is_lost_or_doubled_when_shards_are_killed(durable: ReplayMemory) -> None:
    before = held(durable)
    shards = durable._members.numbers
    for count in (1_000, 2_000, 3_000):
        numbered(durable, count - 1_000, count - 300)
        kill(process_of(durable._members.handle(shards[count // 1_000 % 2])))
        numbered(durable, count - 300, count)
        durable.flush()
        wait_until(lambda: all_answer(durable))
        assert held(durable) == sorted([*before, *range(count)])
    batch = durable.sample(500)
    assert set(shards_of_ids(batch.ids).tolist()) == set(shards)


@pytest.mark.parametrize("is_private_there", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_draws_go_on_without_a_shard_and_it_comes_back_as_another(
    is_private_there: bool, volatile: ReplayMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Ray does not say how an actor is, but fails the calls to it."""
    if not is_private_there:
        monkeypatch.delattr(ActorHandle, "_get_local_state")
    writer = volatile.writer()
    numbered(writer, 0, 2_000)
    writer.flush()
    before = volatile.sample(1_000)
    lost = 1
    kill(process_of(volatile._members.handle(lost)))
    batch = volatile.sample(1_000)
    assert set(shards_of_ids(batch.ids).tolist()) == {0}
    wait_until(lambda: all_answer(volatile))
    numbered(writer, 2_000, 6_000)
    writer.flush()
    wait_until(lambda: len(volatile) > 4_000)
    new = volatile.sample(2_000)
    assert set(shards_of_ids(new.ids).tolist()) == {0, 1}
    of_lost = [batch.ids[shards_of_ids(batch.ids) == lost] for batch in (before, new)]
    assert not np.intersect1d(*of_lost).size  # an id is never used again


@pytest.mark.parametrize("policy", [pytest.param("raise", marks=pytest.mark.nightly), "block"])
def test_a_loss_is_raised_or_waited_for_as_was_asked(policy: str, durable: ReplayMemory) -> None:
    learner = handle_with(durable, on_shard_loss=policy)
    numbered(learner, 30_000, 31_000)
    learner.sample(100)
    shards = learner._members.numbers
    kill(process_of(learner._members.handle(shards[0])))
    if policy == "raise":
        with pytest.raises(ShardError, match="on_shard_loss"):
            draw_often(learner)
        wait_until(lambda: all_answer(learner))
    assert set(shards_of_ids(learner.sample(500).ids).tolist()) == set(shards)


@pytest.mark.nightly  # by day chaos/test_draws.py has the same rule, over shards in one process
@pytest.mark.parametrize("prioritized", [False, True])
def test_draws_over_shards_are_as_likely_as_they_should_be_also_after_join_and_loss(prioritized: bool) -> None:
    transitions = 3_000
    draws = 200_000
    sampler = Prioritized(alpha=1.0, beta=1.0, floor=1e-6) if prioritized else None
    with ReplayMemory(SPACE, ACTION, 40_000, shards=3, sampler=sampler, seed=2, patience_s=60.0) as memory:
        numbered(memory, 0, transitions)
        priorities = np.random.default_rng(0).uniform(0.5, 4.0, transitions)

        def tell() -> None:
            memory.flush()
            for shard, counters in memory._members.refresh().items():
                ids = np.arange(counters.first_row, counters.next_row) + (shard << 48)
                if prioritized and len(ids):
                    memory.update_priorities(ids, priorities[memory.gather(ids).reward.astype(int)])
            memory.sample(transitions)  # Every shard then has reported its present counters.

        def check(present: NDArray[np.int64]) -> None:
            counts = drawn(memory, draws, transitions)
            share = priorities[present] if prioritized else np.ones(len(present))
            assert counts.sum() == counts[present].sum()
            assert chi_square_p(counts[present], counts.sum() * share / share.sum()) > 1e-4

        tell()
        check(np.arange(transitions))
        memory.add_shard()
        transitions = 4_500
        priorities = np.random.default_rng(1).uniform(0.5, 4.0, transitions)
        numbered(memory, 3_000, transitions)
        tell()
        check(np.arange(transitions))
        kill(process_of(memory._members.handle(0)))
        memory.sample(transitions // 4)
        wait_until(lambda: all_answer(memory))
        check(np.array(held(memory)))
        batch = memory.sample(1_000)
        if prioritized:
            told = priorities[batch.reward.astype(int)]
            assert np.allclose(batch.weights, told.min() / told, rtol=1e-4)
        else:
            assert (batch.weights == 1).all()


@pytest.mark.nightly
def test_adding_and_drawing_go_on_when_the_roster_is_killed(durable: ReplayMemory) -> None:
    numbered(durable, 22_000, 23_000)
    writer = durable.writer()
    before = len(durable)
    numbered(writer, 20_000, 20_100)
    writer.flush()
    kill(process_of(durable._fleet.roster))
    attach(durable.name, seed=0).close()  # who comes meanwhile waits
    numbered(writer, 20_100, 20_600)
    writer.flush()
    assert len(durable) == before + 600
    durable.sample(100)
    wait_until(lambda: bool(durable._members.refresh()) and durable.sample(1).ids.size == 1)
    added = durable.add_shard()
    late = durable.writer()
    numbered(late, 20_600, 21_600)
    late.flush()
    assert len(durable) == before + 1_600
    wait_until(lambda: added in set(shards_of_ids(durable.sample(500).ids).tolist()))


def test_what_a_shard_said_last_holds_also_if_its_life_has_a_lower_number() -> None:
    """A roster that was restarted more than once may give lower ones. Before, such a shard was never heard again."""
    shards = members.Members(None, 1.0, ClusterTuning())
    shards._members = {0: members._Member(None)}
    of = ShardCounters(900, 0, 5, 5, 5, 7, 0, 5.0)
    for counters in (of, of._replace(changes=6), of._replace(epoch=3, changes=1, mass=2.0)):
        shards.record(0, counters)
    assert shards.known[0].mass == 2.0
    shards.record(0, of._replace(epoch=3, changes=0, mass=1.0))  # calls may overtake each other
    assert shards.known[0].mass == 2.0


class Restarting:
    """The handle of a shard that Ray restarts: questions that are asked meanwhile are answered late, or never."""

    def __init__(self) -> None:
        self.is_back = False
        self.asked: list[bool] = []
        wait: Any = ray.remote(num_cpus=0)(lambda: __import__("time").sleep(600))
        self.never = wait.remote()

    def _get_local_state(self) -> int:
        return 2 if self.is_back else 3

    @property
    def counters(self) -> Any:
        return self

    def remote(self) -> Any:
        self.asked.append(self.is_back)
        return ray.put(ShardCounters(1, 0, 5, 5, 5, 0, 0, 5.0)) if self.is_back else self.never


def test_a_shard_that_is_back_is_asked_again_whatever_became_of_questions_before() -> None:
    handle = Restarting()
    member = members._Member(handle, is_lost=True)
    shards = members.Members(None, 1.0, ClusterTuning(probe_s=-1.0, max_probes=1))
    shards._members = {0: member}
    shards._read_probes(0, member)
    assert handle.asked == [False]
    shards._read_probes(0, member)
    assert (handle.asked, len(member.probes)) == ([False, False], 1)  # none waits for another, and they are few
    handle.is_back = True

    def answers() -> bool:
        shards._read_probes(0, member)
        return not member.is_lost

    wait_until(answers)
    assert handle.asked[-1]
    assert not member.probes  # what fails later was asked before
    ray.cancel(handle.never, force=True)

"""Shards that are killed and shards that are added: nothing acknowledged is lost or held twice, and draws continue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces
from ray.actor import ActorHandle

from holdall import ShardError
from holdall.cluster import members
from holdall.cluster.ids import shards_of_ids
from holdall.cluster.messages import ShardCounters
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import MemoryHandle, ReplayMemory, attach

from .processes import find_process, kill, make_handle, wait_until

pytestmark = pytest.mark.usefixtures("cluster")

SPACE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = spaces.Discrete(2)


def add_numbered(memory: Any, first: int, end: int, width: int = 3) -> None:
    """Add transitions whose rewards are their numbers."""
    row = np.zeros((1, width), np.float32)
    action = np.zeros(1, np.int64)
    no = np.zeros(1, np.bool_)
    for number in range(first, end):
        memory.add(row, action, np.array([number], np.float64), row, no, no)


def read_numbers(memory: ReplayMemory) -> list[int]:
    """Return the numbers of all held transitions. Wait for shards that Ray is restarting."""
    memory.flush()
    found: list[int] = []
    wait_until(lambda: len(memory._members.refresh()) == len(memory._members.numbers))
    for shard, counters in memory._members.refresh().items():
        rows = np.arange(counters.first_row, counters.next_row) + (shard << 48)
        found += memory.gather(rows).reward.astype(int).tolist()
    return sorted(found)


def do_all_answer(memory: MemoryHandle) -> bool:
    return len(memory._members.masses()) == len(memory._members.numbers)


def draw_often(memory: MemoryHandle) -> None:
    for _ in range(1_000):
        memory.sample(100)


@pytest.fixture(scope="module")
def durable(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMemory]:
    """A memory of two shards or more. Tests add their own numbers, and must not rely on the number of shards."""
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path_factory.mktemp("url"), "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 80_000, shards=2, seed=1, **settings) as memory:
        yield memory


@pytest.fixture(scope="module")
def volatile(cluster: None) -> Iterator[ReplayMemory]:
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, seed=1, patience_s=60.0) as memory:
        yield memory


def test_killed_shards_lose_and_double_nothing_that_was_acknowledged(durable: ReplayMemory) -> None:
    before = read_numbers(durable)
    shards = durable._members.numbers
    for count in (1_000, 2_000, 3_000):
        add_numbered(durable, count - 1_000, count - 300)
        kill(find_process(durable._members.handle(shards[count // 1_000 % 2])))
        add_numbered(durable, count - 300, count)
        durable.flush()
        wait_until(lambda: do_all_answer(durable))
        assert read_numbers(durable) == sorted([*before, *range(count)])
    batch = durable.sample(500)
    assert set(shards_of_ids(batch.ids).tolist()) == set(shards)


@pytest.mark.parametrize("reports_state", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_draws_continue_without_a_lost_shard_and_its_ids_are_not_used_again(
    reports_state: bool, volatile: ReplayMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Ray does not report the state of an actor, and only fails the calls to it."""
    if not reports_state:
        monkeypatch.delattr(ActorHandle, "_get_local_state")
    writer = volatile.writer()
    add_numbered(writer, 0, 2_000)
    writer.flush()
    before = volatile.sample(1_000)
    lost = 1
    kill(find_process(volatile._members.handle(lost)))
    batch = volatile.sample(1_000)
    assert set(shards_of_ids(batch.ids).tolist()) == {0}
    wait_until(lambda: do_all_answer(volatile))
    add_numbered(writer, 2_000, 6_000)
    writer.flush()
    wait_until(lambda: len(volatile) > 4_000)
    new = volatile.sample(2_000)
    assert set(shards_of_ids(new.ids).tolist()) == {0, 1}
    of_lost = [batch.ids[shards_of_ids(batch.ids) == lost] for batch in (before, new)]
    assert not np.intersect1d(*of_lost).size  # No id names two transitions.


@pytest.mark.parametrize("policy", [pytest.param("raise", marks=pytest.mark.nightly), "block"])
def test_a_learner_raises_an_error_or_waits_for_a_lost_shard(policy: str, durable: ReplayMemory) -> None:
    learner = make_handle(durable, on_shard_loss=policy)
    add_numbered(learner, 30_000, 31_000)
    learner.sample(100)
    shards = learner._members.numbers
    kill(find_process(learner._members.handle(shards[0])))
    if policy == "raise":
        with pytest.raises(ShardError, match="on_shard_loss"):
            draw_often(learner)
        wait_until(lambda: do_all_answer(learner))
    assert set(shards_of_ids(learner.sample(500).ids).tolist()) == set(shards)


@pytest.mark.nightly
def test_adding_and_drawing_continue_when_the_roster_is_killed(durable: ReplayMemory) -> None:
    add_numbered(durable, 22_000, 23_000)
    writer = durable.writer()
    before = len(durable)
    add_numbered(writer, 20_000, 20_100)
    writer.flush()
    kill(find_process(durable._fleet.roster))
    attach(durable.name, seed=0).close()  # `attach` waits for the roster.
    add_numbered(writer, 20_100, 20_600)
    writer.flush()
    assert len(durable) == before + 600
    durable.sample(100)
    wait_until(lambda: bool(durable._members.refresh()) and durable.sample(1).ids.size == 1)
    added = durable.add_shard()
    late = durable.writer()
    add_numbered(late, 20_600, 21_600)
    late.flush()
    assert len(durable) == before + 1_600
    wait_until(lambda: added in set(shards_of_ids(durable.sample(500).ids).tolist()))


def test_counters_of_a_later_life_count_also_if_its_number_is_lower() -> None:
    """A roster that was restarted twice may give a lower number to a life."""
    shards = members.Members(None, 1.0, ClusterTuning())
    shards._members = {0: members._Member(None)}
    of = ShardCounters(900, 0, 5, 5, 5, 7, 0, 5.0)
    for counters in (of, of._replace(changes=6), of._replace(epoch=3, changes=1, mass=2.0)):
        shards.record(0, counters)
    assert shards.known[0].mass == 2.0
    shards.record(0, of._replace(epoch=3, changes=0, mass=1.0))  # Answers may overtake each other.
    assert shards.known[0].mass == 2.0


class Restarting:
    """The handle of a shard that Ray restarts. Questions that are asked meanwhile get no answer."""

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


def test_a_shard_that_is_back_is_asked_again_without_answers_to_earlier_questions() -> None:
    handle = Restarting()
    member = members._Member(handle, is_lost=True)
    shards = members.Members(None, 1.0, ClusterTuning(probe_s=-1.0, max_probes=1))
    shards._members = {0: member}
    shards._read_probes(0, member)
    assert handle.asked == [False]
    shards._read_probes(0, member)
    assert (handle.asked, len(member.probes)) == (
        [False, False],
        1,
    )  # A question does not wait for the one before. At most `max_probes` are kept.
    handle.is_back = True

    def answers() -> bool:
        shards._read_probes(0, member)
        return not member.is_lost

    wait_until(answers)
    assert handle.asked[-1]
    assert not member.probes  # If an earlier question fails later, it must not count.
    ray.cancel(handle.never, force=True)

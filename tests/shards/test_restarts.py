"""The roster and shards that are killed come back by themselves, whatever else is away and though nobody draws."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from holdall import CheckpointError, NStep, ShardError
from holdall.checkpoint.directory_blobs import DirectoryBlobs, FileSystem
from holdall.cluster.calls import get_result
from holdall.cluster.config import NAMESPACE
from holdall.cluster.journal import Entry, Journal
from holdall.cluster.members import Members
from holdall.cluster.messages import RestartedError
from holdall.cluster.shard import begin_life
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import ReplayMemory, attach

from .processes import kill, process_of, wait_until
from .test_losses import ACTION, SPACE, held, numbered

pytestmark = pytest.mark.usefixtures("cluster")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[ReplayMemory]:
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path / "journals", "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings) as memory:
        yield memory


@pytest.fixture(scope="module")
def lasting(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMemory]:
    """A memory of two shards or more, for tests that add numbers of their own and leave it in use."""
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path_factory.mktemp("url"), "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings) as memory:
        yield memory


def answers(actor: Any) -> bool:
    try:
        ray.get(actor.__ray_call__.remote(lambda _: None), timeout=1.0)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False
    return True


@pytest.mark.nightly  # in make test, test_losses.py kills a roster
def test_a_roster_that_was_restarted_knows_the_shards_though_nobody_draws(lasting: ReplayMemory) -> None:
    roster = lasting._fleet.roster
    before = held(lasting)
    known = ray.get(roster.shards.remote(-1))[1]
    kill(process_of(roster))
    wait_until(lambda: answers(roster))
    assert ray.get(roster.shards.remote(-1))[1].keys() == known.keys()
    with lasting.writer() as writer:
        numbered(writer, 0, 300)
    with attach(lasting.name) as handle:
        assert len(handle) == len(before) + 300
        handle.sample(10)
        kill(process_of(roster))
        added = lasting.add_shard()
        with handle.writer() as late:
            numbered(late, 300, 900)
        assert len(handle) == len(before) + 900
    assert ray.get(roster.shards.remote(-1))[1].keys() == known.keys() | {added}
    assert held(lasting) == sorted([*before, *range(900)])


@pytest.mark.nightly
def test_a_roster_that_was_restarted_gives_no_rank_again(lasting: ReplayMemory) -> None:
    """Two learners of one rank and seed would draw the same rows."""
    roster = lasting._fleet.roster
    ranks = [ray.get(roster.enroll.remote()) for _ in range(2)]
    kill(process_of(roster))
    wait_until(lambda: answers(roster))
    ranks += [ray.get(roster.enroll.remote()) for _ in range(2)]
    assert len(set(ranks)) == 4


@pytest.mark.nightly
def test_who_looks_for_the_shards_of_a_closed_memory_does_not_wait_for_its_roster(durable: ReplayMemory) -> None:
    """It never comes back, whatever the patience: a writer that is dropped later must not hold up its process."""
    roster = durable._fleet.roster
    shards = Members(roster, 3_600.0, ClusterTuning())
    durable.close()
    wait_until(lambda: not answers(roster))
    with pytest.raises(ShardError, match="Is the memory closed"):
        shards.refresh_list()


class DyingRoster:
    """Ends in its first life as soon as it is asked something, and answers in its second."""

    def begin_life(self, shard: int, first: int) -> tuple[int, float]:
        context = ray.get_runtime_context()
        if not context.was_current_actor_reconstructed:
            os._exit(1)
        return first + shard, 0.5


@pytest.mark.nightly
def test_a_shard_that_is_started_while_the_roster_is_away_waits_for_it() -> None:
    remote: Any = ray.remote
    made = remote(num_cpus=0, max_restarts=-1)(DyingRoster).options(name="dying", namespace=NAMESPACE)
    roster = made.remote()
    assert begin_life("dying", 3, 4, has_journal=True) == (7, 0.5)
    ray.kill(roster)
    wait_until(lambda: not answers(roster))
    assert begin_life("dying", 3, 4, has_journal=True) == (4, 0.0)  # the memory was closed: nobody hears of it


class FullDisk(FileSystem):
    """Has no room for some time."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def create(self, path: Path) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def test_a_shard_that_is_restarted_waits_for_a_disk_that_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(DirectoryBlobs(tmp_path), 0, ClusterTuning())
    list(journal.open())
    journal.append([Entry(bytes(16), 0, b"segment")], 0)
    with pytest.raises(CheckpointError, match="No space left"):  # one that is new says so at once
        list(Journal(DirectoryBlobs(tmp_path, FullDisk(1)), 0, ClusterTuning()).open())
    disk = FullDisk(2)
    with caplog.at_level(logging.WARNING, "holdall"):
        pages = list(Journal(DirectoryBlobs(tmp_path, disk), 0, ClusterTuning(retry_s=0.01)).open(retries=True))
    assert not disk.failures
    assert [page.entries[0].payload for page in pages if page.is_first][-1] == b"segment"
    assert "No space left" in caplog.text


@pytest.mark.nightly
def test_steps_of_a_loaded_checkpoint_still_follow_each_other_after_a_restart(tmp_path: Path) -> None:
    """The journal also knows whose steps the rows of the checkpoint were."""
    place = tmp_path / "saved"
    settings: dict[str, Any] = {"durability": "segment", "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, sampler=NStep(3, 1.0), patience_s=60.0) as memory:
        numbered(memory, 0, 300)
        memory.save(place).result()
    with ReplayMemory.load(place, journal_url=tmp_path / "journals", **settings) as loaded:
        assert len(loaded) == 300
    url = tmp_path / "journals"
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, sampler=NStep(3, 1.0), url=url, **settings) as again:
        returns = again.sample(256).reward
    assert (returns % 3 == 0).mean() > 0.9  # three numbers in a row, except for the last ones


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["memory", "segment"])
def test_a_shard_comes_back_whose_checkpoint_was_removed_since(durability: str, tmp_path: Path) -> None:
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, patience_s=60.0) as memory:
        numbered(memory, 0, 100)
        memory.save(tmp_path / "saved").result()
    settings: dict[str, Any] = {"journal_url": tmp_path / "journals"} if durability == "segment" else {}
    loaded = ReplayMemory.load(tmp_path / "saved", durability=durability, patience_s=60.0, **settings)
    with loaded as memory:
        numbered(memory, 100, 200)
        memory.save(tmp_path / "saved", keep=1).result()
        kill(process_of(memory._members.handle(0)))
        wait_until(lambda: bool(memory._members.refresh()))
        numbered(memory, 200, 300)
        assert held(memory) == list(range(0 if durability == "segment" else 200, 300))


@pytest.mark.nightly
def test_a_checkpoint_of_a_shard_that_was_restarted_meanwhile_is_refused(durable: ReplayMemory, tmp_path: Path) -> None:
    numbered(durable, 0, 300)
    durable.flush()
    shard = durable._members.handle(0)
    begun = get_result(shard.begin_save.remote(str(tmp_path / "shard")))
    kill(process_of(shard))
    wait_until(lambda: len(durable._members.refresh()) == 2)
    get_result(shard.begin_save.remote(str(tmp_path / "shard")))
    with pytest.raises(RestartedError, match="restarted"):
        get_result(shard.end_save.remote(begun))
    durable.save(tmp_path / "saved").result()
    assert np.array_equal(held(durable), np.arange(300))

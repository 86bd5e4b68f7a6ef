"""Ray restarts a roster and shards that are killed, also if other actors are away and nobody draws."""

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

from .processes import find_process, kill, wait_until
from .test_losses import ACTION, SPACE, add_numbered, read_numbers

pytestmark = pytest.mark.usefixtures("cluster")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[ReplayMemory]:
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path / "journals", "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings) as memory:
        yield memory


@pytest.fixture(scope="module")
def shared(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMemory]:
    """A memory of two shards or more. Tests add their own numbers."""
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path_factory.mktemp("url"), "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 40_000, shards=2, **settings) as memory:
        yield memory


def does_answer(actor: Any) -> bool:
    try:
        ray.get(actor.__ray_call__.remote(lambda _: None), timeout=1.0)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False
    return True


@pytest.mark.nightly  # in make test, test_losses.py kills a roster
def test_a_restarted_roster_finds_the_shards_without_a_draw(shared: ReplayMemory) -> None:
    roster = shared._fleet.roster
    before = read_numbers(shared)
    known = ray.get(roster.shards.remote(-1))[1]
    kill(find_process(roster))
    wait_until(lambda: does_answer(roster))
    assert ray.get(roster.shards.remote(-1))[1].keys() == known.keys()
    with shared.writer() as writer:
        add_numbered(writer, 0, 300)
    with attach(shared.name) as handle:
        assert len(handle) == len(before) + 300
        handle.sample(10)
        kill(find_process(roster))
        added = shared.add_shard()
        with handle.writer() as late:
            add_numbered(late, 300, 900)
        assert len(handle) == len(before) + 900
    assert ray.get(roster.shards.remote(-1))[1].keys() == known.keys() | {added}
    assert read_numbers(shared) == sorted([*before, *range(900)])


@pytest.mark.nightly
def test_a_restarted_roster_gives_no_rank_again(shared: ReplayMemory) -> None:
    """Two learners of one rank and seed would draw the same rows."""
    roster = shared._fleet.roster
    ranks = [ray.get(roster.enroll.remote()) for _ in range(2)]
    kill(find_process(roster))
    wait_until(lambda: does_answer(roster))
    ranks += [ray.get(roster.enroll.remote()) for _ in range(2)]
    assert len(set(ranks)) == 4


@pytest.mark.nightly
def test_a_process_does_not_wait_for_the_roster_of_a_closed_memory(durable: ReplayMemory) -> None:
    """The roster never comes back. A writer that is dropped later must not delay the end of its process."""
    roster = durable._fleet.roster
    shards = Members(roster, 3_600.0, ClusterTuning())
    durable.close()
    wait_until(lambda: not does_answer(roster))
    with pytest.raises(ShardError, match="Is the memory closed"):
        shards.refresh_list()


class DyingRoster:
    """A roster that ends at the first call, and answers after its restart."""

    def begin_life(self, shard: int, first: int) -> tuple[int, float]:
        context = ray.get_runtime_context()
        if not context.was_current_actor_reconstructed:
            os._exit(1)
        return first + shard, 0.5


@pytest.mark.nightly
def test_a_starting_shard_waits_for_a_roster_that_ray_restarts() -> None:
    remote: Any = ray.remote
    made = remote(num_cpus=0, max_restarts=-1)(DyingRoster).options(name="dying", namespace=NAMESPACE)
    roster = made.remote()
    assert begin_life("dying", 3, 4, has_journal=True) == (7, 0.5)
    ray.kill(roster)
    wait_until(lambda: not does_answer(roster))
    assert begin_life("dying", 3, 4, has_journal=True) == (4, 0.0)  # The memory was closed.


class FullDisk(FileSystem):
    """A disk that has no room for the first `failures` files."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def create(self, path: Path) -> Any:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def test_a_restarted_shard_waits_until_a_full_disk_has_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(DirectoryBlobs(tmp_path), 0, ClusterTuning())
    list(journal.open())
    journal.append([Entry(bytes(16), 0, b"segment")], 0)
    with pytest.raises(CheckpointError, match="No space left"):  # A new shard raises the error.
        list(Journal(DirectoryBlobs(tmp_path, FullDisk(1)), 0, ClusterTuning()).open())
    disk = FullDisk(2)
    with caplog.at_level(logging.WARNING, "holdall"):
        pages = list(Journal(DirectoryBlobs(tmp_path, disk), 0, ClusterTuning(retry_s=0.01)).open(retries=True))
    assert not disk.failures
    assert [page.entries[0].payload for page in pages if page.is_first][-1] == b"segment"
    assert "No space left" in caplog.text


@pytest.mark.nightly
def test_n_step_returns_over_a_loaded_checkpoint_are_the_same_after_a_restart(tmp_path: Path) -> None:
    """The journal has the writer and the tick of the checkpoint's rows."""
    place = tmp_path / "saved"
    settings: dict[str, Any] = {"durability": "segment", "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, sampler=NStep(3, 1.0), patience_s=60.0) as memory:
        add_numbered(memory, 0, 300)
        memory.save(place).result()
    with ReplayMemory.load(place, journal_url=tmp_path / "journals", **settings) as loaded:
        assert len(loaded) == 300
    url = tmp_path / "journals"
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, sampler=NStep(3, 1.0), url=url, **settings) as again:
        returns = again.sample(256).reward
    assert (returns % 3 == 0).mean() > 0.9  # The sum of three consecutive numbers, except at the end.


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["memory", "segment"])
def test_a_shard_restarts_after_its_checkpoint_was_removed(durability: str, tmp_path: Path) -> None:
    with ReplayMemory(SPACE, ACTION, 1_000, shards=1, patience_s=60.0) as memory:
        add_numbered(memory, 0, 100)
        memory.save(tmp_path / "saved").result()
    settings: dict[str, Any] = {"journal_url": tmp_path / "journals"} if durability == "segment" else {}
    loaded = ReplayMemory.load(tmp_path / "saved", durability=durability, patience_s=60.0, **settings)
    with loaded as memory:
        add_numbered(memory, 100, 200)
        memory.save(tmp_path / "saved", keep=1).result()
        kill(find_process(memory._members.handle(0)))
        wait_until(lambda: bool(memory._members.refresh()))
        add_numbered(memory, 200, 300)
        assert read_numbers(memory) == list(range(0 if durability == "segment" else 200, 300))


@pytest.mark.nightly
def test_a_save_fails_if_a_shard_was_restarted_meanwhile(durable: ReplayMemory, tmp_path: Path) -> None:
    add_numbered(durable, 0, 300)
    durable.flush()
    shard = durable._members.handle(0)
    begun = get_result(shard.begin_save.remote(str(tmp_path / "shard")))
    kill(find_process(shard))
    wait_until(lambda: len(durable._members.refresh()) == 2)
    get_result(shard.begin_save.remote(str(tmp_path / "shard")))
    with pytest.raises(RestartedError, match="restarted"):
        get_result(shard.end_save.remote(begun))
    durable.save(tmp_path / "saved").result()
    assert np.array_equal(read_numbers(durable), np.arange(300))

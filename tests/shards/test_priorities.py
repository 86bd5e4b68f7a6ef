"""Priorities over shards: new rows get the highest priority of all shards, and restarts keep priorities."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import Prioritized, TransitionIdError
from holdall.cluster.ids import first_row_of_life, make_ids
from holdall.cluster.journal import open_journal
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import ReplayMemory, attach

from .chaos.chi_square import chi_square_p
from .processes import find_process, kill, wait_until

pytestmark = pytest.mark.usefixtures("cluster")

SPACE = spaces.Box(-1, 1, (2,), np.float32)
ACTION = spaces.Discrete(2)


def add(memory: Any, first: int, end: int) -> None:
    """Add transitions whose rewards are their numbers."""
    count = end - first
    row = np.zeros((count, 1, 2), np.float32)
    no = np.zeros((count, 1), np.bool_)
    rewards = np.arange(first, end, dtype=np.float64)[:, None]
    memory.extend(row, np.zeros((count, 1), np.int64), rewards, row, no, no)
    memory.flush()


def read_held(memory: ReplayMemory) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of all held transitions, and their numbers."""
    counters = memory._members.refresh()
    ids = np.concatenate(
        [make_ids(n, np.arange(each.first_row, each.next_row)) for n, each in sorted(counters.items())]
    )
    return ids, memory.gather(ids).reward.astype(np.int64)


def count_draws(memory: Any, draws: int, most: int) -> NDArray[np.int64]:
    """Draw, and return how often each transition was drawn."""
    counts = np.zeros(most, np.int64)
    size = len(memory)
    for _ in range(-(-draws // size)):
        counts += np.bincount(memory.sample(size).reward.astype(int), minlength=most)
    return counts


@pytest.mark.nightly
def test_new_rows_get_the_highest_priority_of_all_shards() -> None:
    settings: dict[str, Any] = {"sampler": Prioritized(alpha=1.0, beta=1.0, floor=1e-6), "seed": 2, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 9_000, shards=3, **settings) as memory:
        add(memory, 0, 600)
        ids, numbers = read_held(memory)
        priorities = np.append(np.full(600, 1.0), np.full(600, 50.0))
        priorities[numbers[0]] = 50.0
        memory.update_priorities(ids[:1], np.array([50.0]))  # On one shard only.
        add(memory, 600, 1_200)
        number = memory.add_shard()
        kill(find_process(memory._members.handle(1)))
        memory.sample(32)
        wait_until(lambda: memory._members.refresh().get(1) is not None)
        end = 1_200
        while {0, 1, 2, number} != set((ids >> 48).tolist()):  # Also on the new shard and the restarted one.
            add(memory, end, end + 600)
            end += 600
            priorities = np.append(priorities, np.full(600, 50.0))
            ids, numbers = read_held(memory)
        counts = count_draws(memory, 200_000, end)
        # These rows are drawn too rarely to test them one by one.
        few = np.setdiff1d(numbers[numbers < 600], numbers[priorities[numbers] > 1])
        many = np.setdiff1d(numbers, few)
        chances = np.append(priorities[many], priorities[few].sum())
        assert chi_square_p(np.append(counts[many], counts[few].sum()), chances + 1e-6) > 0.001


@pytest.mark.nightly
def test_a_new_row_gets_a_priority_that_was_set_on_another_shard() -> None:
    settings: dict[str, Any] = {"sampler": Prioritized(alpha=1.0, beta=1.0, floor=1e-6), "seed": 2, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 9_000, shards=2, **settings) as memory:
        add(memory, 0, 256)
        ids, _ = read_held(memory)
        before = sum(memory._members.masses().values())
        memory.update_priorities(ids[:1], np.array([50.0]))
        add(memory, 256, 512)
        assert set((read_held(memory)[0] >> 48).tolist()) == {0, 1}
        after = before + 49.0 + 256 * 50.0
        assert np.isclose(sum(memory._members.masses().values()), after, atol=0.01)
        # Ids of another life of the shard name lost rows.
        memory.update_priorities(ids[:1] + np.int64(first_row_of_life(7)), np.array([9.0]))
        assert len(memory) == 512
        assert np.isclose(sum(memory._members.masses().values()), after, atol=0.01)
        with pytest.raises(TransitionIdError, match="no shard of this memory"):
            memory.update_priorities([make_ids(2, ids[0])], np.array([9.0]))


@pytest.mark.nightly
def test_a_learner_can_set_priorities_on_a_shard_that_was_added_later() -> None:
    settings: dict[str, Any] = {"sampler": Prioritized(alpha=1.0, beta=1.0, floor=1e-6), "seed": 2, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 9_000, shards=1, **settings) as memory:
        add(memory, 0, 256)
        with attach(memory.name, rank=0, seed=0) as learner:
            number = memory.add_shard()
            with memory.writer() as writer:  # A writer that begins now knows the new shard, and fills the emptier one.
                add(writer, 256, 512)
                add(writer, 512, 768)
            ids, _ = read_held(memory)
            there = ids[ids >> 48 == number]
            before = sum(memory._members.masses().values())
            learner.update_priorities(there[:1], np.array([0.5]))
            assert len(learner) == 768  # Waits until the shard has the priority.
        assert len(memory) == 768
        assert np.isclose(sum(memory._members.masses().values()), before - 0.5, atol=0.01)


def count_written_priorities(url: Path, shard: int) -> int:
    """Return the number of different priorities in a copy of a shard's journal."""
    with tempfile.TemporaryDirectory() as copy, suppress(shutil.Error, FileNotFoundError):
        shutil.copytree(url, copy, dirs_exist_ok=True)
        journal = open_journal(copy, shard, ClusterTuning())
        list(journal.open())
        if journal.priorities is not None:
            return int(np.count_nonzero(np.unique(journal.priorities["scaled"])))
    return 0


@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_priorities_survive_with_the_journals(is_killed: bool, tmp_path: Path) -> None:
    """After the memory was closed, and after all its processes were killed. New rows get the highest priority."""
    settings: dict[str, Any] = {"durability": "segment", "url": tmp_path, "shards": 2, "patience_s": 60.0}

    def sampler() -> Prioritized:
        return Prioritized(alpha=1.0, beta=1.0, floor=1e-6)

    priorities = np.random.default_rng(4).uniform(0.5, 4.0, 900)
    memory = ReplayMemory(SPACE, ACTION, 9_000, sampler=sampler(), seed=2, **settings)
    add(memory, 0, 600)
    ids, numbers = read_held(memory)
    memory.update_priorities(ids, priorities[numbers])
    len(memory)  # Waits until the shards have the priorities.
    if is_killed:
        wait_until(lambda: sum(count_written_priorities(tmp_path, shard) for shard in (0, 1)) >= 600)
        for actor in (*[memory._members.handle(number) for number in memory._members.numbers], memory._fleet.roster):
            ray.kill(actor)
    else:
        memory.close()
    with ReplayMemory(SPACE, ACTION, 9_000, sampler=sampler(), seed=3, **settings) as again:
        assert len(again) == 600
        add(again, 600, 900)
        chances = np.append(priorities[:600], np.full(300, priorities[:600].max())) + 1e-6
        assert chi_square_p(count_draws(again, 200_000 if is_killed else 120_000, 900), chances) > 0.001

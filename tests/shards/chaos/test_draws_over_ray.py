"""A million draws from four shards over Ray, uniform and prioritized, also after a fifth joins and one is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import Prioritized
from holdall.cluster.ids import make_ids
from holdall.ray import ReplayMemory

from ..processes import find_process, wait_until
from .chi_square import chi_square_p

pytestmark = pytest.mark.usefixtures("cluster")

SPACE = spaces.Box(-1, 1, (2,), np.float32)
ACTION = spaces.Discrete(2)
DRAWS = 1_000_000


def add(memory: ReplayMemory, first: int, end: int) -> None:
    """Add transitions whose rewards are their numbers."""
    count = end - first
    row = np.zeros((count, 1, 2), np.float32)
    no = np.zeros((count, 1), np.bool_)
    rewards = np.arange(first, end, dtype=np.float64)[:, None]
    memory.extend(row, np.zeros((count, 1), np.int64), rewards, row, no, no)
    memory.flush()


def list_held_ids(memory: ReplayMemory) -> dict[int, NDArray[np.int64]]:
    """Return the ids of all held rows, by shard."""
    counters_by_shard = memory._members.refresh()
    rows = {shard: np.arange(each.first_row, each.next_row) for shard, each in counters_by_shard.items()}
    return {shard: make_ids(shard, each) for shard, each in rows.items()}


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_million_draws_have_the_right_probabilities_and_weights(prioritized: bool) -> None:
    sampler = Prioritized(alpha=1.0, beta=1.0, floor=1e-6) if prioritized else None
    generator = np.random.default_rng(4)
    priorities = generator.uniform(0.5, 4.0, 5_000)
    settings: dict[str, Any] = {"shards": 4, "sampler": sampler, "seed": 2, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 100_000, **settings) as memory:
        for change, end in (("none", 3_000), ("one joined", 4_000), ("one lost", 4_000)):
            if change == "one joined":
                memory.add_shard()
            if change == "one lost":
                psutil.Process(find_process(memory._members.handle(1))).kill()
                memory.sample(64)
                wait_until(lambda: not memory._members.masses().get(1), 60.0)
            else:
                add(memory, end - 1_000 if change == "one joined" else 0, end)
            held = list_held_ids(memory)
            rows = {shard: memory.gather(ids).reward.astype(np.int64) for shard, ids in held.items() if len(ids)}
            if prioritized:
                for shard, numbers in rows.items():
                    memory.update_priorities(held[shard], priorities[numbers])
            numbers = np.concatenate(list(rows.values()))
            counts = np.zeros(5_000, np.int64)
            size = len(numbers)
            for _ in range(DRAWS // size + 1):
                counts += np.bincount(memory.sample(size).reward.astype(int), minlength=5_000)
            assert counts.sum() == counts[numbers].sum(), change
            chances = priorities[numbers] if prioritized else np.ones(len(numbers))
            assert chi_square_p(counts[numbers], chances) > 0.001, change
            batch = memory.sample(1_000)
            drawn = priorities[batch.reward.astype(int)] if prioritized else np.ones(1_000)
            assert np.allclose(batch.weights, drawn.min() / drawn, rtol=1e-4), change

"""Several learners of one memory, each with a handle and a generator of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import ray
from gymnasium import spaces

import holdall.ray
from holdall import ArgumentError, Prioritized, ShardError
from holdall.ray import MemoryHandle, ReplayMemory
from holdall.testing import assert_same_bits

from .chaos.chi_square import chi_square_p
from .test_priorities import add, count_draws

pytestmark = pytest.mark.usefixtures("cluster")
# Workers cannot import the tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPACE = spaces.Box(-1, 1, (2,), np.float32)
ACTION = spaces.Discrete(2)


@ray.remote(num_cpus=0)
def learn(name: str, rank: int, batches: int) -> list[Any]:
    with holdall.ray.attach(name, rank=rank, seed=7) as memory:
        return [memory.sample(64) for _ in range(batches)]


@ray.remote(num_cpus=0)
def use(memory: MemoryHandle) -> tuple[int, int]:
    """Add, draw and set priorities with a handle that was an argument of a call."""
    with memory:
        row = np.zeros((40, 1, 2), np.float32)
        no = np.zeros((40, 1), np.bool_)
        memory.extend(row, np.zeros((40, 1), np.int64), np.full((40, 1), 5.0), row, no, no)
        batch = memory.sample(32)
        memory.update_priorities(batch.ids, np.ones(32))
        return len(memory), memory.num_shards


def test_learners_attach_by_name_and_draw_different_rows() -> None:
    settings: dict[str, Any] = {"sampler": Prioritized(), "seed": 2, "patience_s": 60.0}
    with ReplayMemory(SPACE, ACTION, 9_000, shards=2, name="several learners", **settings) as memory:
        add(memory, 0, 3_000)
        with pytest.raises(ArgumentError, match="name"):
            ReplayMemory(SPACE, ACTION, 100, shards=1, name="several learners")
        first, second = ray.get([learn.remote(memory.name, rank, 4) for rank in (0, 1)])
        again = ray.get(learn.remote(memory.name, 0, 4))
        for one, other, same in zip(first, second, again, strict=True):
            assert_same_bits(same, one)  # One rank and seed draw the same rows.
            assert np.intersect1d(one.ids, other.ids).size < 12
        assert len({batch.ids.tobytes() for batch in first}) == 4
        assert ray.get(use.remote(memory)) == (3_040, 2)
        assert len(memory) == 3_040
        copy = pickle.loads(pickle.dumps(memory))
        assert type(copy) is MemoryHandle
        copy.close()
        assert len(memory) == 3_040  # Closing a handle does not end the memory.
        assert not hasattr(copy, "add_shard")
    with pytest.raises(ShardError, match="no memory named"):
        holdall.ray.attach("several learners")


@pytest.mark.nightly
def test_every_learner_draws_all_rows_with_the_same_probability() -> None:
    with ReplayMemory(SPACE, ACTION, 9_000, shards=3, seed=2, patience_s=60.0) as memory:
        add(memory, 0, 2_000)
        for rank in range(2):
            with holdall.ray.attach(memory.name, rank=rank, seed=7) as learner:
                assert chi_square_p(count_draws(learner, 200_000, 2_000), np.ones(2_000)) > 0.001


PROGRAM = """
import sys
import holdall.ray
with holdall.ray.attach(sys.argv[1], address=sys.argv[2]) as memory:
    print(len(memory), len(memory.sample(32)))
"""


@pytest.mark.nightly
def test_a_program_outside_of_the_cluster_can_attach() -> None:
    with ReplayMemory(SPACE, ACTION, 2_000, shards=1, seed=2, patience_s=60.0) as memory:
        add(memory, 0, 300)
        head = ray.get_runtime_context().gcs_address
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, memory.name, head], capture_output=True, text=True, check=True
        )
    assert ran.stdout.split() == ["300", "32"]

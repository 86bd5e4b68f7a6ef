"""A memory over shards with another version of Ray: `python tests/shards/other_ray.py VERSION`.

A writer in another process adds steps, a shard is killed, batches are drawn, and a checkpoint is loaded.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import numpy as np
import psutil
import ray
from gymnasium import spaces

import holdall
from holdall.ray import ReplayMemory, Writer

COUNT = 1_000


def make_steps(first: int, end: int) -> tuple[Any, ...]:
    """Return the arguments of `extend`. The reward of a step is its number."""
    numbers = np.arange(first, end, dtype=np.float32)[:, None]
    frames = np.zeros((end - first, 1, 20, 20), np.uint8)
    no = np.zeros((end - first, 1), np.bool_)
    frames[:] = numbers[..., None, None] % 251
    return frames, no.astype(np.int64), numbers, frames, no, no


def feed(writer: Writer, first: int, end: int) -> None:
    """Add steps, and end without a flush."""
    writer.extend(*make_steps(first, end))


def read_numbers(memory: Any) -> list[int]:
    """Check the frames of all held steps, and return their numbers."""
    memory.flush()
    found: list[int] = []
    for shard, counters in memory._members.refresh().items():
        batch = memory.gather(np.arange(counters.first_row, counters.next_row) + (shard << 48))
        assert (batch.obs == (batch.reward % 251).astype(np.uint8)[:, None, None]).all()
        found += batch.reward.astype(int).tolist()
    return sorted(found)


def main() -> None:
    """Run all steps of the test."""
    assert ray.__version__ == sys.argv[1], ray.__version__
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=128 * 2**20, _node_ip_address="127.0.0.1")
    space = spaces.Box(0, 255, (20, 20), np.uint8)
    action = spaces.Discrete(2)
    remote: Any = ray.remote(num_cpus=0)(feed)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"durability": "segment", "url": f"{folder}/journals", "patience_s": 90.0}
        with ReplayMemory(space, action, 10_000, shards=2, seed=0, **settings) as memory:
            ray.get(remote.remote(memory.writer(), 0, COUNT))
            shard = memory._members.handle(1)
            psutil.Process(ray.get(shard.__ray_call__.remote(lambda _: os.getpid()))).kill()
            memory.extend(*make_steps(COUNT, 2 * COUNT))
            memory.flush()
            memory.sample(256)
            while len(memory._members.refresh()) < 2:
                pass
            assert read_numbers(memory) == list(range(2 * COUNT))
            memory.save(f"{folder}/saved").result()
        assert len(holdall.ReplayMemory.load(f"{folder}/saved")) == 2 * COUNT
    ray.shutdown()


if __name__ == "__main__":
    main()

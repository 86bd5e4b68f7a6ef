"""A memory whose journals are in an object store. Shards are killed under load, and one is overtaken by another shard.

This is a script, because shards have the credentials of their Ray cluster. It prints the numbers of the steps that were
acknowledged and of the steps that are held.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
import ray
from gymnasium import spaces

from holdall.cluster.journal import open_journal
from holdall.cluster.messages import InsertRequest
from holdall.cluster.tuning import ClusterTuning
from holdall.ray import ReplayMemory

PATIENCE_S = 60.0


def add(memory: ReplayMemory, first: int, end: int) -> None:
    row = np.zeros((1, 3), np.float32)
    action = np.zeros(1, np.int64)
    no = np.zeros(1, np.bool_)
    for number in range(first, end):
        memory.add(row, action, np.array([number], np.float64), row, no, no)


def list_held_numbers(memory: ReplayMemory) -> list[int]:
    memory.flush()
    found: list[int] = []
    until = time.monotonic() + PATIENCE_S
    while len(counters_by_shard := memory._members.refresh()) < memory.num_shards and time.monotonic() < until:
        time.sleep(0.2)
    for shard, counters in counters_by_shard.items():
        rows = np.arange(counters.first_row, counters.next_row) + (shard << 48)
        found += memory.gather(rows).reward.astype(int).tolist()
    return sorted(found)


def get_pid(shard: Any) -> int:
    return int(ray.get(shard.__ray_call__.remote(lambda _: os.getpid())))


def main(url: str) -> None:
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=128 * 2**20, log_to_driver=False)
    settings: dict[str, Any] = {"shards": 2, "durability": "segment", "url": url, "patience_s": PATIENCE_S}
    space = spaces.Box(-1, 1, (3,), np.float32)
    action = spaces.Discrete(2)
    results: dict[str, Any] = {"kills": 0}
    count = 0
    block = 1_000
    with ReplayMemory(space, action, 40_000, **settings) as memory:
        epochs = []
        for turn in range(3):
            add(memory, count, count + block // 2)
            shard = memory._members.handle(turn % 2)
            epochs.append(memory._members.refresh()[0].epoch)
            # The shard dies while blocks are written to the store.
            killer = threading.Timer(0.05 * turn, psutil.Process(get_pid(shard)).kill)
            killer.start()
            add(memory, count + block // 2, count + block)
            memory.flush()
            killer.join()
            results["kills"] += 1
            count += block
        results["acknowledged"] = count
        results["held"] = list_held_numbers(memory)
        results["epochs"] = sorted({*epochs, memory._members.refresh()[0].epoch})
        # The journal is opened by another shard, so a late write of the first shard must be refused.
        zombie = memory._members.handle(1)
        pages = list(open_journal(url, 1, ClusterTuning()).open())
        payload = pages[0].entries[0].payload
        try:
            request = InsertRequest(b"z" * 16, 0, [payload])
            results["zombie"] = f"accepted: {ray.get(zombie.insert.remote(request), timeout=PATIENCE_S)}"
        except ray.exceptions.RayTaskError as error:
            results["zombie"] = str(error.cause)
    with ReplayMemory(space, action, 40_000, **settings) as memory:
        results["again"] = list_held_numbers(memory)
    ray.shutdown()
    print(json.dumps(results))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])

"""The cases of `ray_replay.py` with losses: seconds without a batch, and seconds until all shards are drawn from.

`kill` kills one shard after another with SIGKILL while batches are drawn. The shards have journals. `machines` loses,
freezes and cuts off a machine of a small cluster. It runs tests/shards/chaos/story.py, which also checks every bit and
every acknowledgement.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ray_sides import BATCH, HoldallSide, Recording, process_of

from holdall.cluster.ids import shards_of_ids

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 4
BLOCK = 64


def kill(recording: Recording, rounds: int) -> dict[str, Any]:
    """Kill one shard after another. Each is drawn from again before the next one is killed."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"durability": "segment", "url": folder}
        side = HoldallSide(recording, len(recording.steps), SHARDS, **settings)
        try:
            side.insert(side.arrange(recording.steps, BLOCK), BLOCK)
            side.sample()
            found = [_killed(side, turn % SHARDS) for turn in range(rounds)]
        finally:
            side.close()
    names = ("next_batch_s", "longest_wait_s", "shard_again_s")
    told = {name: [each[i] for each in found] for i, name in enumerate(names)}
    return {"kills": rounds} | {
        name: {"median": float(np.median(taken)), "most": max(taken)} for name, taken in told.items()
    }


def machines(_recording: Recording, _rounds: int) -> dict[str, Any]:
    """Lose, freeze and cut off a machine, each in a cluster of its own. Only root can cut a machine off."""
    sys.path.append(str(ROOT))
    telling: Any = importlib.import_module("tests.shards.chaos.telling")
    apart = importlib.import_module("tests.shards.nodes").can_be_apart()
    return {story: telling.told(story) for story in telling.STORIES if story != "cut" or apart}


def _killed(side: HoldallSide, shard: int) -> tuple[float, float, float]:
    """Kill a shard, and draw until it is drawn from again. Return the first wait, the longest one and the total."""
    process_of(side.memory._members.handle(shard)).kill()
    start = last = time.perf_counter()
    waits: list[float] = []
    while True:
        batch = side.memory.sample(BATCH)
        now = time.perf_counter()
        waits.append(now - last)
        last = now
        if shard in shards_of_ids(batch.ids) and shard not in side.memory._members.lost:
            return waits[0], max(waits), now - start

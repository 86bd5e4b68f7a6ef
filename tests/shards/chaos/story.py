"""A machine is lost, frozen or cut off under load, in a cluster of its own: `python -m tests.shards.chaos.story cut`.

Out: one JSON line with how long it took. It fails if anything that was acknowledged is lost, if anything is there
twice, or if a shard that came back from the dead wrote anything.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from holdall.cluster.ids import shards_of_ids
from holdall.ray import ReplayMemory

from ..nodes import Node, Nodes, can_be_apart
from .ledger import (
    ACTION,
    EXTRAS,
    OBSERVATION,
    checked,
    feed,
    held,
    read_counts,
    settle,
    written,
)

PATIENCE_S = 60.0
SHARDS = 3


def tell(kind: str) -> dict[str, Any]:
    """Play one story from beginning to end. One that could not begin is set up once more."""
    try:
        return _told(kind)
    except NothingToLoseError:
        return _told(kind)


def _told(kind: str) -> dict[str, Any]:
    with Nodes(2, apart=can_be_apart()) as nodes, tempfile.TemporaryDirectory() as folder:
        host = nodes.address.partition(":")[0]
        ray.init(nodes.address, _node_ip_address=host, log_to_driver=False, configure_logging=False)
        try:
            return _play(kind, nodes, Path(folder))
        finally:
            ray.shutdown()


def _play(kind: str, nodes: Nodes, folder: Path) -> dict[str, Any]:
    (folder / "ledger").mkdir()
    settings: dict[str, Any] = {"durability": "segment", "url": folder / "journals", "extras": EXTRAS, "seed": 1}
    with ReplayMemory(OBSERVATION, ACTION, 1_000_000, shards=SHARDS, patience_s=60.0, **settings) as memory:
        victim, shards = _victim(memory, nodes)
        load = Load(memory, folder / "ledger")
        draw(memory, 2.0)
        (victim.freeze if kind == "frozen" else victim.cut if kind == "cut" else victim.kill)()
        start = time.monotonic()
        first_s = _until_drawn(memory, set())
        back_s = _until_drawn(memory, shards)
        (victim.thaw if kind == "frozen" else victim.mend if kind == "cut" else lambda: None)()
        draw(memory, 4.0)  # the old shard is alive for a while, with blocks that it was sent
        load.end()
        found = held(memory)
        settle(found, read_counts(folder / "ledger"))
    for shard, numbers in found.items():
        assert np.array_equal(written(folder / "journals", shard), numbers), (
            f"shard {shard} is not what its journal says"
        )
    return {
        "story": kind,
        "shards_lost": sorted(shards),
        "first_batch_s": first_s,
        "recovered_s": back_s + first_s,
        "transitions": int(sum(map(len, found.values()))),
        "ended_s": time.monotonic() - start,
    }


class NothingToLoseError(Exception):
    """No worker has a shard to lose: Ray gave a worker up before the story began, as it does on a busy machine."""


class Load:
    """A feeder in a thread of this process."""

    def __init__(self, memory: ReplayMemory, ledger: Path) -> None:
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(memory, ledger), daemon=True)
        self._thread.start()

    def _run(self, memory: ReplayMemory, ledger: Path) -> None:
        try:
            feed(memory.writer(), 0, 1_000_000, 5, ledger, self._over.is_set)
        except BaseException as error:
            self._failure = error

    def end(self) -> None:
        """Wait until all rows are acknowledged."""
        self._over.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the feeder hangs"
        if self._failure is not None:
            raise self._failure


def draw(memory: ReplayMemory, seconds: float) -> None:
    """Draw for some time, and check every bit."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if len(memory) >= 64:
            checked(memory.sample(64))


def _until_drawn(memory: ReplayMemory, shards: set[int]) -> float:
    """Draw until rows of some shards are among what is drawn. Return the seconds that took."""
    start = time.monotonic()
    left = set(shards)
    while True:
        batch = memory.sample(64)
        checked(batch)
        left -= set(shards_of_ids(batch.ids).tolist()) - set(memory._members.lost)
        if not left:
            return time.monotonic() - start
        assert time.monotonic() - start < PATIENCE_S, f"shards {left} have not come back"


def _victim(memory: ReplayMemory, nodes: Nodes) -> tuple[Node, set[int]]:
    """Return a worker that has shards and not what the whole memory hangs on, and those shards."""
    roster = _root(memory._fleet.roster)
    for _ in range(10):
        where = {number: _root(memory._members.handle(number)) for number in memory._members.numbers}
        for node in nodes.workers:
            own = {process.pid for process in node.processes()}
            there = {number for number, process in where.items() if process in own}
            if there and roster not in own and len(there) < len(where):
                return node, there
        memory.add_shard()
        memory._members.refresh()
    raise NothingToLoseError(where)


def _root(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(tell(sys.argv[1])) + "\n")

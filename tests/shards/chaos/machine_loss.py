"""The loss of a machine under load, in a cluster of its own: `python -m tests.shards.chaos.machine_loss cut`.

A machine is killed ("lost"), frozen, or cut off from the network, while one process adds transitions and another draws.
The program prints one JSON line with the times until draws continue. It fails if an acknowledged transition is lost, if
a transition is held twice, or if a shard that Ray gave up writes to its journal.
"""

from __future__ import annotations

import json
import os
import subprocess
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

from ..nodes import Node, Nodes, can_be_apart, make_environment
from .ledger import (
    ACTION,
    EXTRAS,
    OBSERVATION,
    check_batch,
    check_ledger,
    feed,
    read_counts,
    read_held,
    read_journal,
)

ROOT = Path(__file__).parents[3]
FAULTS = ("lost", "frozen", "cut")
PATIENCE_S = 60.0
SHARDS = 3


def lose_machine(fault: str) -> dict[str, Any]:
    """Lose a machine in a new process, because Ray reads its environment when it is imported. Return the times.

    Raise RuntimeError if a check failed.
    """
    with tempfile.TemporaryDirectory(prefix="hr", dir="/tmp") as folder:  # Paths of sockets must be short.
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.shards.chaos.machine_loss", fault],
            cwd=ROOT,
            env=os.environ | make_environment(Path(folder)) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
    if ended.returncode:
        raise RuntimeError(f"{fault}: {ended.stderr[-4_000:]}")
    times: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return times


def _main(fault: str) -> dict[str, Any]:
    try:
        return _start_cluster(fault)
    except NoVictimError:
        return _start_cluster(fault)


def _start_cluster(fault: str) -> dict[str, Any]:
    with Nodes(2, apart=can_be_apart()) as nodes, tempfile.TemporaryDirectory() as folder:
        host = nodes.address.partition(":")[0]
        ray.init(nodes.address, _node_ip_address=host, log_to_driver=False, configure_logging=False)
        try:
            return _lose(fault, nodes, Path(folder))
        finally:
            ray.shutdown()


def _lose(fault: str, nodes: Nodes, folder: Path) -> dict[str, Any]:
    (folder / "ledger").mkdir()
    durable: dict[str, Any] = {"durability": "segment", "url": folder / "journals"}
    with ReplayMemory(
        OBSERVATION, ACTION, 1_000_000, shards=SHARDS, patience_s=60.0, extras=EXTRAS, seed=1, **durable
    ) as memory:
        victim, shards = _choose_victim(memory, nodes)
        load = Load(memory, folder / "ledger")
        draw(memory, 2.0)
        _begin_fault(fault, victim)
        start = time.monotonic()
        first_s = _wait_for_draw(memory, set())
        back_s = _wait_for_draw(memory, shards)
        _end_fault(fault, victim)
        draw(memory, 4.0)  # The old process of the shard runs for a while. It has segments that it was sent.
        load.end()
        found = read_held(memory)
        check_ledger(found, read_counts(folder / "ledger"))
    for shard, numbers in found.items():
        assert np.array_equal(read_journal(folder / "journals", shard), numbers), (
            f"shard {shard} does not hold what its journal has"
        )
    return {
        "fault": fault,
        "shards_lost": sorted(shards),
        "first_batch_s": first_s,
        "recovered_s": back_s + first_s,
        "transitions": int(sum(map(len, found.values()))),
        "ended_s": time.monotonic() - start,
    }


def _begin_fault(fault: str, victim: Node) -> None:
    if fault == "frozen":
        victim.freeze()
    elif fault == "cut":
        victim.cut()
    else:
        victim.kill()


def _end_fault(fault: str, victim: Node) -> None:
    if fault == "frozen":
        victim.thaw()
    elif fault == "cut":
        victim.mend()


class NoVictimError(Exception):
    """No worker has a shard: Ray gave up a worker before the fault, as it does on a busy machine."""


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
    """Draw for `seconds`, and check every batch."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if len(memory) >= 64:
            check_batch(memory.sample(64))


def _wait_for_draw(memory: ReplayMemory, shards: set[int]) -> float:
    """Draw until every shard of `shards` has returned rows. Return the seconds that this took."""
    start = time.monotonic()
    left = set(shards)
    while True:
        batch = memory.sample(64)
        check_batch(batch)
        left -= set(shards_of_ids(batch.ids).tolist()) - set(memory._members.lost)
        if not left:
            return time.monotonic() - start
        assert time.monotonic() - start < PATIENCE_S, f"shards {left} have not come back"


def _choose_victim(memory: ReplayMemory, nodes: Nodes) -> tuple[Node, set[int]]:
    """Return a worker with some of the shards but without the roster, and its shards."""
    roster = _find_pid(memory._fleet.roster)
    for _ in range(10):
        where = {number: _find_pid(memory._members.handle(number)) for number in memory._members.numbers}
        for node in nodes.workers:
            own = {process.pid for process in node.processes()}
            there = {number for number, process in where.items() if process in own}
            if there and roster not in own and len(there) < len(where):
                return node, there
        memory.add_shard()
        memory._members.refresh()
    raise NoVictimError(where)


def _find_pid(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_main(sys.argv[1])) + "\n")

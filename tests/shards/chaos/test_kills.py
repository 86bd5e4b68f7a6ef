"""kill -9 on shards and writers under load: nothing acknowledged is lost, and nothing is held twice.

Feeders in processes of their own add transitions and record those that were acknowledged. A learner draws meanwhile.
One process after another is killed, at random moments. The times until draws continue are printed and not checked.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from holdall import ArgumentError
from holdall.cluster.ids import shards_of_ids
from holdall.ray import ReplayMemory

from ..processes import find_process, wait_until
from . import ledger as ledger_module
from .ledger import (
    ACTION,
    EXTRAS,
    OBSERVATION,
    check_batch,
    check_ledger,
    feed,
    make_step,
    read_counts,
    read_held,
    read_journal,
)

pytestmark = pytest.mark.usefixtures("cluster")
# Workers have no tests to import.
for module in (sys.modules[__name__], ledger_module):
    ray.cloudpickle.register_pickle_by_value(module)

SHARDS = 2
FEEDERS = 2
PATIENCE_S = 90.0


class Arena:
    """A memory under load, and the processes that may be killed."""

    def __init__(self, memory: ReplayMemory, seed: int, transitions: int, ledger: Path) -> None:
        self.memory = memory
        self.ledger = ledger
        self._seed = seed
        self._transitions = transitions
        self._started = 0
        self._feeders: dict[int, tuple[Any, Any]] = {}  # Actor and its call of `feed`.
        self._killed_at: dict[int, float] = {}  # By shard, until rows of the shard are drawn again.
        self._last_batch = np.inf
        self.away_s: list[float] = []
        self.longest_wait_s = 0.0
        for _ in range(FEEDERS):
            self.start_feeder()

    def start_feeder(self) -> None:
        feeder = self._started
        self._started = self._started + 1
        remote: Any = ray.remote
        actor = remote(num_cpus=0, max_restarts=0, concurrency_groups={"work": 1})(Feeder).remote()
        arguments = (self.memory.writer(), feeder, self._transitions, self._seed, self.ledger)
        self._feeders[feeder] = (actor, actor.feed.remote(*arguments))

    def kill_feeder(self, generator: np.random.Generator) -> None:
        """Kill a feeder that runs, and start another one."""
        feeder = int(generator.choice(list(self._feeders)))
        actor, _ = self._feeders.pop(feeder)
        psutil.Process(ray.get(actor.process.remote())).kill()
        self.start_feeder()

    def kill_shard(self, generator: np.random.Generator) -> None:
        shard = int(generator.integers(SHARDS))
        try:
            process = psutil.Process(find_process(self.memory._members.handle(shard)))
        except (ray.exceptions.RayActorError, psutil.NoSuchProcess):
            return  # Ray is still restarting the shard.
        process.kill()
        self._killed_at.setdefault(shard, time.monotonic())

    def draw(self) -> None:
        """Draw once, and record which killed shards answer again."""
        try:
            batch = self.memory.sample(64)
        except ArgumentError:  # Nothing is held yet.
            time.sleep(0.01)
            return
        check_batch(batch)
        now = time.monotonic()
        self.longest_wait_s = max(self.longest_wait_s, now - self._last_batch)  # Starting the shards does not count.
        self._last_batch = now
        for shard in set(shards_of_ids(batch.ids).tolist()) & set(self._killed_at):
            if shard not in self.memory._members.lost:
                self.away_s.append(now - self._killed_at.pop(shard))

    def draw_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.draw()

    def wait_for_all(self) -> None:
        """Draw until every feeder that was not killed is done, and every shard answers."""
        until = time.monotonic() + PATIENCE_S
        left = [call for _, call in self._feeders.values()]
        while (left or self._killed_at) and time.monotonic() < until:
            done, left = ray.wait(left, num_returns=len(left), timeout=0) if left else ([], [])
            ray.get(done)
            self.draw()
        assert not left, "feeders have not ended: deadlock"
        assert not self._killed_at, "a shard has not come back"


class Feeder:
    """An actor with one thread that feeds and one that answers `process`."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @ray.method(concurrency_group="work")
    def feed(self, *arguments: Any) -> None:
        feed(*arguments)

    def process(self) -> int:
        return self._process


def kill_processes(seed: int, shard_kills: int, feeder_kills: int, transitions: int, folder: Path) -> Arena:
    generator = np.random.default_rng(seed)
    (folder / "ledger").mkdir()
    victims = generator.permutation(["shard"] * shard_kills + ["feeder"] * feeder_kills)
    settings: dict[str, Any] = {"durability": "segment", "url": folder / "journals", "extras": EXTRAS}
    settings |= {"seed": seed, "patience_s": PATIENCE_S}  # A busy machine takes long to start a process.
    with ReplayMemory(OBSERVATION, ACTION, 1_000_000, shards=SHARDS, **settings) as memory:
        arena = Arena(memory, seed, transitions, folder / "ledger")
        for victim in victims.tolist():
            arena.draw_for(float(generator.uniform(0.1, 1.2)))
            (arena.kill_shard if victim == "shard" else arena.kill_feeder)(generator)
        arena.wait_for_all()
        found = read_held(memory)
        check_ledger(found, read_counts(folder / "ledger"))
    for shard, numbers in found.items():
        assert np.array_equal(read_journal(folder / "journals", shard), numbers)
    return arena


def print_times(seed: int, arena: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    away = ", ".join(f"{seconds:.2f}" for seconds in arena.away_s)
    longest = f"{arena.longest_wait_s:.2f}"
    with capsys.disabled():
        sys.stdout.write(f"\nseed {seed}: rows of killed shards after {away} s; longest wait for a batch {longest} s\n")


@pytest.mark.nightly  # in make test, test_losses.py kills shards
@pytest.mark.parametrize("seed", [0])
def test_acknowledged_transitions_outlive_a_shard_and_a_writer(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_times(seed, kill_processes(seed, 1, 1, 400, tmp_path), capsys)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 20))
def test_acknowledged_transitions_outlive_many_kills(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_times(seed, kill_processes(seed, 4, 3, 6_000, tmp_path), capsys)


def _knows_shards(memory: ReplayMemory) -> bool:
    """Draw, as a learner does all the time. Return whether a roster that was restarted knows the shards again."""
    check_batch(memory.sample(64))
    try:
        return bool(ray.get(memory._fleet.roster.shards.remote(-1), timeout=5.0)[1])
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return False


@pytest.mark.nightly
@pytest.mark.parametrize("durability", ["memory", "segment"])
def test_adding_and_drawing_continue_after_the_roster_was_killed(durability: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"durability": durability, "extras": EXTRAS, "patience_s": PATIENCE_S}
    settings |= {"url": tmp_path} if durability == "segment" else {}
    with ReplayMemory(OBSERVATION, ACTION, 10_000, shards=SHARDS, **settings) as memory:
        writer = memory.writer()
        for number in range(300):
            writer.add(*make_step(number))
        writer.flush()
        ids = memory.sample(64).ids
        psutil.Process(find_process(memory._fleet.roster)).kill()
        for number in range(300, 900):
            writer.add(*make_step(number))
        writer.flush()
        wait_until(lambda: _knows_shards(memory))
        later = memory.writer()  # A writer that needs the new roster.
        for number in range(900, 1_200):
            later.add(*make_step(number))
        later.flush()
        memory._members.refresh()
        check_batch(memory.gather(ids))
        found = read_held(memory)
        assert np.array_equal(np.sort(np.concatenate(list(found.values()))), np.arange(1_200))
        memory.add_shard()
        assert len(memory._members.refresh()) == SHARDS + 1

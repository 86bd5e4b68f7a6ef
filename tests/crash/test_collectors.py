"""A collection removes no file that a current or later save names."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.checkpoint import collect_all, open_blobs, open_reader
from holdall.errors import LockedError

from .nursery import LANES, SPACE, grow, require_right
from .test_kills import Nursery

_LOG = logging.getLogger(__name__)
TEST_LEASE_S = 2.0


def make_memory(ticks: int) -> ReplayMemory:
    memory = ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1)
    grow(memory, ticks)
    return memory


def test_gc_is_refused_while_a_writer_has_the_lock(url: str) -> None:
    """The writer removes old checkpoints by itself. After it has closed, gc removes what no checkpoint names."""
    with make_memory(20) as memory:
        memory.save(url).result(60)
        open_blobs(url).create(f"segments/{'a' * 16}-{'0' * 16}.seg", b"record")
        with pytest.raises(LockedError, match="in use by process"):
            collect_all(open_reader(url), 1)
    assert collect_all(open_reader(url), 1) == 6
    with ReplayMemory.load(url) as loaded:
        require_right(loaded)


def test_missing_files_are_written_again(url: str) -> None:
    """Another program removed files, manifests or everything. The next saves are whole."""
    blobs = open_blobs(url)
    with make_memory(150) as memory:
        memory.save(url).result(60)
        for folders in (["segments/"], ["segments/", "manifests/"], [""]):
            for name in [name for folder in folders for name, _ in blobs.list(folder)]:
                blobs.delete(name)
            for _ in range(2):
                grow(memory, 5)
                memory.save(url).result(60)
                with ReplayMemory.load(url) as loaded:
                    assert loaded.next_id == memory.next_id
                    require_right(loaded)


def test_a_loaded_memory_names_no_file_that_was_collected_after_its_load(url: str) -> None:
    """Another writer saved and collected meanwhile."""
    with make_memory(150) as memory:
        memory.save(url).result(60)
        late = ReplayMemory.load(url)
        for _ in range(2):
            grow(memory, 190)
            memory.save(url, keep=1).result(60)
    with late:
        grow(late, 3)
        late.save(url).result(60)
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == late.next_id
            require_right(loaded)


COLLECTOR = """
import sys
from holdall.cli import app
while True:
    try:
        app(["checkpoint", "gc", sys.argv[1], "--keep", "1", "--json"], standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:
        pass
"""


class Collector:
    """A process that runs `checkpoint gc` in a loop, and can be killed and started again."""

    def __init__(self, url: str, output: Path) -> None:
        self._url = url
        self._output = output.open("w")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", COLLECTOR, self._url], stdout=self._output, stderr=subprocess.DEVNULL
        )

    def restart(self) -> None:
        self.end()
        self._process = self._start()

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.end()
        self._output.close()


@pytest.fixture
def collector(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("HOLDALL_LEASE_S", str(TEST_LEASE_S))
    found = Collector(url, tmp_path / "collected")
    yield found
    found.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [5, pytest.param(300, marks=pytest.mark.nightly)])
def test_every_acknowledged_checkpoint_loads_while_another_process_collects(
    tmp_path: Path, url: str, seconds: int, collector: Collector
) -> None:
    """Trainers and collectors are killed. Some saves take longer than a lease."""
    nursery = Nursery()
    generator = random.Random(seconds)
    acknowledged = 0
    lives = 0
    checkpoints = 0
    kills = 0
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or not checkpoints:
            loaded, saved = nursery.run_trainer(url, tmp_path, lives, generator.randrange(4), generator.uniform(0, 0.5))
            assert loaded >= acknowledged, f"trainer {lives} loaded tick {loaded}; {acknowledged} was acknowledged"
            lives = lives + 1
            checkpoints = checkpoints + (saved > acknowledged)
            acknowledged = max(acknowledged, loaded, saved)
            if seconds > 60 and lives % 5 == 0:
                collector.restart()
                kills += 1
    finally:
        nursery.close()
    with ReplayMemory.load(url) as memory:
        assert memory.next_id // LANES >= acknowledged
        require_right(memory)
    rounds = len((tmp_path / "collected").read_text().splitlines())
    _LOG.info("%d trainers and %d collectors killed, %d collections, %d ticks", lives, kills, rounds, acknowledged)
    assert rounds or seconds < 60

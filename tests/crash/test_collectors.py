"""Whoever collects removes nothing that a save under way, or the next one, is about to name."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from gymnasium import spaces

from holdall import CheckpointError, ReplayMemory
from holdall.checkpoint import object_store
from holdall.checkpoint.manifest import LEASE_S, Manifest, Ref
from holdall.checkpoint.object_store import ObjectStoreWriter
from holdall.checkpoint.objects import Objects, StoredObject

from .nursery import LANES, SPACE, add, require_right
from .test_kills import Nursery

_LOG = logging.getLogger(__name__)
TEST_LEASE_S = 6.0
"""Far above the second to which some stores round their times."""


def new_memory(ticks: int) -> ReplayMemory:
    memory = ReplayMemory(SPACE, spaces.Discrete(5), 200 * LANES, LANES, budget=None, seed=1)
    grow(memory, ticks)
    return memory


def grow(memory: ReplayMemory, ticks: int) -> None:
    for _ in range(ticks):
        add(memory, memory.next_id // LANES)


def manifest_of(place: ObjectStoreWriter, number: int) -> Manifest:
    file = place.new_file()
    file.write(b"record")
    file.finish()
    ref = Ref(file.name, 0, 6, "0" * 32)
    return Manifest(number, "a" * 32, place.writer_id, 0.0, 0, 0, 1, {}, {file.name: 6}, ref)


@pytest.fixture
def aged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file of records looks two leases old."""
    listed = Objects.listed

    def older(own: Objects, folder: str) -> dict[str, StoredObject]:
        found = listed(own, folder)
        back = timedelta(seconds=2 * LEASE_S if folder == "segments" else 0)
        return {name: entry._replace(modified=entry.modified - back) for name, entry in found.items()}

    monkeypatch.setattr(Objects, "listed", older)


def test_gc_spares_what_is_young(url: str) -> None:
    """Whoever put it: an older version sets no mark."""
    writer, collector = ObjectStoreWriter(url), ObjectStoreWriter(url)
    waiting = manifest_of(writer, 1)
    writer.close()  # its mark is gone
    assert collector.collect(1, ()) == 0
    assert set(waiting.files) <= set(writer.reader.file_sizes())


@pytest.mark.usefixtures("aged")
def test_gc_spares_a_save_under_way_however_long_it_takes(url: str) -> None:
    """Its writer's mark is young; what nobody is about to name goes once the mark is gone."""
    writer, collector = ObjectStoreWriter(url), ObjectStoreWriter(url)
    waiting, left = manifest_of(writer, 1), manifest_of(writer, 2)
    assert collector.collect(1, ()) == 0
    writer.commit(waiting)
    assert collector.collect(1, ()) == 0
    writer.close()
    assert collector.collect(1, ()) == 6
    assert set(collector.reader.file_sizes()) == set(waiting.files)
    assert not set(left.files) & set(collector.reader.file_sizes())


def test_a_writer_whose_mark_is_old_commits_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it put may be gone any moment; its next save puts it again."""
    writer = ObjectStoreWriter(url)
    waiting = manifest_of(writer, 1)
    clocks = object_store._clocks
    monkeypatch.setattr(object_store, "_clocks", lambda: tuple(now + LEASE_S for now in clocks()))
    with pytest.raises(CheckpointError, match="could not be reached"):
        writer.commit(waiting)
    assert writer.reader.numbers() == []
    writer.commit(manifest_of(writer, 1))
    assert writer.reader.numbers() == [1]


def test_what_is_gone_is_written_again(url: str) -> None:
    """Files and manifests, or everything, were removed by somebody else: the next save is whole, and all that come."""
    objects = Objects(url)
    with new_memory(150) as memory:
        memory.save(url).result(60)
        for folders in (["segments"], ["segments", "manifests"], ["segments", "manifests", "", "writers"]):
            keys = [f"{folder}/{name}".lstrip("/") for folder in folders for name in objects.sizes(folder)]
            objects.delete(keys)
            for _ in range(2):
                grow(memory, 5)
                memory.save(url).result(60)
                with ReplayMemory.load(url) as loaded:
                    assert loaded.next_id == memory.next_id
                    require_right(loaded)


def test_a_file_that_vanishes_during_a_save_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is acknowledged, and the next save is whole."""
    commit = ObjectStoreWriter.commit

    def robbed(own: ObjectStoreWriter, manifest: Manifest) -> None:
        Objects(url).delete([f"segments/{max(manifest.files)}"])
        commit(own, manifest)

    with new_memory(60) as memory:
        memory.save(url).result(60)
        grow(memory, 60)
        with monkeypatch.context() as patch:
            patch.setattr(ObjectStoreWriter, "commit", robbed)
            with pytest.raises(CheckpointError, match="was removed while it was needed"):
                memory.save(url).result(60)
        memory.save(url).result(60)
        with ReplayMemory.load(url) as loaded:
            assert loaded.next_id == memory.next_id
            require_right(loaded)


def test_a_memory_that_was_loaded_names_nothing_that_was_collected_since(url: str) -> None:
    """Another one went on saving meanwhile, and came to its end."""
    with new_memory(150) as memory:
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


COLLECTOR = f"""
import sys
from holdall.checkpoint import object_store
from holdall.cli import app
object_store.LEASE_S = {TEST_LEASE_S}
while True:
    try:
        app(["checkpoint", "gc", sys.argv[1], "--keep", "1", "--json"], standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:
        pass
"""


class Collector:
    """A process that runs `checkpoint gc` in a loop; it is killed, and started again."""

    def __init__(self, url: str, told: Path) -> None:
        self._url, self._told = url, told.open("w")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", COLLECTOR, self._url], stdout=self._told, stderr=subprocess.DEVNULL
        )

    def restart(self) -> None:
        self.end()
        self._process = self._start()

    def end(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.end()
        self._told.close()


@pytest.fixture
def collector(url: str, tmp_path: Path) -> Iterator[Collector]:
    found = Collector(url, tmp_path / "collected")
    yield found
    found.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seconds", [5, pytest.param(300, marks=pytest.mark.nightly)])
def test_every_acknowledged_checkpoint_loads_while_another_process_collects(
    tmp_path: Path, url: str, seconds: int, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that save are killed, and those that collect; some saves take longer than a lease."""
    monkeypatch.setenv("HOLDALL_TEST_LEASE_S", str(TEST_LEASE_S))
    nursery, generator = Nursery(), random.Random(seconds)
    acknowledged = lives = checkpoints = kills = 0
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or not checkpoints:
            loaded, saved = nursery.life(url, tmp_path, lives, generator.randrange(4), generator.uniform(0, 0.5))
            assert loaded >= acknowledged, f"life {lives} began at tick {loaded}; {acknowledged} was acknowledged"
            lives, checkpoints = lives + 1, checkpoints + (saved > acknowledged)
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

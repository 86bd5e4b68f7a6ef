"""Saving to a directory and loading from it."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    DamageError,
    FencedError,
    Prioritized,
    ReplayMemory,
    Uniform,
)
from holdall._native import Block, Coded, Raw, decode
from holdall.checkpoint import (
    CheckpointReader,
    Manifest,
    MemorySnapshot,
    Savers,
    load_newest,
    open_reader,
    remove_newer,
)
from holdall.checkpoint.data_file import DataFile
from holdall.checkpoint.directory_blobs import DirectoryBlobs, DirectoryLease, DiskEntry, FileSystem
from holdall.checkpoint.manifest import append_checksum, manifest_name
from holdall.checkpoint.retention import choose
from holdall.checkpoint.urls import is_remote, normalized_url
from holdall.codec.codec import Codec
from holdall.errors import BlobMissingError, LockedError
from holdall.schema_json import schema_to_json
from holdall.store.format import list_blocks
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.testing import LeafPlan, OracleMemory, Stream, assert_same_bits

FRAMES = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (4, 40, 40), np.uint8),
        "state": spaces.Box(-1, 1, (6,), np.float32),
    }
)
PLANS = [LeafPlan(axis=0), LeafPlan()]
SMALL = Tuning(block_bytes=64 * 1600, max_segment_ticks=40)
"""A few dozen ticks fill a segment."""


class Trainer:
    """A memory, and an oracle that gets the same transitions."""

    def __init__(self, capacity: int = 1200, lanes: int = 2, **settings: Any) -> None:
        # Frames of noise. Resets are frequent, so that blocks become smaller by compression.
        self.stream = Stream(FRAMES, spaces.Discrete(3), lanes, plans=PLANS, seed=1)
        self.memory = ReplayMemory(FRAMES, spaces.Discrete(3), capacity, lanes, seed=9, _tuning=SMALL, **settings)
        self.oracle = OracleMemory(capacity, lanes)

    def add(self, ticks: int) -> None:
        for _ in range(ticks):
            tick = self.stream.tick().arguments()
            self.memory.add(**tick)
            self.oracle.add(**tick)

    def require_same(self, memory: ReplayMemory) -> None:
        assert len(memory) == len(self.oracle)
        assert_same_bits(memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))


@pytest.fixture
def trainer() -> Any:
    trainer = Trainer()
    yield trainer
    trainer.memory.close()


@pytest.mark.parametrize("budget", [None, "auto", "64MiB"])
def test_a_loaded_memory_draws_the_batches_that_the_saved_one_would_have(tmp_path: Path, budget: Any) -> None:
    """Also after more transitions were added to both."""
    trainer = Trainer(budget=budget)
    with trainer.memory as memory:
        trainer.add(700)
        memory.sample(33)
        memory.save(tmp_path / "run").result()
        with ReplayMemory.load(tmp_path / "run", budget=budget) as loaded:
            trainer.require_same(loaded)
            for _ in range(40):
                assert_same_bits(loaded.sample(250), memory.sample(250))
            for _ in range(300):
                tick = trainer.stream.tick().arguments()
                for each in (memory, loaded, trainer.oracle):
                    each.add(**tick)
            trainer.require_same(loaded)
            assert_same_bits(loaded.sample(100), memory.sample(100))


def test_a_checkpoint_counts_the_transitions_that_are_held(tmp_path: Path) -> None:
    """Entries that are not valid do not count, also if the oldest segment has evicted some of its ticks."""
    trainer = Trainer(capacity=100)
    valid = np.array([True, False])
    with trainer.memory as memory:
        for _ in range(71):
            memory.add(**trainer.stream.tick().arguments(), valid=valid)
        assert memory.save(tmp_path / "run").result().transitions == len(memory) == 50
        manifest = open_reader(tmp_path / "run").manifest(1)
        assert manifest.transitions == 50
        assert manifest.segments[0].first_tick < manifest.first_tick


def test_a_loaded_memory_draws_with_the_saved_priorities(tmp_path: Path) -> None:
    trainer = Trainer(sampler=Prioritized())
    with trainer.memory as memory:
        trainer.add(300)
        batch = memory.sample(64)
        memory.update_priorities(batch.ids, np.linspace(0, 3, 64))
        memory.save(tmp_path).result()
        with ReplayMemory.load(tmp_path, sampler=Prioritized()) as loaded:
            for _ in range(20):
                mine = loaded.sample(64)
                theirs = memory.sample(64)
                assert_same_bits(mine, theirs)
        with ReplayMemory.load(tmp_path, sampler=Uniform()) as anew:
            assert (anew.sample(10).weights == 1).all()


@pytest.mark.parametrize("budget", [None, "auto"])
def test_saving_again_writes_only_what_is_new_and_the_open_segment(tmp_path: Path, budget: Any) -> None:
    trainer = Trainer(budget=budget)
    with trainer.memory as memory:
        trainer.add(500)
        first = memory.save(tmp_path).result()
        again = memory.save(tmp_path).result()
        assert again.number == first.number + 1
        assert again.bytes_written < first.bytes_written / 8
        assert again.bytes_total <= first.bytes_total + again.bytes_written
        trainer.add(50)
        third = memory.save(tmp_path).result()
        assert third.bytes_written < first.bytes_written / 4
        with ReplayMemory.load(tmp_path) as loaded:
            trainer.require_same(loaded)


def test_a_loaded_memory_saves_to_the_same_place_only_what_is_new(tmp_path: Path) -> None:
    trainer = Trainer(budget=None)
    with trainer.memory as memory:
        trainer.add(590)
        first = memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as loaded:
        second = loaded.save(tmp_path).result()
        assert second.bytes_written < first.bytes_written / 20
    with ReplayMemory.load(tmp_path) as loaded:
        trainer.require_same(loaded)


@pytest.mark.parametrize("budget", [None, "auto"])
def test_checkpoints_are_compressed(tmp_path: Path, budget: Any) -> None:
    """Also if the memory is not."""
    space = spaces.Box(0, 255, (4, 40, 40), np.uint8)
    with ReplayMemory(space, spaces.Discrete(2), 1000, budget=budget, _tuning=SMALL) as memory:
        for tick in range(500):
            frames = np.full((1, 4, 40, 40), tick % 7, np.uint8)
            frames[0, :, tick % 40] = tick % 251
            memory.add(frames, [0], [1.0], frames, [False], [False])
        assert memory.save(tmp_path).result().bytes_total < 500 * 1600 / 8


def test_rewritten_extras_are_saved_without_the_rest_of_their_segments(tmp_path: Path) -> None:
    extras = {"hidden": spaces.Box(-9, 9, (4,), np.float32)}
    trainer = Trainer(extras=extras)
    zeros = np.zeros((2, 4), np.float32)
    with trainer.memory as memory:
        for _ in range(400):
            memory.add(**trainer.stream.tick().arguments(), extras={"hidden": zeros})
        first = memory.save(tmp_path).result()
        for round_ in range(3):
            rows = np.random.default_rng(round_).standard_normal((200, 4)).astype(np.float32)
            memory.update(np.arange(200) * 2 + round_ % 2, hidden=rows)
            again = memory.save(tmp_path).result()
            assert again.bytes_written < first.bytes_written / 4
            ids = np.arange(memory.first_id, memory.next_id)
            with ReplayMemory.load(tmp_path) as loaded:
                assert_same_bits(loaded.gather(ids), memory.gather(ids))
    # The rewritten rows of a loaded memory are saved, too.
    with ReplayMemory.load(tmp_path) as loaded:
        loaded.update(ids[:50], hidden=np.ones((50, 4), np.float32))
        loaded.save(tmp_path).result()
        with ReplayMemory.load(tmp_path) as again_loaded:
            assert_same_bits(again_loaded.gather(ids), loaded.gather(ids))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of open files")
def test_more_files_than_a_process_may_open_can_be_loaded(tmp_path: Path) -> None:
    """A memory that was loaded keeps all files open. The limit is raised as far as the system allows."""
    import resource

    tuning = Tuning(block_bytes=4096, max_segment_ticks=2, min_segment_ticks=2)
    space = spaces.Box(0, 255, (8,), np.uint8)
    with ReplayMemory(space, spaces.Discrete(2), 1000, _tuning=tuning) as memory:
        for tick in range(500):
            row = np.full((1, 8), tick % 256, np.uint8)
            memory.add(row, [0], [1.0], row, [False], [False])
            if tick % 2:
                memory.save(tmp_path, keep=1).result()
        assert len(list((tmp_path / "segments").iterdir())) > 200
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, before[1]))
        try:
            with ReplayMemory.load(tmp_path) as loaded:
                ids = np.arange(500)
                assert_same_bits(loaded.gather(ids), memory.gather(ids))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_load_beside_frequent_saves_always_succeeds(tmp_path: Path, trainer: Trainer) -> None:
    """A checkpoint that is removed while it is read is replaced by a newer one."""
    trainer.add(100)
    trainer.memory.save(tmp_path, keep=1).result()
    stopped = threading.Event()

    def save_often() -> None:
        while not stopped.is_set():
            trainer.memory.save(tmp_path, keep=1).result()

    thread = threading.Thread(target=save_often)
    thread.start()
    try:
        for _ in range(40):
            with ReplayMemory.load(tmp_path) as loaded:
                assert len(loaded) == 200
    finally:
        stopped.set()
        thread.join()


def test_a_batch_that_needs_damaged_bytes_names_the_file_and_the_remedy(tmp_path: Path, trainer: Trainer) -> None:
    trainer.add(400)
    trainer.memory.save(tmp_path).result()
    block = open_reader(tmp_path).manifest(1).blocks[0]
    victim = tmp_path / "segments" / block.ref.file
    content = bytearray(victim.read_bytes())
    content[block.ref.start + block.index_bytes] ^= 1  # The first byte of the first unit.
    victim.write_bytes(content)
    with ReplayMemory.load(tmp_path) as loaded, pytest.raises(DamageError, match=r"pass recover=True\.") as caught:
        loaded.gather(trainer.oracle.ids)
    assert f"in file '{victim}' is damaged: Unit" in str(caught.value)


def test_recovering_beside_saves_loses_nothing(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that a save has removed are not damage: there is a newer checkpoint."""
    trainer.add(600)
    trainer.memory.save(tmp_path, keep=1).result()
    reader = open_reader(tmp_path)
    manifest = reader.manifest(1)
    open_file = CheckpointReader.open

    def replace_and_open(reader: CheckpointReader, name: str, nbytes: int) -> DataFile:
        if name != manifest.state.file:
            monkeypatch.undo()
            trainer.add(1300)  # Evicts every block of the first checkpoint.
            trainer.memory.save(tmp_path, keep=1).result()
        return open_file(reader, name, nbytes)

    monkeypatch.setattr(CheckpointReader, "open", replace_and_open)
    with ReplayMemory.load(tmp_path, recover=True) as loaded:
        trainer.require_same(loaded)


def test_a_load_says_that_every_checkpoint_was_removed_while_it_was_read(tmp_path: Path, trainer: Trainer) -> None:
    trainer.add(1)
    trainer.memory.save(tmp_path, keep=1).result()

    def replace(manifest: Manifest) -> None:
        trainer.memory.save(tmp_path, keep=1).result()
        raise BlobMissingError(f"Checkpoint {manifest.number} was removed.")

    with pytest.raises(CheckpointError, match="Save less often, or pass a larger keep"):
        load_newest(open_reader(tmp_path), replace)


def test_evicted_transitions_are_not_kept_alive_by_a_save(tmp_path: Path) -> None:
    """A saver recognizes saved parts by their serial numbers, and holds no reference to them."""
    trainer = Trainer(capacity=400)
    with trainer.memory as memory:
        trainer.add(200)
        memory.save(tmp_path).result()
        segment = memory.host_store.catalog.segments[0]
        count = sys.getrefcount(segment.parts[0])
        assert count <= 4


def test_only_the_last_keep_checkpoints_and_their_files_stay(tmp_path: Path, trainer: Trainer) -> None:
    for _ in range(6):
        trainer.add(150)
        trainer.memory.save(tmp_path, keep=2).result()
    reader = open_reader(tmp_path)
    assert reader.numbers() == [6, 5]
    named = {name for number in reader.numbers() for name in reader.manifest(number).files}
    assert set(reader.file_sizes()) == named
    assert {path.name for path in tmp_path.iterdir()} == {"LOCK", "segments", "manifests"}


def test_choosing_among_many_checkpoints_lists_them_once(tmp_path: Path, trainer: Trainer) -> None:
    """Otherwise a save with keep=400 takes most of a second."""
    for _ in range(20):
        trainer.add(1)
        trainer.memory.save(tmp_path, keep=20).result()
    listed: list[Path] = []

    class CountingDisk(FileSystem):
        def list(self, path: Path) -> list[DiskEntry]:
            listed.append(path)
            return super().list(path)

    kept, stale = choose(CheckpointReader(DirectoryBlobs(tmp_path, CountingDisk())), 15)
    assert [manifest.number for manifest in kept] == list(range(20, 5, -1))
    assert stale == [5, 4, 3, 2, 1]
    assert listed.count(tmp_path / "manifests") == 1


def test_a_roll_back_also_removes_checkpoints_that_were_saved_while_it_waited_for_the_lock(tmp_path: Path) -> None:
    trainer = Trainer()
    with trainer.memory as memory:
        for _ in range(2):
            trainer.add(1)
            memory.save(tmp_path, keep=9).result()

    class LockedByAnother(DirectoryBlobs):
        """Another writer saves checkpoint 3, and releases the lock."""

        def lock(self, owner: str) -> DirectoryLease:
            manifests = self.root / "manifests"
            shutil.copy(manifests / manifest_name(2), manifests / manifest_name(3))
            return super().lock(owner)

    remove_newer(CheckpointReader(LockedByAnother(tmp_path)), 1)
    assert open_reader(tmp_path).numbers() == [1]


def test_the_error_of_a_second_writer_says_if_it_is_in_the_same_process(tmp_path: Path, trainer: Trainer) -> None:
    trainer.add(1)
    trainer.memory.save(tmp_path).result()
    with (
        ReplayMemory.load(tmp_path) as other,
        pytest.raises(LockedError, match=rf"process {os.getpid()} on .* \(another memory of this process\)"),
    ):
        other.save(tmp_path).result()


def _fail_for_manifests(_disk: FileSystem, old: Path, new: Path) -> None:
    """Link segments, and fail for manifests."""
    if new.parent.name == "manifests":
        raise OSError(errno.EIO, "the disk fails")
    os.link(old, new)


@pytest.mark.parametrize("left_by", ["a crash", "a save that failed"])
def test_the_next_save_removes_files_that_no_checkpoint_names(tmp_path: Path, trainer: Trainer, left_by: str) -> None:
    """Also if there are fewer checkpoints than `keep`."""
    trainer.add(20)
    if left_by == "a crash":
        stale = tmp_path / "segments" / f"{'a' * 16}-{1:016x}.seg"
        stale.parent.mkdir()
        stale.write_bytes(b"a record")
        os.utime(stale, (0, 0))
    else:
        trainer.memory.save(tmp_path).result()
        trainer.add(20)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileSystem, "link", _fail_for_manifests)
            with pytest.raises(CheckpointError):
                trainer.memory.save(tmp_path).result()
        assert len(list(tmp_path.glob("segments/*.seg"))) > len(open_reader(tmp_path).manifest(1).files)
    trainer.memory.save(tmp_path, keep=9).result()
    reader = open_reader(tmp_path)
    assert set(reader.file_sizes()) == {name for n in reader.numbers() for name in reader.manifest(n).files}


def test_a_smaller_memory_loads_the_newest_transitions(tmp_path: Path, trainer: Trainer) -> None:
    """A larger one loads all transitions."""
    trainer.add(500)
    trainer.memory.save(tmp_path).result()
    for capacity in (10, 101, 800, 5000):
        with ReplayMemory.load(tmp_path, capacity=capacity) as loaded:
            ticks = min(capacity // 2, 500)
            assert (loaded.capacity, len(loaded), loaded.next_id) == (capacity // 2 * 2, 2 * ticks, 1000)
            ids = np.arange(1000 - 2 * ticks, 1000)
            assert_same_bits(loaded.gather(ids), trainer.oracle.gather(ids))


def test_attached_files_are_loaded(tmp_path: Path, trainer: Trainer) -> None:
    """Bytes and files, in the same commit as the memory."""
    weights = tmp_path / "agent_0.pth"
    weights.write_bytes(bytes(range(256)) * 1000)
    attach = {"agents/agent_0.pth": weights, "generation.json": b'{"n": 25}', "empty": b""}
    trainer.add(20)
    trainer.memory.save(tmp_path / "run", attach=attach).result()
    with ReplayMemory.load(tmp_path / "run") as loaded:
        assert dict(loaded.attached) == attach | {"agents/agent_0.pth": weights.read_bytes()}
        loaded.attached.extract("agents/agent_0.pth", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == weights.read_bytes()


@pytest.mark.parametrize("attach", [{"../x": b""}, {"a": 3}, {"a": "/no/such/file"}, {3: b""}, [b""], {".x": b""}])
def test_an_attachment_that_cannot_be_saved_is_refused_at_once(tmp_path: Path, trainer: Trainer, attach: Any) -> None:
    """Nothing is written."""
    with pytest.raises(ArgumentError, match="attach"):
        trainer.memory.save(tmp_path / "run", attach=attach)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["-x", ".x", "a/.x", "a/-x", "a/../b"])
def test_the_error_of_an_attachment_says_how_a_name_may_begin(tmp_path: Path, trainer: Trainer, name: str) -> None:
    with pytest.raises(ArgumentError, match=r"Components may not start with '-' or '\.'"):
        trainer.memory.save(tmp_path / "run", attach={name: b""})


def test_a_second_writer_is_refused(tmp_path: Path, trainer: Trainer) -> None:
    """Until the first memory is closed."""
    trainer.add(5)
    trainer.memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as other:
        with pytest.raises(FencedError, match="in use by process"):
            other.save(tmp_path).result()
        trainer.memory.close()
        assert other.save(tmp_path).result().number == 2


def test_a_damaged_newest_checkpoint_is_skipped(
    tmp_path: Path, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before it is loaded, and the log says why."""
    trainer.add(30)
    trainer.memory.save(tmp_path).result()
    kept = trainer.memory.gather(np.arange(60))
    trainer.add(30)
    trainer.memory.save(tmp_path).result()
    newest = tmp_path / "manifests" / "0000000000000002.json"
    newest.write_bytes(newest.read_bytes()[:-10])
    with caplog.at_level(logging.WARNING, "holdall"), ReplayMemory.load(tmp_path) as loaded:
        assert loaded.next_id == 60
        assert_same_bits(loaded.gather(np.arange(60)), kept)
    assert "checksum" in caplog.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No complete checkpoint found in .* Check the path, or save first."),
        (b"{}", "damaged or cut short"),
        (append_checksum(b"no json"), "The text"),
        (append_checksum(b'{"format":"holdall checkpoint","version":2,"features":[]}'), "Upgrade holdall"),
    ],
)
def test_a_place_without_checkpoints_of_this_version_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    """The error says what is there."""
    if content is not None:
        (tmp_path / "manifests").mkdir()
        (tmp_path / "manifests" / f"{1:016d}.json").write_bytes(content)
    with pytest.raises(OSError, match=message):
        ReplayMemory.load(tmp_path)


def test_an_empty_memory_can_be_saved(tmp_path: Path, trainer: Trainer) -> None:
    """And added to when it is loaded."""
    trainer.memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as loaded:
        assert len(loaded) == 0
        tick = trainer.stream.tick().arguments()
        loaded.add(**tick)
        trainer.oracle.add(**tick)
        trainer.require_same(loaded)


def test_closing_waits_for_the_saves_in_progress(tmp_path: Path, trainer: Trainer) -> None:
    trainer.add(100)
    handle = trainer.memory.save(tmp_path)
    trainer.memory.close()
    assert handle.done()
    assert handle.result().number == 1
    with pytest.raises(ClosedError):
        trainer.memory.save(tmp_path)


def test_the_end_of_a_program_waits_for_its_saves(tmp_path: Path) -> None:
    """Also if the program does not wait for the result and does not close the memory."""
    program = (
        "import sys, numpy as np, holdall\n"
        "from gymnasium import spaces\n"
        "space = spaces.Box(0, 255, (9000,), np.uint8)\n"
        "memory = holdall.ReplayMemory(space, spaces.Discrete(2), 2000)\n"
        "one, flag = np.zeros(1, np.int64), np.zeros(1, np.bool_)\n"
        "for n in range(1000):\n"
        "    obs = np.random.default_rng(n).integers(0, 256, (1, 9000), np.uint8)\n"
        "    memory.add(obs, one, np.ones(1, np.float32), obs, flag, flag)\n"
        "memory.save(sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=100)
    with ReplayMemory.load(tmp_path) as loaded:
        assert len(loaded) == 1000


def test_saves_of_many_threads_are_written_one_after_another(tmp_path: Path, trainer: Trainer) -> None:
    trainer.add(50)
    handles: list[Any] = []
    threads = [threading.Thread(target=lambda: handles.append(trainer.memory.save(tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    trainer.add(50)
    for thread in threads:
        thread.join()
    assert sorted(handle.result().number for handle in handles) == [1, 2, 3, 4, 5, 6]
    trainer.memory.save(tmp_path).result()
    with ReplayMemory.load(tmp_path) as loaded:
        trainer.require_same(loaded)


def test_an_error_of_the_progress_callback_does_not_end_the_save(
    tmp_path: Path, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[tuple[str, int]] = []

    def tell(phase: str, nbytes: int) -> None:
        reports.append((phase, nbytes))
        raise RuntimeError("no terminal")

    trainer.add(20)
    with caplog.at_level(logging.WARNING, "holdall"):
        checkpoint = trainer.memory.save(tmp_path, progress=tell).result()
    assert [phase for phase, _ in reports][-1] == "commit"
    assert reports[-1][1] == checkpoint.bytes_written


def test_save_every_saves_at_intervals_until_the_memory_is_closed(tmp_path: Path, trainer: Trainer) -> None:
    trainer.memory.save_every(tmp_path, 0.02, keep=1)
    trainer.add(60)
    while not list((tmp_path / "manifests").glob("*.json")):
        trainer.add(1)
    trainer.memory.save_every(tmp_path, 0.01, keep=2)
    added = trainer.memory.next_id
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with ReplayMemory.load(tmp_path) as loaded:
            if loaded.next_id == added:
                trainer.require_same(loaded)
                break
    else:
        pytest.fail("nothing was saved")
    trainer.memory.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdall-autosave"]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_save_every_saves_after_the_number_of_transitions_and_not_before(tmp_path: Path, trainer: Trainer) -> None:
    trainer.memory.save_every(tmp_path, transitions=400)
    trainer.add(199)
    time.sleep(0.3)
    assert not list(tmp_path.glob("manifests/*.json"))
    trainer.add(1)
    wait_until(lambda: len(list(tmp_path.glob("manifests/*.json"))) == 1)
    trainer.add(100)
    time.sleep(0.3)
    assert len(list(tmp_path.glob("manifests/*.json"))) == 1
    trainer.add(100)
    wait_until(lambda: len(list(tmp_path.glob("manifests/*.json"))) == 2)
    trainer.memory.close()
    with ReplayMemory.load(tmp_path) as loaded:
        trainer.require_same(loaded)


def test_save_every_needs_seconds_or_transitions(tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(ArgumentError, match="neither seconds nor transitions"):
        trainer.memory.save_every(tmp_path)
    with pytest.raises(ArgumentError, match="transitions"):
        trainer.memory.save_every(tmp_path, transitions=0)


@pytest.mark.parametrize("seconds", [0, -1, True, "often", float("nan")])
def test_save_every_refuses_wrong_seconds(tmp_path: Path, trainer: Trainer, seconds: Any) -> None:
    with pytest.raises(ArgumentError, match="seconds"):
        trainer.memory.save_every(tmp_path, seconds)


def test_old_checkpoints_are_removed_without_parsing_the_rest(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory remembers its manifests. Parsing one with thousands of records would keep the GIL from training."""
    trainer.memory.save(tmp_path, keep=2).result()
    with monkeypatch.context() as patch:
        patch.setattr("holdall.checkpoint.manifest.parse_json", pytest.fail)
        for _ in range(4):
            trainer.add(10)
            trainer.memory.save(tmp_path, keep=2).result()
    assert sorted(path.name for path in tmp_path.glob("manifests/*")) == [
        "0000000000000004.json",
        "0000000000000005.json",
    ]


def test_a_checkpoint_that_was_damaged_since_it_was_saved_does_not_count_as_kept(
    tmp_path: Path, trainer: Trainer
) -> None:
    """The last complete checkpoints stay, although the memory remembers the manifest of the damaged one."""
    for _ in range(3):
        trainer.add(10)
        trainer.memory.save(tmp_path, keep=3).result()
    damaged = tmp_path / "manifests" / "0000000000000003.json"
    raw = damaged.read_bytes()
    damaged.write_bytes(raw[:40] + bytes([raw[40] ^ 1]) + raw[41:])
    trainer.memory.save(tmp_path, keep=2).result()
    assert sorted(path.name[:-5].lstrip("0") for path in tmp_path.glob("manifests/*")) == ["2", "4"]
    trainer.memory.close()
    with ReplayMemory.load(tmp_path) as loaded:
        trainer.require_same(loaded)


@pytest.mark.parametrize("keep", [0, -1, 1.5, True, "3"])
def test_save_refuses_a_wrong_keep(tmp_path: Path, trainer: Trainer, keep: Any) -> None:
    with pytest.raises(ArgumentError, match="keep"):
        trainer.memory.save(tmp_path, keep=keep)


def test_a_save_can_succeed_after_one_that_failed(tmp_path: Path, trainer: Trainer) -> None:
    """The first one fails because a file has the name of the directory."""
    trainer.add(20)
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(CheckpointError, match="could not be"):
        trainer.memory.save(tmp_path / "run").result()
    (tmp_path / "run").unlink()
    trainer.memory.save(tmp_path / "run").result()
    with ReplayMemory.load(tmp_path / "run") as loaded:
        trainer.require_same(loaded)


def test_open_windows_with_unequal_lanes_are_saved_completely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a window has a row for all lanes. At the end of an episode, one lane is ahead of the others."""
    space = spaces.Box(-np.inf, np.inf, (64, 4), np.float32)

    def seen(numbers: Any) -> Any:
        return (numbers[:, None, None] * 7 + np.arange(64)[None, :, None] * 7 + np.arange(4)).astype(np.float32)

    with ReplayMemory(space, spaces.Discrete(2), 4000, 4, seed=0) as memory:
        for tick in range(200):
            ids = np.arange(4) * 5000 + tick
            ends = np.array([tick % 9 == 8, tick % 31 == 30, False, False])
            after = np.where(ends, ids + 100_000, ids + 1)
            memory.add(seen(ids), np.zeros(4, np.int64), ids.astype(np.float64), seen(after), ends, ends & False)
            if tick % 20 == 19:
                memory.save(tmp_path / "run").result()
                every = np.arange(memory.next_id)
                with ReplayMemory.load(tmp_path / "run") as loaded:
                    assert_same_bits(loaded.gather(every), memory.gather(every))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "url is an empty text. Pass a path"),
        ("s3://", "names no bucket. Pass a URL like s3://bucket/run."),
        ("S3:///", "names no bucket. Pass a URL like s3://bucket/run."),
        ("s3:///run", "names no bucket. Pass a URL like s3://bucket/run."),
        ("az://", "names no container. Pass a URL like az://container/run."),
        ("s4://bucket/run", "has the unsupported scheme 's4'. Pass a directory, or a URL that starts with s3://"),
        ("gcs://bucket/run", "has the unsupported scheme 'gcs'"),
        ("file:///tmp/run", "has the unsupported scheme 'file'"),
        (Path("s3://bucket/run"), "has one slash after 's3', as pathlib.Path writes it. Pass a str with two slashes: "),
    ],
)
def test_a_wrong_url_is_refused_and_no_directory_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), 10) as memory:
        with pytest.raises(ArgumentError, match=re.escape(said)):
            memory.save(url)
        with pytest.raises(ArgumentError, match=re.escape(said)):
            ReplayMemory.load(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["train.py", "train.py/run"])
def test_a_file_is_refused_as_the_place_of_checkpoints_and_stays(tmp_path: Path, name: str) -> None:
    """The error does not advise to remove the file."""
    (tmp_path / "train.py").write_text("print()\n", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not a directory, so it contains no checkpoints") as refusal:
        ReplayMemory.load(tmp_path / name)
    assert "remove" not in str(refusal.value)
    with (
        ReplayMemory(spaces.Discrete(2), spaces.Discrete(2), 10) as memory,
        pytest.raises(CheckpointError, match="A part of this path is a file"),
    ):
        memory.save(tmp_path / name).result()
    assert (tmp_path / "train.py").read_text(encoding="utf-8") == "print()\n"


def test_an_incomplete_checkpoint_names_the_missing_file_and_recover(tmp_path: Path, trainer: Trainer) -> None:
    trainer.add(20)
    trainer.memory.save(tmp_path).result()
    trainer.memory.close()
    for file in (tmp_path / "segments").iterdir():
        file.unlink()
    with pytest.raises(
        CheckpointError, match=r"^No complete checkpoint found in .* Checkpoint 1 is missing file "
    ) as refusal:
        ReplayMemory.load(tmp_path)
    assert "recover=True" in str(refusal.value)
    with pytest.raises(CheckpointError, match=r"^No complete checkpoint found in .* does not exist") as refusal:
        ReplayMemory.load(tmp_path, recover=True)
    assert "recover=True" not in str(refusal.value)


def test_a_scheme_may_be_in_any_case_and_a_path_may_have_a_colon() -> None:
    assert normalized_url("S3://Bucket/Run/") == "s3://Bucket/Run"
    assert is_remote("S3://Bucket/Run")
    assert normalized_url("a:b/c") == str(Path.cwd() / "a:b" / "c")


def test_a_progress_callback_of_three_arguments_gets_the_total(tmp_path: Path, trainer: Trainer) -> None:
    """The total is known before anything is written, and is at least the number of bytes written."""
    reports: list[tuple[str, int, int]] = []
    trainer.add(200)
    checkpoint = trainer.memory.save(tmp_path, progress=lambda *report: reports.append(report)).result()
    assert reports[0][:2] == ("segments", 0)
    assert reports[-1] == ("commit", checkpoint.bytes_written, checkpoint.bytes_written)
    assert all(0 <= done <= total for _, done, total in reports)
    assert abs(reports[0][2] - checkpoint.bytes_written) < 0.3 * checkpoint.bytes_written


def test_a_checkpoint_of_uncompressed_blocks_is_as_small_as_one_of_compressed_blocks(tmp_path: Path) -> None:
    """The save uses the codec, and the order of slices, that the memory itself would use."""
    lanes = 8
    space = spaces.Box(0, 255, (3, 48, 48), np.uint8)
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 256, (lanes, *space.shape), np.uint8)
    steps = []
    for _ in range(161):  # Each lane changes a few pixels of its own picture.
        frames = frames.copy()
        frames[:, :, generator.integers(48), generator.integers(48)] ^= 1
        steps.append(frames)
    sizes: list[int] = []
    for budget in (None, "1GiB"):
        settings: dict[str, Any] = {"budget": budget, "prefer": "memory", "_tuning": Tuning(block_bytes=2**20)}
        with ReplayMemory(space, spaces.Discrete(2), 2000, lanes, **settings) as memory:
            for before, after in itertools.pairwise(steps):
                no = np.zeros(lanes, np.bool_)
                memory.add(before, np.zeros(lanes, np.int64), np.zeros(lanes, np.float32), after, no, no)
                memory.store.wait_idle()
            held = sum(field.total_bytes for field in memory.report().fields)
            assert budget is None or held > 4 * sizes[0]
            sizes.append(memory.save(tmp_path / str(budget)).result().bytes_total)
    assert sizes[1] <= 1.1 * sizes[0]


class RecordingSource:
    """A store as a source of blocks, and the compressed forms that a save offered to it."""

    def __init__(self, store: Store) -> None:
        self.prefer = store.prefer
        self.offered: dict[Block, Coded] = {}
        self._store = store

    def find_chosen_codec(self, leaf: int, layout: Any, /) -> Codec | None:
        return self._store.find_chosen_codec(leaf, layout)

    def offer_form(self, block: Block, coded: Coded, /) -> None:
        assert block not in self.offered
        self.offered[block] = coded


def test_a_save_offers_the_compressed_forms_of_all_closed_uncompressed_blocks(tmp_path: Path) -> None:
    """The memory uses the forms of those blocks that its budget wants compressed."""
    trainer = Trainer(budget="1GiB")
    with trainer.memory as memory:
        trainer.add(200)
        store = memory.store
        assert isinstance(store, Store)
        source = RecordingSource(store)
        snapshot = MemorySnapshot(store.snapshot(), schema_to_json(memory.schema), 600, {}, source)
        savers = Savers()
        savers.save(lambda: snapshot, tmp_path).result()
        savers.close()
        blocks = {block for segment in store.snapshot().segments for block in list_blocks(segment)}
        closed = {block for block in blocks if isinstance(block.form, Raw) and not block.is_open}
        assert len(closed) >= 3
        assert closed <= set(source.offered)
        assert not any(block.is_open for block in source.offered)
        for block in closed:
            slices = block.read(0, block.slice_count)
            assert np.array_equal(decode(source.offered[block], 0, block.slice_count), slices)

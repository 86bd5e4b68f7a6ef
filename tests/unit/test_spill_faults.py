"""Disks fill up, disappear and rot: rows stay right, memory is bounded, a message names the fault, training continues.

The faults are real. Some need a process of their own: `python test_spill_faults.py SCENARIO FOLDER` runs one of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import DamageError, ReplayMemory
from holdall._native import Block, Coded
from holdall.store.spill import SpillFile, SpillFolder
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

SHAPE = (80, 60)
LIMIT = 400_000
SMALL = Tuning(segments_per_limit=16, staging_divisor=64, spill_file_bytes=1, spill_files=10**6)
"""Small segments, one block per file, and little room in memory, so that blocks are soon moved to disk."""
NOBODY = 65534


class BlockOnDisk(NamedTuple):
    """The place of a block on disk."""

    file: SpillFile
    start: int
    nbytes: int


class Film:
    """A memory with a disk tier, and the oracle, fed with the same frames."""

    def __init__(self, folder: Path) -> None:
        settings: dict[str, Any] = {"budget": LIMIT, "spill_dir": folder, "prefer": "memory", "_tuning": SMALL}
        self.memory = ReplayMemory(box(SHAPE, "u1"), spaces.Discrete(2), 6_000, **settings)
        self.oracle = OracleMemory(6_000)
        self._generator = np.random.default_rng(0)
        self._now = self._frame()

    def feed(self, count: int) -> None:
        flag = np.zeros(1, np.bool_)
        for _ in range(count):
            then = self._frame()
            given = (self._now, np.zeros(1, np.int64), np.ones(1, np.float32), then, flag, flag)
            self.memory.add(*given)
            self.oracle.add(*given)
            self._now = then

    def settle(self) -> None:
        """Wait for the compactor, and evict transitions from the oracle that were dropped early."""
        self.memory.store.wait_idle()
        self.oracle.evict(self.memory.first_id)

    def check(self) -> None:
        """Check that every held row is right, and that the bytes in memory are within the limit."""
        self.settle()
        assert len(self.memory) == len(self.oracle)
        assert self.memory.first_id == self.oracle.first_id
        assert_same_bits(self.memory.gather(self.oracle.ids), self.oracle.gather(self.oracle.ids))
        assert self.memory.report().total_bytes <= LIMIT

    def check_drops_are_reported(self) -> None:
        """Check that the report counts the transitions that were dropped early, and names the reason."""
        report = self.memory.report()
        assert report.dropped_early == self.memory.first_id > 0
        assert f"{report.dropped_early} transitions were dropped early" in str(report)
        assert "spill_dir" in report.drop_reason
        assert report.failure

    def find_blocks_on_disk(self) -> list[tuple[BlockOnDisk, NDArray[np.int64]]]:
        """Return the blocks on disk, each with the ids whose frames are in it and in no other block."""
        found: dict[Block, list[int]] = {}
        for segment in self.memory.host_store.catalog.segments:
            block = segment.parts[0].block
            assert block is not None
            found.setdefault(block, []).extend(range(segment.first_tick, segment.first_tick + segment.ticks))
        result = []
        for block, ids in found.items():
            form = block.form
            if isinstance(form, Coded) and form.location is not None:
                _, start, nbytes = form.location
                assert isinstance(form.file, SpillFile)
                result.append((BlockOnDisk(form.file, start, nbytes), np.array(ids)))
        return result

    def _frame(self) -> NDArray[np.uint8]:
        """Return noise in tiles of three pixels, which every codec can compress."""
        return self._generator.integers(0, 5, (1, SHAPE[0], SHAPE[1] // 3), np.uint8).repeat(3, axis=2)


def break_and_mend(film: Film, break_disk: Callable[[], object], mend_disk: Callable[[], object], reason: str) -> None:
    """Spill, break the disk, add many frames, mend the disk, and add more."""
    film.feed(200)
    film.check()
    assert film.memory.first_id == 0
    assert film.find_blocks_on_disk()
    break_disk()
    for _ in range(10):
        film.feed(60)
        film.check()
    failure = film.memory.report().failure
    assert reason in failure, failure
    assert "spill_dir" in failure
    assert reason in str(film.memory.report())
    assert film.memory.first_id > 0, "transitions must be dropped early while the disk refuses writes"
    mend_disk()
    film.feed(100)
    film.settle()
    film.check_drops_are_reported()
    first_id = film.memory.first_id
    film.feed(300)
    film.check()
    assert film.memory.first_id == first_id, "no transition may be dropped early once the disk works again"
    film.check_drops_are_reported()
    assert len(film.find_blocks_on_disk()) > 10


# ---------------------------------------------------------------- a disk that refuses writes


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a file system of one MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("only root may mount a small disk; see the test with a limit on the size of files")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_training_continues_when_the_disk_is_full(small_disk: Path) -> None:
    """Another program writes to the disk until no block is free."""
    ballast = small_disk / "ballast"

    def fill_up() -> None:
        with ballast.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass
        keep_full()

    def keep_full() -> None:
        # Transitions that are dropped early free space on the disk. A neighbour fills that space, too.
        def greedy() -> None:
            while not mended.wait(0.0005):
                try:
                    with ballast.open("ab", buffering=0) as file:
                        file.write(bytes(1 << 12))
                except OSError:
                    pass

        mended.clear()
        neighbour.append(threading.Thread(target=greedy))
        neighbour[0].start()

    def mend() -> None:
        mended.set()
        neighbour[0].join()
        ballast.unlink()

    mended = threading.Event()
    neighbour = list[threading.Thread]()
    film = Film(small_disk / "spilled")
    with film.memory:
        try:
            break_and_mend(film, fill_up, mend, "No space left on device")
        finally:
            mended.set()


class Quota:
    """A disk with room for `nbytes` in a folder: writes beyond that are cut short, and the next one fails."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path, nbytes: int) -> None:
        self._folder = folder
        self._nbytes = nbytes
        self._write = os.write
        patch.setattr(os, "write", self.write)
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=self.free))

    @property
    def free(self) -> int:
        used = 0
        for file in self._folder.glob("*/*.seg"):
            with contextlib.suppress(FileNotFoundError):  # It was deleted meanwhile.
                used += file.stat().st_size
        return self._nbytes - used

    def write(self, descriptor: int, data: Any) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".seg":
            data = data[: self.free]
            if not data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(descriptor, data)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the name of a written file in /proc")
def test_a_full_disk_stays_full_and_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Few transitions are dropped at a time, as new ones are added. Blocks on the disk stay there."""
    quota = 200_000
    Quota(monkeypatch, tmp_path, quota)
    film = Film(tmp_path)
    with film.memory:
        while film.memory.report().dropped_early == 0:
            film.feed(10)
        most = len(film.memory) + film.memory.report().dropped_early
        for _ in range(20):
            dropped = film.memory.report().dropped_early
            film.feed(50)
            film.check()
            film.check_drops_are_reported()
            assert len(film.memory) > 0.95 * most
            assert film.memory.report().dropped_early - dropped < 50 + 30, "not many more than were added"
            assert film.memory.report().disk_bytes > 0.75 * quota
            assert film.find_blocks_on_disk()
        messages = [record.getMessage() for record in caplog.records]
        drops = [message for message in messages if "dropped before the capacity was reached" in message]
        assert 1 <= len(drops) <= 4, "one message for the first drop, and one when ten times as many were dropped"
        assert all("Free disk space" in message for message in drops)
        assert sum(message.startswith("A block could not be written") for message in messages) == 1


def test_training_continues_when_the_folder_is_deleted(tmp_path: Path) -> None:
    """Spilled blocks stay readable, because their files are open. The memory makes the folder again."""
    place = tmp_path / "spilled"
    film = Film(place)
    with film.memory:
        film.feed(200)
        film.settle()
        folder = next(place.iterdir())
        shutil.rmtree(folder)
        film.feed(200)
        film.check()
        assert film.memory.first_id == 0
        assert film.memory.report().failure == ""
        assert list(place.glob("*/lock")), "the lock shows later processes that this folder is in use"
        SpillFolder(place, SMALL).close()
        assert list(place.glob("*/*.seg")), "another process must not delete a folder in use"
    assert not list(place.iterdir())


def test_training_continues_when_all_of_spill_dir_is_deleted(tmp_path: Path) -> None:
    """It may be a disk that is no longer mounted, so it is not made again. It is used once it exists again."""
    place = tmp_path / "spilled"
    film = Film(place)
    with film.memory:
        break_and_mend(film, lambda: shutil.rmtree(place), place.mkdir, "No such file or directory")


def limit_files(folder: Path) -> None:
    """Limit the size of files to less than a block, as a quota does."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    film = Film(folder)
    with film.memory:
        break_and_mend(
            film,
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, hard)),
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
            "File too large",
        )


def make_read_only(folder: Path) -> None:
    """Take write permission away and give it back, as a user who is not root."""
    with Film(folder / "loaded").memory as memory:
        memory.store.wait_idle()  # Now the process has loaded all modules that it needs.
    place = folder / "spilled"
    place.mkdir()
    if os.getuid() == 0:
        os.chown(place, NOBODY, NOBODY)
        os.setuid(NOBODY)
    film = Film(place)
    own = next(place.iterdir())
    with film.memory:
        break_and_mend(film, lambda: own.chmod(0o500), lambda: own.chmod(0o700), "Permission denied")
        shutil.rmtree(own)  # The owner deletes it, because the parent folder belongs to another user.


SCENARIOS = {"limit": limit_files, "read only": make_read_only}


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX limits and rights")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training_continues_when_files_cannot_grow_or_the_folder_is_read_only(scenario: str) -> None:
    # The process may run as another user, who cannot read tmp_path.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        command = [sys.executable, __file__, scenario, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd="/")
        assert done.returncode == 0, done.stderr[-3000:]


def test_a_spill_dir_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    """The refusal comes before anything is added. The message names the argument, its value and the reason."""
    taken = tmp_path / "file"
    taken.write_text("not a folder")
    for place in (taken, taken / "below"):
        with pytest.raises(ValueError, match=r"^spill_dir \(.*file.*\) cannot be written to") as caught:
            Film(place)
        assert str(place) in str(caught.value)


# ---------------------------------------------------------------- files that rot


def make_flip(position: int) -> Callable[[BlockOnDisk], None]:
    def spoil(extent: BlockOnDisk) -> None:
        with extent.file.path.open("r+b", buffering=0) as file:
            file.seek(extent.start + position % extent.nbytes)
            byte = file.read(1)[0]
            file.seek(extent.start + position % extent.nbytes)
            file.write(bytes([byte ^ 0x10]))

    return spoil


def write_zeros(extent: BlockOnDisk) -> None:
    with extent.file.path.open("r+b", buffering=0) as file:
        file.seek(extent.start)
        file.write(bytes(extent.nbytes))


DAMAGES: dict[str, Callable[[BlockOnDisk], None]] = {
    "first byte": make_flip(0),
    "a byte within": make_flip(2_345),
    "last byte": make_flip(-1),
    "all zero": write_zeros,
    "cut by a byte": lambda extent: os.truncate(extent.file.path, extent.start + extent.nbytes - 1),
    "cut to nothing": lambda extent: os.truncate(extent.file.path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_a_file_raises_an_error_that_names_the_file(damage: str, tmp_path: Path) -> None:
    """Rows in other files are still returned, and `add` works."""
    film = Film(tmp_path)
    with film.memory:
        film.feed(250)
        film.check()
        (extent, ids), *others = film.find_blocks_on_disk()
        DAMAGES[damage](extent)
        refused = []
        for number in ids:
            try:
                assert_same_bits(film.memory.gather([number]), film.oracle.gather([number]))
            except DamageError as error:
                refused.append(str(error))
        assert refused
        assert all(str(extent.file.path) in message for message in refused)
        with pytest.raises(DamageError, match=r"\.seg"):
            film.memory.gather(film.oracle.ids)
        whole = np.concatenate([there for _, there in others])
        assert_same_bits(film.memory.gather(whole), film.oracle.gather(whole))
        film.feed(100)
        film.settle()
        rest = np.setdiff1d(film.oracle.ids, ids)
        assert_same_bits(film.memory.gather(rest), film.oracle.gather(rest))
        film.memory.gather(rest[:64])


def test_a_flipped_byte_anywhere_in_a_block_is_noticed(tmp_path: Path) -> None:
    """Some bytes belong to a header that the decompressor reads, and some to noise that it copies."""
    film = Film(tmp_path)
    with film.memory:
        film.feed(150)
        film.check()
        extent, ids = film.find_blocks_on_disk()[0]
        expected = film.oracle.gather(ids)
        for position in np.linspace(0, extent.nbytes - 1, 40).astype(int).tolist():
            make_flip(position)(extent)
            with pytest.raises(DamageError):
                film.memory.gather(ids)
            make_flip(position)(extent)
            assert_same_bits(film.memory.gather(ids), expected)


def test_every_batch_reads_its_blocks_again(tmp_path: Path) -> None:
    """Another block may be stored at the same place meanwhile."""
    film = Film(tmp_path)
    with film.memory:
        film.feed(150)
        film.check()
        for extent, ids in film.find_blocks_on_disk()[:5]:
            number = ids[-1]
            assert_same_bits(film.memory.gather([number]), film.oracle.gather([number]))
            write_zeros(extent)
            with pytest.raises(DamageError):
                film.memory.gather([number])


def test_the_error_names_the_damaged_block_that_the_batch_needs(tmp_path: Path) -> None:
    """It does not name the block with the preceding ticks, which is damaged, too."""
    film = Film(tmp_path)
    with film.memory:
        film.feed(150)
        film.check()
        (before, _), (needed, ids) = film.find_blocks_on_disk()[:2]
        write_zeros(before)
        write_zeros(needed)
        with pytest.raises(DamageError) as caught:
            film.memory.gather(ids[:1])
        assert str(needed.file.path) in str(caught.value)
        assert "Check the disk of spill_dir" in str(caught.value)


def test_a_descriptor_that_was_closed_by_other_code_raises_an_error(tmp_path: Path) -> None:
    """Some code closes all descriptors that it does not know. Blocks in other files are still read."""
    film = Film(tmp_path)
    with film.memory:
        film.feed(250)
        film.check()
        (extent, ids), *others = film.find_blocks_on_disk()
        os.close(extent.file.descriptor)
        try:
            with pytest.raises(DamageError, match="Bad file descriptor") as caught:
                film.memory.gather(ids)
            assert str(extent.file.path) in str(caught.value)
            whole = np.concatenate([there for _, there in others])
            assert_same_bits(film.memory.gather(whole), film.oracle.gather(whole))
        finally:
            null = os.open(os.devnull, os.O_RDONLY)
            if null != extent.file.descriptor:
                os.dup2(null, extent.file.descriptor)
                os.close(null)


if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))

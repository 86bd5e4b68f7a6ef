"""The disk tier: a folder for every memory, files that go with their last block, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall.errors import ArgumentError, SpillError
from holdall.native import chosen_kernels
from holdall.schema import Bytes
from holdall.storage import records
from holdall.storage.blocks import Codec, Dictionary, Extent, Method, SealedSlices, Transform
from holdall.storage.own_folder import _take_lock
from holdall.storage.records import (
    DICTIONARY,
    SLICES,
    Record,
    SpillFolder,
    unpack,
    unpack_dictionary,
    unpack_slices,
)
from holdall.storage.ticks import Coder

LOCKS = Path("/proc/locks")

COUNT, SIZE = 12, 700
CODERS: list[Coder] = [chosen_kernels().coder]
COMMON = [Dictionary(bytes(range(256)) * 2), Dictionary(b"frames of a film " * 30)]


@pytest.fixture(params=CODERS, ids=lambda coder: type(coder).__name__)
def coder(request: pytest.FixtureRequest) -> Coder:
    found: Coder = request.param
    return found


def slices_of(seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 4, (COUNT, SIZE), np.uint8)


def sealed_by(coder: Coder, seed: int = 0, dictionary: Dictionary | None = None, group: int = 1) -> SealedSlices:
    sealed = coder.seal(slices_of(seed), Codec(Method.ZSTD, 3, Transform(SIZE), dictionary, group))
    assert sealed is not None
    return sealed


def rows_of(coder: Coder, sealed: SealedSlices) -> bytes:
    out = np.empty((COUNT, SIZE), np.uint8)
    coder.decode(sealed, np.arange(COUNT), out)
    return out.tobytes()


def files_in(place: Path) -> list[Path]:
    return sorted(place.glob("*/*.seg"))


def extent_of(sealed: SealedSlices) -> Extent:
    assert sealed.extent is not None
    return sealed.extent


def records_in(path: Path) -> Iterator[Record]:
    content = path.read_bytes()
    start = 0
    while start < len(content):
        record = unpack(lambda first, nbytes: content[first : first + nbytes], start, len(content))
        yield record
        start += record.nbytes


# ---------------------------------------------------------------- blocks


@pytest.mark.parametrize("group", [1, 5])
def test_a_block_that_was_written_is_read_from_its_file(coder: Coder, group: int, tmp_path: Path) -> None:
    """Bit for bit; in memory only its index is left."""
    folder = SpillFolder(tmp_path, coder)
    blocks = [folder.write(sealed_by(coder, seed, COMMON[seed % 2], group)) for seed in range(6)]
    for seed, block in enumerate(blocks):
        assert rows_of(coder, block) == slices_of(seed).tobytes()
        whole = sealed_by(coder, seed, COMMON[seed % 2], group)
        assert block.disk_bytes == whole.coded.data.nbytes
        assert block.nbytes == whole.nbytes - whole.coded.data.nbytes + extent_of(block).checks.nbytes
    folder.close()


def test_a_block_that_lies_in_a_file_is_not_written_again(coder: Coder, tmp_path: Path) -> None:
    """It is handed back as it is."""
    folder = SpillFolder(tmp_path, coder)
    block = folder.write(sealed_by(coder))
    before = files_in(tmp_path)[0].stat().st_size
    assert folder.write(block) is block
    assert files_in(tmp_path)[0].stat().st_size == before
    folder.close()


def test_a_block_that_could_not_be_written_takes_no_disk_space(
    coder: Coder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full has room for the part that was written before the disk was full; it is given back."""
    folder = SpillFolder(tmp_path, coder)
    block = folder.write(sealed_by(coder, 0))
    path = files_in(tmp_path)[0]
    complete_bytes = path.stat().st_size
    write, left = os.write, [700]

    def write_until_full(descriptor: int, data: Any) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: left[0]])
        left[0] -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(os, "write", write_until_full)
        with pytest.raises(SpillError, match="No space left on device"):
            folder.write(sealed_by(coder, 1, COMMON[0]))
    assert left == [0], "a part was written"
    assert path.stat().st_size == complete_bytes
    later = folder.write(sealed_by(coder, 1, COMMON[0]))
    assert rows_of(coder, block) == slices_of(0).tobytes()
    assert rows_of(coder, later) == slices_of(1).tobytes()
    folder.close()


def test_several_blocks_share_a_file(coder: Coder, tmp_path: Path) -> None:
    """A descriptor for each of them would soon be too many."""
    folder = SpillFolder(tmp_path, coder)
    blocks = [folder.write(sealed_by(coder, seed)) for seed in range(20)]
    assert len(files_in(tmp_path)) == 1
    assert len({id(extent_of(block).file) for block in blocks}) == 1
    folder.close()


def test_a_dictionary_is_written_once_in_every_file(coder: Coder, tmp_path: Path, monkeypatch: Any) -> None:
    """Before the first block that needs it, so that a file can be read by itself."""
    monkeypatch.setattr(records, "_FILE_BYTES", 20_000)
    folder = SpillFolder(tmp_path, coder)
    blocks = [folder.write(sealed_by(coder, seed, COMMON[seed % 2])) for seed in range(24)]
    files = files_in(tmp_path)
    assert 1 < len(files) < 6, "so that every file holds several blocks of either dictionary"
    found = 0
    for path in files:
        known: dict[str, Dictionary] = {}
        file = next(extent_of(block).file for block in blocks if extent_of(block).file.path == path)
        for record in records_in(path):
            if record.kind == DICTIONARY:
                dictionary = unpack_dictionary(record, file)
                assert dictionary.name not in known, "once is enough"
                known[dictionary.name] = dictionary
            else:
                assert record.kind == SLICES
                again = coder.adopt(unpack_slices(record, file, known))
                assert rows_of(coder, again) == slices_of(found).tobytes() == rows_of(coder, blocks[found])
                found += 1
        assert len(known) <= 2
    assert found == 24
    folder.close()


def test_the_number_of_files_grows_with_the_logarithm_of_what_is_written(coder: Coder, tmp_path: Path) -> None:
    """A thousand times as much takes a few times as many descriptors, while all of it is held."""
    patch = pytest.MonkeyPatch()
    with patch.context() as small:
        small.setattr(records, "_FILE_BYTES", 5_000)
        small.setattr(records, "_FILES", 4)
        small.setattr(os, "fdatasync", lambda _descriptor: None)  # 400 of them take long, and change no file
        folder = SpillFolder(tmp_path, coder)
        counts, blocks, sealed = [], [], sealed_by(coder)
        for number in range(400):
            blocks.append(folder.write(sealed))
            if number + 1 in {25, 50, 100, 200, 400}:
                counts.append(len(files_in(tmp_path)))
    steps = np.diff(counts)
    assert counts[-1] < 40
    assert steps[-1] <= steps[0] + 2, "from 200 to 400 blocks as few files are added as from 25 to 50"
    assert rows_of(coder, blocks[0]) == rows_of(coder, blocks[-1]) == slices_of().tobytes()
    folder.close()


def test_a_file_is_deleted_with_its_last_block(coder: Coder, tmp_path: Path, monkeypatch: Any) -> None:
    """Blocks that were evicted take no room; their descriptors are closed."""
    monkeypatch.setattr(records, "_FILE_BYTES", 5_000)
    folder = SpillFolder(tmp_path, coder)
    blocks = [folder.write(sealed_by(coder, seed)) for seed in range(12)]
    first = extent_of(blocks[0]).file
    sharing = [block for block in blocks if extent_of(block).file is first]
    path, descriptor = first.path, first.descriptor
    assert 1 < len(sharing) < 12
    del first, blocks[: len(sharing)], sharing[1:]
    gc.collect()
    assert path.exists()
    assert rows_of(coder, sharing[0]) == slices_of(0).tobytes()
    sharing.clear()
    gc.collect()
    assert not path.exists()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert rows_of(coder, blocks[0]) == slices_of(12 - len(blocks)).tobytes()
    folder.close()


def test_what_a_write_that_failed_left_behind_is_never_read(coder: Coder, tmp_path: Path) -> None:
    """The next block goes to a new file; those written before stay readable."""
    folder = SpillFolder(tmp_path, coder)
    before = folder.write(sealed_by(coder, 1))
    write, calls = os.write, iter(range(1000))

    def fail(descriptor: int, data: Any) -> int:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        return write(descriptor, memoryview(data)[:100])  # a system may take less than it is given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(SpillError, match=r"spill_dir \(.*No space left on device.*free disk space"):
            folder.write(sealed_by(coder, 2))
        after = folder.write(sealed_by(coder, 3))
    assert len(files_in(tmp_path)) == 2
    assert extent_of(after).file is not extent_of(before).file
    assert rows_of(coder, before) == slices_of(1).tobytes()
    assert rows_of(coder, after) == slices_of(3).tobytes()
    folder.close()


# ---------------------------------------------------------------- folders


def test_every_memory_has_a_folder_of_its_own(coder: Coder, tmp_path: Path) -> None:
    """Named so that nobody mistakes it; closing one leaves the others alone."""
    folders = [SpillFolder(tmp_path / "new" / "place", coder) for _ in range(3)]
    blocks = [folder.write(sealed_by(coder, seed)) for seed, folder in enumerate(folders)]
    names = [path.name for path in (tmp_path / "new" / "place").iterdir()]
    assert len(names) == 3
    assert all(re.fullmatch(r"holdall-spill-[0-9a-f]{16}", name) for name in names)
    folders[0].close()
    folders[0].close()
    assert len(list((tmp_path / "new" / "place").iterdir())) == 2
    assert rows_of(coder, blocks[1]) == slices_of(1).tobytes()
    assert rows_of(coder, blocks[0]) == slices_of(0).tobytes(), "who still refers to a block reads it"
    for folder in folders:
        folder.close()
    assert not list((tmp_path / "new" / "place").iterdir())


def test_a_folder_goes_when_it_is_dropped(coder: Coder, tmp_path: Path) -> None:
    """Without close too."""
    folder = SpillFolder(tmp_path, coder)
    folder.write(sealed_by(coder))
    assert list(tmp_path.iterdir())
    del folder
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_place_that_is_none_is_refused(coder: Coder, tmp_path: Path) -> None:
    """The message names the argument and its value."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=r"^spill_dir \(.*file\) cannot be written to .* name a directory"):
        SpillFolder(tmp_path / "file", coder)


HOLD = """
import sys, time
import numpy as np
from holdall.storage.blocks import Codec, Method, Transform
from holdall.native import chosen_kernels
from holdall.storage.records import SpillFolder

coder = chosen_kernels().coder
folder = SpillFolder(sys.argv[1], coder)
block = folder.write(coder.seal(np.zeros((12, 700), np.uint8), Codec(Method.ZSTD, 3, Transform(700))))
print("ready", flush=True)
sys.stdin.readline()
"""


def holding(place: Path) -> subprocess.Popen[str]:
    """Start a process that has spilled a block, and waits."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str], *, kill: bool) -> None:
    if kill:
        child.send_signal(signal.SIGKILL)
    child.communicate("go\n" if not kill else None, timeout=30)


@pytest.mark.skipif(
    sys.platform == "win32", reason="folders are not swept there: nothing tells whether a process lives"
)
def test_folders_of_killed_processes_are_swept_and_those_of_living_ones_left(tmp_path: Path) -> None:
    """By the next memory that spills to the same place; what others put there is none of its business."""
    (tmp_path / "holdall-spill-notes").mkdir()
    (tmp_path / "something.seg").write_text("else")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("")
    (tmp_path / "holdall-spill-0123456789abcdef").symlink_to(elsewhere, target_is_directory=True)
    others = {path.name for path in tmp_path.iterdir()}
    killed, living = holding(tmp_path), holding(tmp_path)
    try:
        assert len(list(tmp_path.iterdir())) == len(others) + 2
        end(killed, kill=True)
        left = {path.name for path in tmp_path.iterdir()}
        assert len(left) == len(others) + 2, "who is killed leaves its folder behind"
        folder = SpillFolder(tmp_path, CODERS[0])
        now = {path.name for path in tmp_path.iterdir()}
        assert len(now & left) == len(others) + 1
        assert len(files_in(tmp_path)) == 1, "the living one's"
        folder.close()
    finally:
        end(living, kill=False)
    assert {path.name for path in tmp_path.iterdir()} == others, "who ends by itself takes its folder along"
    assert (elsewhere / "lock").exists()


def test_folders_that_are_made_at_once_do_not_sweep_each_other(tmp_path: Path) -> None:
    """A folder has its name only once it is locked."""
    made: list[SpillFolder] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            made.extend(SpillFolder(tmp_path, CODERS[0]) for _ in range(15))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors[0]
    assert len(made) == len(list(tmp_path.iterdir())) == 60
    for folder in made:
        folder.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not swept there")
def test_what_is_left_of_a_folder_is_swept_too(tmp_path: Path) -> None:
    """Without its lock, or before it had its name; what another put into one stays."""
    names = [f"{dot}holdall-spill-{digit * 16}" for dot in ("", ".") for digit in "abc"]
    for number, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{number:08d}.seg").write_bytes(b"slices")
        if number % 2:
            (tmp_path / name / "lock").touch()
    (tmp_path / names[2] / "notes.txt").write_text("mine")
    (tmp_path / names[3] / "00000009.seg").symlink_to(tmp_path / names[2] / "notes.txt")
    folder = SpillFolder(tmp_path, CODERS[0])
    assert {path.name for path in tmp_path.iterdir()} - {names[2]} == {folder._folder._path.name}
    assert [path.read_text() for path in (tmp_path / names[2]).iterdir()] == ["mine"]
    folder.close()


@pytest.mark.skipif(os.name != "posix", reason="needs modes")
@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_nobody_else_enters_the_folder_whatever_the_umask(coder: Coder, tmp_path: Path, mask: int) -> None:
    """Its files have the mode that a checkpoint's have: they may become part of one."""
    before = os.umask(mask)
    try:
        folder = SpillFolder(tmp_path / "spill", coder)
        folder.write(sealed_by(coder))
    finally:
        os.umask(before)
    (path,) = (tmp_path / "spill").iterdir()
    assert path.stat().st_mode & 0o777 == 0o700
    assert files_in(tmp_path / "spill")[0].stat().st_mode & 0o777 == 0o644 & ~mask
    folder.close()


@pytest.mark.skipif(not LOCKS.exists(), reason="this system does not say who waits for a lock")
def test_a_lock_whose_file_was_replaced_meanwhile_is_none(tmp_path: Path) -> None:
    """Who sweeps a folder deletes its lock; who waited for that one would lock nothing that others see."""
    fcntl = pytest.importorskip("fcntl")
    lock, raised = tmp_path / "lock", threading.Event()

    def wait() -> None:
        with pytest.raises(FileNotFoundError):
            _take_lock(tmp_path, is_patient=True)
        raised.set()

    with lock.open("w") as swept:
        fcntl.flock(swept, fcntl.LOCK_EX)
        waiting = threading.Thread(target=wait)
        waiting.start()
        inode = f":{lock.stat().st_ino} "
        while not any("->" in line and inode in line for line in LOCKS.read_text(encoding="ascii").splitlines()):
            assert waiting.is_alive()
        lock.unlink()
        lock.touch()
    waiting.join(60)
    assert raised.is_set()

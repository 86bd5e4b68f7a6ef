"""Blocks on disk read the same, and the disk holds no file that no block needs."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from holdall._native import Coded, decode, encode
from holdall.errors import ClosedError
from holdall.store.spill import SpillFile, SpillFolder
from holdall.store.tuning import Tuning

TUNING = Tuning(spill_file_bytes=250, spill_files=1000, write_bytes=30)
STORED = SimpleNamespace(parameters=(10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1), dictionary=None)


def make_coded(number: int = 0) -> Coded:
    """Return ten compressed slices whose data has 100 bytes."""
    coded = encode((np.arange(100) + number).astype(np.uint8), STORED)
    assert coded is not None
    return coded


def list_files(spill_dir: Path) -> list[str]:
    return sorted(path.name for path in spill_dir.glob("*/*.seg"))


def get_file(coded: Coded) -> SpillFile:
    assert isinstance(coded.file, SpillFile)
    return coded.file


def test_blocks_read_the_same_from_disk(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path / "new" / "spill", TUNING)
    coded = [make_coded(number) for number in range(7)]
    filed = [folder.store(one) for one in coded]
    for before, after in zip(coded, filed, strict=True):
        assert after.location is not None
        assert np.array_equal(decode(before, 0, 10), decode(after, 0, 10))
    folder.close()


def test_a_file_is_finished_at_its_size(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    filed = [folder.store(make_coded()) for _ in range(5)]
    assert [get_file(one).number for one in filed] == [0, 0, 1, 1, 2]
    assert list_files(tmp_path) == ["00000000.seg", "00000001.seg", "00000002.seg"]
    assert folder.disk_bytes == 500
    folder.close()


def test_files_grow_with_the_tier(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, Tuning(spill_file_bytes=100, spill_files=2))
    filed = [folder.store(make_coded()) for _ in range(50)]
    assert len({get_file(one).number for one in filed}) < 15
    folder.close()


def test_a_block_larger_than_a_file_gets_its_own(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, Tuning(spill_file_bytes=50))
    filed = [folder.store(make_coded()) for _ in range(2)]
    assert [get_file(one).number for one in filed] == [0, 1]
    folder.close()


def test_a_block_that_is_on_disk_is_not_written_again(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    filed = folder.store(make_coded())
    assert folder.store(filed) is filed
    assert folder.disk_bytes == 100
    folder.close()


def test_a_file_is_deleted_with_its_last_block(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    filed = [folder.store(make_coded()) for _ in range(4)]
    del filed[0]
    gc.collect()
    assert list_files(tmp_path) == ["00000000.seg", "00000001.seg"]
    del filed[0]
    gc.collect()
    assert list_files(tmp_path) == ["00000001.seg"]
    assert folder.disk_bytes == 200
    folder.close()


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
def test_the_folder_is_deleted_while_its_blocks_stay_readable(tmp_path: Path, is_closed: bool) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    coded = make_coded()
    filed = folder.store(coded)
    if is_closed:
        folder.close()
        folder.close()
        with pytest.raises(ClosedError):
            folder.store(coded)
    del folder
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert np.array_equal(decode(filed, 0, 10), decode(coded, 0, 10))


@pytest.mark.parametrize("blocks_before", [0, 1])
def test_a_full_disk_raises_and_leaves_nothing_behind(
    tmp_path: Path, blocks_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    filed = [folder.store(make_coded()) for _ in range(blocks_before)]
    write = os.write
    written = []

    def fail_at_third_write(descriptor: int, data: memoryview) -> int:
        written.append(len(data))
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail_at_third_write)
        with pytest.raises(OSError, match="No space left"):
            folder.store(make_coded(1))
    assert written == [30, 30, 30]
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.seg")) == folder.disk_bytes == 100 * blocks_before
    assert len(list_files(tmp_path)) == blocks_before
    filed.append(folder.store(make_coded(2)))
    assert np.array_equal(decode(filed[-1], 0, 10), decode(make_coded(2), 0, 10))
    folder.close()


def test_a_failed_write_leaks_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_descriptor: int, _data: memoryview) -> int:
        raise OSError(errno.EIO, "Input/output error")

    folder = SpillFolder(tmp_path, TUNING)
    before = os.dup(0)
    os.close(before)
    monkeypatch.setattr(os, "write", fail)
    for _ in range(3):
        with pytest.raises(OSError, match="Input/output"):
            folder.store(make_coded())
    after = os.dup(0)
    os.close(after)
    assert after == before
    folder.close()


def test_a_folder_that_somebody_deleted_is_made_again(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    first = folder.store(make_coded())
    for path in tmp_path.glob("*/*"):
        path.unlink()
    next(tmp_path.iterdir()).rmdir()
    second = folder.store(make_coded(1))
    assert np.array_equal(decode(first, 0, 10), decode(make_coded(), 0, 10))
    assert np.array_equal(decode(second, 0, 10), decode(make_coded(1), 0, 10))
    folder.close()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from holdall.store.spill import SpillFolder
from holdall.store.tuning import Tuning
folder = SpillFolder(sys.argv[1], Tuning())
path = next(os.scandir(sys.argv[1])).path
open(os.path.join(path, "00000000.seg"), "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_only_folders_of_dead_processes_are_deleted(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    stale = next(tmp_path.iterdir())
    (tmp_path / "holdall-spill-mine").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "00000007.seg").touch()
    (tmp_path / f"holdall-spill-{'0' * 16}").symlink_to(tmp_path / "linked")
    alive = SpillFolder(tmp_path, TUNING)
    filed = alive.store(make_coded())
    SpillFolder(tmp_path, TUNING).close()
    assert not stale.exists()
    assert len(list(tmp_path.glob("*/00000000.seg"))) == 1
    assert (tmp_path / "linked" / "00000007.seg").exists()
    assert (tmp_path / "holdall-spill-mine").is_dir()
    assert decode(filed, 0, 10).shape == (10, 10)
    alive.close()


def test_a_foreign_file_in_the_folder_is_kept(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    foreign = next(tmp_path.iterdir()) / "notes.txt"
    foreign.write_text("mine")
    folder.close()
    assert foreign.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reads_its_parents_files_and_deletes_none(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path, TUNING)
    filed = folder.store(make_coded())
    child = os.fork()
    if child == 0:
        is_same = np.array_equal(decode(filed, 0, 10), decode(make_coded(), 0, 10))
        own = folder.store(make_coded(1))
        is_apart = get_file(own) is not get_file(filed) and len(list(tmp_path.iterdir())) == 2
        folder.close()
        del filed
        gc.collect()
        os._exit(0 if is_same and is_apart else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list_files(tmp_path)) == 1
    assert np.array_equal(decode(filed, 0, 10), decode(make_coded(), 0, 10))
    folder.close()
    assert list(tmp_path.iterdir()) == []


LIMITED = """
import resource, signal, sys
from types import SimpleNamespace
from holdall._native import encode
from holdall.store.spill import SpillFolder
from holdall.store.tuning import Tuning
stored = SimpleNamespace(parameters=(10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1), dictionary=None)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
folder = SpillFolder(sys.argv[1], Tuning())
kept = folder.store(encode(bytes(4000), stored))
try:
    folder.store(encode(bytes(4000), stored))
except OSError as error:
    print(type(error).__name__, folder.disk_bytes)
"""


def test_a_file_size_limit_of_the_system_is_an_oserror(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "OSError 4000\n", "")
    assert list(tmp_path.iterdir()) == []

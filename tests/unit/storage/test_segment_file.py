"""Segment files are read by position, stay readable while somebody refers to them, and go when nobody does."""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from holdall.errors import DamageError
from holdall.storage import blocks as segment_file
from holdall.storage.blocks import Extent, SegmentFile

CONTENT = bytes(range(256)) * 40


def file_at(path: Path, *, is_temporary: bool = True) -> SegmentFile:
    path.write_bytes(CONTENT)
    return SegmentFile(path, os.open(path, os.O_RDONLY), is_temporary=is_temporary)


def extent_of(file: SegmentFile, start: int = 100, nbytes: int = 5_000) -> Extent:
    return Extent(file, start, nbytes, np.zeros(1, np.uint32))


def test_what_stands_at_a_position_is_read(tmp_path: Path) -> None:
    """Any stretch of it; at the file's end, what is left."""
    file = file_at(tmp_path / "a.seg")
    for start, nbytes in ((0, 10), (7, 5_000), (0, len(CONTENT)), (len(CONTENT) - 3, 3), (50, 0)):
        assert file.read(start, nbytes) == CONTENT[start : start + nbytes]
    assert file.read(len(CONTENT) - 3, 100) == CONTENT[-3:]
    assert file.read(len(CONTENT) + 3, 100) == b""
    assert extent_of(file).read(20, 90) == CONTENT[120:190]


def test_reads_that_come_in_pieces_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may return less than was asked for."""
    file = file_at(tmp_path / "a.seg")
    monkeypatch.setattr(segment_file, "_pread", lambda fd, nbytes, start: os.pread(fd, min(nbytes, 7), start))
    assert file.read(3, 500) == CONTENT[3:503]


def test_a_system_without_positioned_reads_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share one position there, so that they take turns."""
    file = file_at(tmp_path / "a.seg")
    monkeypatch.delattr(os, "pread")
    wrong: list[int] = []

    def read(seed: int) -> None:
        starts = np.random.default_rng(seed).integers(0, 9_000, 300).tolist()
        wrong.extend(start for start in starts if file.read(start, 60) != CONTENT[start : start + 60])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


def test_a_file_that_is_cut_short_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Nothing of it is returned."""
    file = file_at(tmp_path / "a.seg")
    extent = extent_of(file)
    os.truncate(tmp_path / "a.seg", 2_000)
    assert extent.read(0, 1_900) == CONTENT[100:2_000]
    with pytest.raises(DamageError, match=r"a\.seg was cut short"):
        extent.read(0, 1_901)


def test_what_the_system_says_is_told(tmp_path: Path) -> None:
    """A descriptor that is none, a disk that fails."""
    path = tmp_path / "a.seg"
    path.write_bytes(CONTENT)
    descriptor = os.open(path, os.O_WRONLY)
    file = SegmentFile(path, descriptor, is_temporary=False)
    with pytest.raises(DamageError, match=r"a\.seg cannot be read \(Bad file descriptor\)"):
        extent_of(file).read(0, 10)


def test_a_deleted_file_stays_readable_for_who_refers_to_it(tmp_path: Path) -> None:
    """Eviction and closing take nothing away from under a reader."""
    file = file_at(tmp_path / "a.seg")
    extent = extent_of(file)
    (tmp_path / "a.seg").unlink()
    del file
    gc.collect()
    assert extent.read(0, 50) == CONTENT[100:150]


@pytest.mark.parametrize("is_temporary", [True, False])
def test_a_file_is_closed_with_its_last_reader(is_temporary: bool, tmp_path: Path) -> None:
    """And deleted, if it belongs to the memory alone."""
    file = file_at(tmp_path / "a.seg", is_temporary=is_temporary)
    extent, other, descriptor = extent_of(file), extent_of(file, 7), file.descriptor
    del file, extent
    gc.collect()
    assert other.read(0, 5) == CONTENT[7:12]
    assert (tmp_path / "a.seg").exists()
    del other
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert (tmp_path / "a.seg").exists() != is_temporary


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forks_child_deletes_nothing(tmp_path: Path) -> None:
    """It has the descriptor; the file is its parent's."""
    file = file_at(tmp_path / "a.seg")
    child = os.fork()
    if child == 0:
        del file
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "a.seg").exists()
    assert file.read(0, 5) == CONTENT[:5]

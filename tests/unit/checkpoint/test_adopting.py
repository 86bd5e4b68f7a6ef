"""Blocks that lie on the disk already are linked into a checkpoint, where that can be done, and copied where not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.checkpoint.directory import FileSystem
from holdall.storage import records, segment

SPACE = spaces.Box(0, 255, (1, 60, 60), np.uint8)
FRAMES = np.random.default_rng(0).integers(0, 256, (3000, 1, 60, 60), np.uint8)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links are looked at by their inodes")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few blocks each."""
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 200_000)
    monkeypatch.setattr(records, "_FILE_BYTES", 1_000_000)


def spilled(tmp_path: Path, ticks: int = 2000, capacity: int = 3000) -> ReplayMemory:
    """A memory most of which lies on the disk."""
    memory = ReplayMemory(SPACE, spaces.Discrete(3), capacity, budget="4MiB", spill_dir=tmp_path / "spill", seed=1)
    grow(memory, ticks)
    memory.drain()
    assert sum(field.disk_bytes for field in memory.report().fields) > 3_000_000
    return memory


def grow(memory: ReplayMemory, ticks: int) -> None:
    flag = np.zeros(1, np.bool_)
    for tick in range(memory.next_id, memory.next_id + ticks):
        reward, action = np.array([tick], np.float32), np.zeros(1, np.int64)
        memory.add(FRAMES[tick % 3000][None], action, reward, FRAMES[(tick + 1) % 3000][None], flag, flag)
    memory.drain()


def require_right(memory: ReplayMemory) -> None:
    ids = np.arange(memory.first_id, memory.next_id)
    batch = memory.gather(ids)
    assert np.array_equal(batch.obs, FRAMES[ids % 3000])
    assert np.array_equal(batch.next_obs, FRAMES[(ids + 1) % 3000])


def shared(place: Path) -> list[Path]:
    """Return the files of a place that have another name elsewhere."""
    return [path for path in (place / "segments").iterdir() if path.stat().st_nlink > 1]


def test_spilled_files_are_linked_and_outlive_the_memory(tmp_path: Path) -> None:
    """Nothing of them is written again, and the next save has nothing more to do."""
    with spilled(tmp_path) as memory:
        done = memory.save(tmp_path / "run").result()
        linked = sum(path.stat().st_size for path in shared(tmp_path / "run"))
        assert linked > 2_000_000
        assert done.bytes_written + linked == done.bytes_total
        again = memory.save(tmp_path / "run").result()
        assert again.bytes_written < done.bytes_written / 4
        modes = {path.stat().st_mode for path in (tmp_path / "run" / "segments").iterdir()}
        assert len(modes) == 1, "who may read one file may read the others"
    assert not list((tmp_path / "spill").iterdir())
    with ReplayMemory.load(tmp_path / "run", budget="4MiB", spill_dir=tmp_path / "spill") as loaded:
        assert loaded.next_id == 2000
        require_right(loaded)


def test_a_file_of_which_little_is_left_is_not_linked(tmp_path: Path) -> None:
    """It would stay as a whole for a few blocks."""
    with spilled(tmp_path, capacity=2000) as memory:
        memory.save(tmp_path / "run").result()
        before = {path.name for path in shared(tmp_path / "run")}
        grow(memory, 900)
        memory.save(tmp_path / "other").result()
        require_right(memory)
        sizes = {path.stat().st_ino: path.stat().st_size for path in shared(tmp_path / "other")}
        assert before
        assert sizes
        with ReplayMemory.load(tmp_path / "other") as loaded:
            require_right(loaded)


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_where_nothing_can_be_linked_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Another file system, or one without links."""
    link = FileSystem.link

    def refused(own: FileSystem, old: Path, new: Path) -> None:
        if new.suffix == ".seg":
            raise OSError(error, os.strerror(error))
        link(own, old, new)

    monkeypatch.setattr(FileSystem, "link", refused)
    with spilled(tmp_path) as memory:
        done = memory.save(tmp_path / "run").result()
        assert done.bytes_written == done.bytes_total
        assert not shared(tmp_path / "run")
    with ReplayMemory.load(tmp_path / "run") as loaded:
        require_right(loaded)


def test_a_spill_folder_that_somebody_cleared_is_copied_from(tmp_path: Path) -> None:
    """Its files are open still; a stranger's under the same name is not taken for one of them."""
    with spilled(tmp_path) as memory:
        for path in (tmp_path / "spill").glob("*/*.seg"):
            path.unlink()
            path.write_bytes(b"a stranger's")
        done = memory.save(tmp_path / "run").result()
        assert done.bytes_written == done.bytes_total
    with ReplayMemory.load(tmp_path / "run") as loaded:
        require_right(loaded)


def test_a_memory_is_saved_to_a_second_place_by_links(tmp_path: Path) -> None:
    """What was loaded from the first lies on the same disk."""
    with spilled(tmp_path) as memory:
        memory.save(tmp_path / "run").result()
    with ReplayMemory.load(tmp_path / "run") as loaded:
        done: Any = loaded.save(tmp_path / "second").result()
        assert done.bytes_written < done.bytes_total / 2
    for path in (tmp_path / "run" / "segments").iterdir():
        path.unlink()
    with ReplayMemory.load(tmp_path / "second") as loaded:
        require_right(loaded)

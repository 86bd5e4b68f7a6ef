"""A disk that fails at any call: the error is clear, earlier checkpoints are intact, and training continues."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import CheckpointError, HoldallError, ReplayMemory
from holdall.checkpoint import directory_blobs as local
from holdall.checkpoint.directory_blobs import FileSystem

from .nursery import LANES, SPACE, grow, require_right

CALLS = [
    name for name, value in vars(FileSystem).items() if callable(value) and name not in {"close", "unlock", "__init__"}
]


class FailingDisk(FileSystem):
    """A disk that fails at one call, counted over all kinds of calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails_at: int | None = None
        self.error = errno.EIO
        self.failed: list[str] = []

    def arm(self, call: int | None, error: int = errno.EIO) -> None:
        self.calls = 0
        self.fails_at = call
        self.error = error

    def count(self, name: str) -> None:
        self.calls += 1
        if self.fails_at == self.calls - 1:
            self.failed.append(name)
            raise OSError(self.error, os.strerror(self.error))


def _make_counting(name: str) -> Any:
    method = getattr(FileSystem, name)

    def count_and_call(disk: FailingDisk, *arguments: Any) -> Any:
        disk.count(name)
        return method(disk, *arguments)

    return count_and_call


for _name in CALLS:
    setattr(FailingDisk, _name, _make_counting(_name))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FailingDisk:
    found = FailingDisk()
    monkeypatch.setattr(local, "FileSystem", lambda: found)
    return found


def make_memory() -> ReplayMemory:
    return ReplayMemory(SPACE, spaces.Discrete(5), 60 * LANES, LANES, budget=None, seed=1)


def save(memory: ReplayMemory, place: Path) -> str:
    """Save. Return the message of the error, or an empty text."""
    try:
        memory.save(place, keep=2).result()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "error",
    ["ENOSPC", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("EDQUOT", "EIO", "EROFS", "EACCES"))],
)
def test_a_save_that_fails_at_any_call_changes_neither_the_memory_nor_earlier_checkpoints(
    tmp_path: Path, disk: FailingDisk, error: str
) -> None:
    """Every call of a save fails in turn, also those that remove old checkpoints."""
    with make_memory() as memory:
        grow(memory, 20)
        for _ in range(3):
            memory.save(tmp_path, keep=2).result()
        for call in itertools.count(0, 4 if error == "ENOSPC" else 1):  # Every night, all calls fail in turn.
            before = memory.next_id
            grow(memory, 3)
            disk.failed.clear()
            disk.arm(call, getattr(errno, error))
            message = save(memory, tmp_path)
            acknowledged = not message
            assert acknowledged or (os.strerror(getattr(errno, error)) in message and str(tmp_path) in message)
            reached = bool(disk.failed)
            disk.arm(None)
            with ReplayMemory.load(tmp_path) as loaded:
                assert loaded.next_id in ({memory.next_id} if acknowledged else {before, memory.next_id})
                require_right(loaded)
            memory.save(tmp_path, keep=2).result()
            memory.sample(8)
            if not reached:
                break
        assert call > 20


@pytest.mark.nightly
@pytest.mark.parametrize("error", [errno.EACCES, errno.ENOSPC])
def test_a_place_that_could_not_be_opened_can_be_opened_later(tmp_path: Path, disk: FailingDisk, error: int) -> None:
    """Every call until the first checkpoint fails in turn."""
    for call in itertools.count():
        with make_memory() as memory:
            grow(memory, 5)
            disk.failed.clear()
            disk.arm(call, error)
            place = tmp_path / str(call)
            message = save(memory, place)
            assert not message or os.strerror(error) in message
            reached = bool(disk.failed)
            disk.arm(None)
            memory.save(place).result()
            with ReplayMemory.load(place) as loaded:
                assert loaded.next_id == memory.next_id
                require_right(loaded)
            if not reached:
                break
    assert call > 20


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_a_load_that_fails_at_any_call_raises_an_error(tmp_path: Path, disk: FailingDisk, error: int) -> None:
    """Every call of the load fails in turn. A memory that is loaded is whole."""
    with make_memory() as memory:
        grow(memory, 30)
        memory.save(tmp_path).result()
    for call in itertools.count():
        disk.failed.clear()
        disk.arm(call, error)
        with contextlib.suppress(HoldallError), ReplayMemory.load(tmp_path) as loaded:
            require_right(loaded)
        if not disk.failed:
            break
    assert call >= 4


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere; needs another user")
def test_the_error_of_a_folder_without_permission_has_a_remedy(tmp_path: Path) -> None:
    """This test uses a real disk."""
    (tmp_path / "run").mkdir(mode=0o500)
    with make_memory() as memory:
        grow(memory, 5)
        with pytest.raises(CheckpointError, match="Give this user permission"):
            memory.save(tmp_path / "run").result()


def test_the_error_of_a_full_disk_has_a_remedy(tmp_path: Path) -> None:
    """Writing to /dev/full always raises ENOSPC."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")

    class FullDisk(FileSystem):
        def create(self, path: Path) -> int:
            super().close(super().create(path))
            return os.open("/dev/full", os.O_WRONLY)

    with pytest.MonkeyPatch.context() as patch, make_memory() as memory:
        patch.setattr(local, "FileSystem", FullDisk)
        grow(memory, 5)
        with pytest.raises(CheckpointError, match="Free some disk space"):
            memory.save(tmp_path).result()
        assert len(memory.sample(4)) == 4
        assert np.array_equal(memory.gather([0]).reward, [0])

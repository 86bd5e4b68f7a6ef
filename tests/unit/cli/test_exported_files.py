"""Files that an export writes are complete, or they are removed."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.tools.exports import export_npz

SPACE = spaces.Box(-9, 9, (3,), np.float32)


def test_an_archive_whose_directory_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = zipfile.ZipFile.close
    failures = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def fail_once(archive: zipfile.ZipFile) -> None:
        close(archive)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(zipfile.ZipFile, "close", fail_once)
    row = np.zeros((1, 3), np.float32)
    never = np.zeros(1, np.bool_)
    with ReplayMemory(SPACE, SPACE, 64) as memory:
        memory.add(row, row, np.zeros(1, np.float32), row, never, never)
        with pytest.raises(OSError, match="space"):
            export_npz(memory, tmp_path / "run.npz", lambda _done, _all: None)
    assert not (tmp_path / "run.npz").exists()

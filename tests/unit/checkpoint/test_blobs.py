"""Blob stores: listings, locks and the probe of exclusive creation. Intervals of saves."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdall.checkpoint import has_exclusive_create, open_blobs
from holdall.checkpoint.autosave import SaveInterval
from holdall.errors import LockedError


def test_the_probe_of_exclusive_creation_leaves_no_blob_behind(tmp_path: Path) -> None:
    blobs = open_blobs(tmp_path / "run")
    assert has_exclusive_create(blobs)
    assert list(blobs.list("")) == []
    assert list(blobs.list("probe/")) == []


def test_a_listing_has_a_replaced_file_or_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a place would look empty to a load beside saves with keep=1."""
    blobs = open_blobs(tmp_path)
    blobs.create("manifests/1", b"1")
    scan = os.scandir

    @contextlib.contextmanager
    def scan_and_replace(path: Path) -> Iterator[list[os.DirEntry[Any]]]:
        with scan(path) as children:
            found = list(children)
        monkeypatch.undo()
        blobs.create("manifests/2", b"2")
        blobs.delete("manifests/1")
        yield found

    monkeypatch.setattr(os, "scandir", scan_and_replace)
    assert dict(blobs.list("manifests/")) == {"manifests/2": 1}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts descriptors in /proc")
def test_a_refused_lock_leaves_no_file_open(tmp_path: Path) -> None:
    """A process that tries again and again must not run out of descriptors."""
    lease = open_blobs(tmp_path / "run").lock("the owner")
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        with pytest.raises(LockedError, match="the owner"):
            open_blobs(tmp_path / "run").lock("another owner")
    assert len(list(descriptors.iterdir())) == before
    lease.release()


@pytest.mark.skipif(sys.platform == "win32", reason="is_taken is always False")
def test_looking_for_the_writer_does_not_refuse_a_new_writer(tmp_path: Path) -> None:
    """A `Dataset` looks for the writer of its place, and holds the lock for a moment."""
    import fcntl

    blobs = open_blobs(tmp_path)
    blobs.lock("the first writer").release()
    with (tmp_path / "LOCK").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.005, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        blobs.lock("the second writer").release()
        timer.join()


def test_a_save_is_due_when_a_limit_is_reached() -> None:
    assert SaveInterval(10.0, None).is_due(10.0, 0)
    assert not SaveInterval(10.0, None).is_due(9.99, 10**9)
    assert SaveInterval(None, 100).is_due(0.0, 100)
    assert not SaveInterval(None, 100).is_due(10.0**9, 99)
    assert SaveInterval(10.0, 100).is_due(0.0, 100)

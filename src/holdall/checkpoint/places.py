"""Open the checkpoints of a path or a URL, for reading or for writing."""

from __future__ import annotations

import os
from pathlib import Path

from holdall.checkpoint.directory import DirectoryReader, DirectoryWriter
from holdall.checkpoint.manifest import LOAD_S, CheckpointReader, Waiting
from holdall.checkpoint.retention import CheckpointWriter
from holdall.checkpoint.urls import is_remote, normalized_url


def open_reader(
    url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, timeout: float = LOAD_S
) -> CheckpointReader:
    """Return a reader of the checkpoints of a path or a URL.

    Args:
        cache_dir: Directory for local copies of an object store's data. None: the directory of temporary files.
        timeout: Seconds without an answer of an object store after which an error is raised.
    """
    location = normalized_url(url)
    if is_remote(location):
        from holdall.checkpoint.object_store import ObjectStoreReader  # noqa: PLC0415  needs an optional package
        from holdall.checkpoint.objects import Objects  # noqa: PLC0415

        return ObjectStoreReader(Objects(location, Waiting(location, timeout)), cache_dir)
    return DirectoryReader(Path(location))


def open_writer(url: str | os.PathLike[str], waiting: Waiting | None = None) -> CheckpointWriter:
    """Become the writer of checkpoints of a path or a URL. Raise FencedError if there is another one.

    `waiting` ends if an object store does not answer.
    """
    location = normalized_url(url)
    if is_remote(location):
        from holdall.checkpoint.object_store import ObjectStoreWriter  # noqa: PLC0415  needs an optional package
        from holdall.checkpoint.objects import Objects  # noqa: PLC0415

        return ObjectStoreWriter(location, Objects(location, waiting))
    return DirectoryWriter(Path(location))

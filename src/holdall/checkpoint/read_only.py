"""Open a checkpoint that is only read, in one process or in several.

Guarantee: processes that open the checkpoint of the same number read the same transitions, even if a memory saves to
the same place meanwhile.
"""

from __future__ import annotations

import math
import os

from holdall.checkpoint.blobs import open_blobs
from holdall.checkpoint.directory_blobs import DirectoryBlobs
from holdall.checkpoint.load import Restored, load_newest, read_checkpoint
from holdall.checkpoint.manifest import Manifest
from holdall.checkpoint.reader import CheckpointReader, require_whole
from holdall.checkpoint.urls import normalized_url
from holdall.checkpoint.waiting import Waiting
from holdall.errors import ArgumentError, BlobMissingError, CheckpointError


def open_read_only(url: str | os.PathLike[str], number: int | None, cache_dir: str | None, timeout: float) -> Restored:
    """Read a checkpoint, except for its blocks, which are read on demand.

    Args:
        number: Number of the checkpoint. None: the newest complete one.
        cache_dir: Directory for the local copies of data in an object store, which processes share.
        timeout: While the checkpoint is being opened: seconds without an answer of an object store after which an error
            is raised. Reads after that wait without a limit.
    """
    location = normalized_url(url)
    blobs = open_blobs(location, Waiting(location, timeout))
    reader = CheckpointReader(blobs, cache_dir, is_shared=cache_dir is not None)

    def build(manifest: Manifest) -> Restored:
        if manifest.shards:
            raise ArgumentError(
                f"{reader.url} has the checkpoint of a memory over {len(manifest.shards)} shards, which a Dataset does "
                "not open. Load it with holdall.ReplayMemory.load, and save that memory to another place."
            )
        return read_checkpoint(manifest, reader, None)

    restored = load_newest(reader, build) if number is None else build(_read_numbered(reader, number))
    reader.waiting.limit_s = math.inf
    return restored


def _read_numbered(reader: CheckpointReader, number: int) -> Manifest:
    """Return a manifest. Raise CheckpointError if it or one of its files does not exist."""
    try:
        manifest = reader.manifest(number)
        require_whole(manifest, reader, reader.file_sizes())
    except BlobMissingError as error:
        raise CheckpointError(
            f"Checkpoint {number} of {reader.url} was removed after the dataset was opened. Open the dataset again, or "
            "save to another place while it is in use."
        ) from error
    return manifest


def find_writer(url: str | os.PathLike[str]) -> str:
    """Return the name of the process that saves to a directory now. Empty if there is none, and for object stores."""
    blobs = open_blobs(url)
    return blobs.find_writer() if isinstance(blobs, DirectoryBlobs) else ""

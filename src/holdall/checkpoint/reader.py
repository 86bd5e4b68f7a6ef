"""Reading a place: the list of its checkpoints, their manifests, and their files of records."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from holdall.checkpoint.blobs import BlobStore, open_blobs
from holdall.checkpoint.data_file import DataFile, open_data_file
from holdall.checkpoint.manifest import (
    CHECKSUM_LINE_BYTES,
    DATA_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    SHARD_FOLDER,
    Manifest,
    ShardEntry,
    decode,
    manifest_name,
    require_files,
    strip_checksum,
)
from holdall.checkpoint.urls import normalized_url
from holdall.checkpoint.waiting import Waiting
from holdall.errors import BlobMissingError, CheckpointError, DamageError, FencedError, NewerFormatError

LOAD_S = 30.0
"""Seconds that `load`, and commands that read, wait for an answer of an object store."""
SEGMENTS = "segments/"
MANIFESTS = "manifests/"
_MAX_CACHED_MANIFESTS = 64


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Loss:
    """Data of a checkpoint that is damaged or missing."""

    error: OSError  # The error of reading it.


def try_read(read: Callable[[], _T]) -> _T | Loss:
    """Return `read()`, or the loss if the data that it reads is damaged or missing.

    Raise all other errors, because the data could be read with other permissions, more open files, or a newer holdall.
    """
    try:
        return read()
    except (DamageError, CheckpointError) as error:
        if not _is_loss(error):
            raise
        return Loss(error.with_traceback(None))  # A traceback would keep the data alive that was read.


def _is_loss(error: DamageError | CheckpointError) -> bool:
    if isinstance(error, NewerFormatError | FencedError):
        return False
    return isinstance(error, DamageError) or error.errno in (None, errno.ENOENT)


class CheckpointReader:
    """Reader of the checkpoints in a blob store.

    Args:
        cache_dir: Directory for local copies of data in an object store. None: the directory of temporary files.
        is_shared: Whether other processes use the copies in `cache_dir`, too.
    """

    def __init__(
        self, blobs: BlobStore, cache_dir: str | os.PathLike[str] | None = None, *, is_shared: bool = False
    ) -> None:
        self.blobs = blobs
        self.url = blobs.url
        self.waiting = blobs.waiting
        self._cache_dir = cache_dir
        self._is_shared = is_shared
        self._known: dict[bytes, Manifest] = {}  # Manifests that were decoded before, by their checksum line.

    def numbers(self) -> list[int]:
        """Return the numbers of all manifests, newest first."""
        return sorted(self.manifest_sizes(), reverse=True)

    def manifest_sizes(self) -> dict[int, int]:
        """Return the bytes of all manifests, by number."""
        sizes = {name.removeprefix(MANIFESTS): nbytes for name, nbytes in self.blobs.list(MANIFESTS)}
        return {int(name[:16]): nbytes for name, nbytes in sizes.items() if MANIFEST_NAME.fullmatch(name)}

    def file_sizes(self) -> dict[str, int]:
        """Return the sizes of all files of records, by name."""
        sizes = {name.removeprefix(SEGMENTS): nbytes for name, nbytes in self.blobs.list(SEGMENTS)}
        return {name: nbytes for name, nbytes in sizes.items() if DATA_NAME.fullmatch(name)}

    def manifest(self, number: int, nbytes: int | None = None) -> Manifest:
        """Return a manifest. Raise DamageError if it is damaged, and BlobMissingError if it does not exist.

        `nbytes` is its size, if the caller has just listed it.
        """
        name = MANIFESTS + manifest_name(number)
        if nbytes is None:
            nbytes = dict(self.blobs.list(name)).get(name)
        if nbytes is None:
            raise BlobMissingError(
                errno.ENOENT,
                f"{self.url} has no checkpoint {number}. To list those that it has, run: "
                f"holdall checkpoint ls {self.url}",
            )
        if nbytes > MAX_MANIFEST_BYTES:
            raise DamageError(f"{self.url}/{name} has {nbytes} bytes. A manifest has at most {MAX_MANIFEST_BYTES}.")
        raw = self.blobs.read(name, 0, nbytes)
        checksum = raw[-CHECKSUM_LINE_BYTES:]
        known = self._known.get(checksum)
        if known is not None and known.number == number:
            with contextlib.suppress(DamageError):
                strip_checksum(raw)
                return known
        manifest = decode(raw, f"{self.url}/{name}", number)
        self.remember(checksum, manifest)
        return manifest

    def remember(self, checksum: bytes, manifest: Manifest) -> None:
        """Keep a decoded manifest. It is not decoded again while its file ends with this checksum line."""
        while len(self._known) >= _MAX_CACHED_MANIFESTS:
            del self._known[next(iter(self._known))]
        self._known[checksum] = manifest

    def find_newest(self) -> Manifest | None:
        """Return the newest manifest that is not damaged, or None. Its files may be missing."""
        for number in self.numbers():
            manifest = try_read(partial(self.manifest, number))
            if not isinstance(manifest, Loss):
                return manifest
        return None

    def require_checkpoint(self) -> None:
        """Raise CheckpointError if there is no checkpoint at all."""
        if not self.numbers():
            raise CheckpointError(f"No checkpoint found in {self.url}. Check the path, or save first.")

    def open(self, name: str, nbytes: int) -> DataFile:
        """Open a file of records that has `nbytes` bytes."""
        return open_data_file(self.blobs, SEGMENTS + name, nbytes, self._cache_dir, is_shared=self._is_shared)

    def reopen(self, limit_s: float) -> CheckpointReader:
        """Return a reader of the same place that waits independently of this one, for at most `limit_s` seconds."""
        blobs = open_blobs(self.url, Waiting(self.url, limit_s))
        return CheckpointReader(blobs, self._cache_dir, is_shared=self._is_shared)

    def open_shard(self, folder: str) -> CheckpointReader:
        """Return the reader of the checkpoints of one shard, which are in `folder` below this place."""
        return CheckpointReader(open_blobs(f"{self.url}/{folder}", self.waiting), self._cache_dir)

    @property
    def shard_folder(self) -> str | None:
        """The folder of these checkpoints if they belong to a shard, or None."""
        folder = "/".join(re.split(r"[/\\]", self.url)[-2:])
        return folder if SHARD_FOLDER.fullmatch(folder) else None

    def open_whole(self) -> CheckpointReader | None:
        """Return the reader of the memory that a shard belongs to, or None if these are not checkpoints of a shard."""
        if self.shard_folder is None:
            return None
        return CheckpointReader(open_blobs(self.url[: -len(self.shard_folder) - 1], self.waiting))


def open_reader(
    url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, timeout: float = LOAD_S
) -> CheckpointReader:
    """Return a reader of the checkpoints of a path or a URL.

    Args:
        cache_dir: Directory for local copies of data in an object store. None: the directory of temporary files.
        timeout: Seconds without an answer of an object store after which an error is raised.
    """
    location = normalized_url(url)
    return CheckpointReader(open_blobs(location, Waiting(location, timeout)), cache_dir)


def require_whole(manifest: Manifest, reader: CheckpointReader, sizes: dict[str, int]) -> None:
    """Raise CheckpointError unless all files of a manifest and of its shards exist with all their bytes."""
    require_files(manifest, sizes)
    for shard in manifest.shards:
        shard_reader = reader.open_shard(shard.folder)
        require_files(read_shard_manifest(shard_reader, shard), shard_reader.file_sizes())


def read_shard_manifest(reader: CheckpointReader, shard: ShardEntry) -> Manifest:
    """Return the manifest of a shard. `reader` reads the place of the shard.

    Raise DamageError if it is not the one that the manifest of the whole memory names.
    """
    manifest = reader.manifest(shard.number)
    if manifest.commit != shard.commit:
        raise DamageError(
            f"{reader.url} has another checkpoint {shard.number} than the manifest of the whole memory names."
        )
    return manifest

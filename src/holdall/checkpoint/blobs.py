"""Blob stores, which keep checkpoints and the journals of shards: `BlobStore`, and `open_blobs` for a path or a URL.

A blob is written once and never modified. A checkpoint is committed by creating its manifest after every blob that the
manifest names.

| store        | module             | `create` never overwrites, by | `lock` takes                                |
| ------------ | ------------------ | ----------------------------- | ------------------------------------------- |
| directory    | directory_blobs.py | making a hard link            | a file lock, which ends with its process    |
| object store | object_blobs.py    | a conditional put             | an object, which its owner renews regularly |

`holdall.testing.BlobStoreContract` is the test class that every implementation passes.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from holdall.checkpoint.urls import is_remote, normalized_url
from holdall.checkpoint.waiting import Waiting
from holdall.errors import ArgumentError, LockedError
from holdall.store.records import Buffer

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}(/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}){0,15}")


class Lease(Protocol):
    """The right to be the only writer of a `BlobStore`."""

    def check(self) -> None:
        """Raise FencedError unless this writer has held the lock since `lock` returned."""

    def release(self) -> None:
        """Give the lock up. Releasing twice has no effect."""


class BlobStore(Protocol):
    """The five operations that saving, loading and deleting checkpoints need. Thread-safe.

    Names consist of letters, digits, "_", "-" and "."; "/" separates components, which begin with a letter, a digit or
    "_". Every other name raises ArgumentError. Every call that waits ends with CheckpointError when `waiting` is
    cancelled.

    Attributes:
        url: Place of the store, for messages.
        waiting: Progress of calls, and the way to cancel them.
    """

    url: str
    waiting: Waiting

    def create(self, name: str, data: Buffer) -> bool:
        """Create blob `name` with the content `data`. Atomic: a reader sees all of it or nothing.

        When this returns True, the blob survives a power cut. An existing blob of this name is not changed. Return True
        if its content equals `data`, because an earlier attempt may have succeeded although its answer was lost, and
        False if it has another content.
        """

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return `length` bytes of a blob from byte `start`.

        Raise BlobMissingError if there is no such blob, and DamageError if it is too short or cannot be read.
        """

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the name and size of every blob whose name starts with `prefix`, in any order.

        Every blob whose `create` returned before this call is among them. If another blob is created and this one then
        deleted during the call, at least one of the two is listed. A store that does not exist yet has no blobs.
        """

    def delete(self, name: str) -> None:
        """Delete a blob if it exists. When this returns, the deletion survives a power cut."""

    def lock(self, owner: str) -> Lease:
        """Become the only writer. Raise LockedError, which names the current owner, if there is one.

        `owner` describes the caller for that message. The lock of a process that was killed can be taken, at once or
        after a wait. Blobs can be created, read and deleted without the lock.
        """


def check_name(name: str) -> None:
    """Raise ArgumentError if `name` is not a name of a blob."""
    if not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{name!r} is not a name of a blob. Use letters, digits, '_', '-', '.', and '/' between components. "
            "Components may not start with '-' or '.'."
        )


def open_blobs(url: str | os.PathLike[str], waiting: Waiting | None = None) -> BlobStore:
    """Return the blobs of a directory or of a prefix of an object store. Nothing is created or read.

    Args:
        url: A path, or a URL that starts with s3://, gs:// or az://.
        waiting: Progress of calls. None: calls wait as long as the store retries, and cannot be cancelled.
    """
    location = normalized_url(url)
    if is_remote(location):
        from holdall.checkpoint.object_blobs import ObjectBlobs  # noqa: PLC0415  needs an optional package

        return ObjectBlobs(location, waiting)
    from holdall.checkpoint.directory_blobs import DirectoryBlobs  # noqa: PLC0415  imports this module

    return DirectoryBlobs(Path(location), waiting=waiting)


def has_exclusive_create(blobs: BlobStore) -> bool:
    """Return whether `create` keeps an existing blob. Some servers ignore the condition of a put."""
    name = f"probe/{secrets.token_hex(8)}"
    try:
        blobs.create(name, b"first")
        return not blobs.create(name, b"second") and blobs.read(name, 0, len(b"first")) == b"first"
    finally:
        blobs.delete(name)


def describe_process() -> str:
    """Return the name of this process and its machine, for `BlobStore.lock`."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def explain_lock(url: str, holder: str, owner: str) -> LockedError:
    """Return the error to raise when `holder` has the lock that `owner` wants."""
    who = f"{holder} (another memory of this process)" if holder == owner else holder
    return LockedError(f"{url} is in use by {who}. Save to another place, or close the memory that saves there.")

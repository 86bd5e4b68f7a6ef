"""Places: where checkpoints lie, a directory or a prefix of an object store.

    FORMAT                     what this is, written once
    LOCK                       the writer's, on a disk only
    segments/EPOCH-SEQ.seg     files of records
    manifests/NUMBER.json      one a checkpoint

Invariant: a manifest appears after everything that it names, complete, and under a number that
nothing had before.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Protocol

from holdall.checkpoint.manifest import FORMAT, VERSION, Manifest, signed, signed_text
from holdall.errors import CheckpointError, DamageError, FencedError
from holdall.experience.disk.segment_file import SegmentFile

MOST_FORMAT_BYTES = 4096

Buffer = bytes | bytearray | memoryview


class NewFile(Protocol):
    """A file of records that is being written; nobody sees it before it is finished."""

    name: str
    nbytes: int

    def write(self, data: Buffer) -> None:
        """Add bytes at its end."""

    def settle(self) -> None:
        """Bring what was written so far to the disk, where that spares time later."""

    def finish(self) -> None:
        """Make it durable under its name, at the latest when the next manifest is committed."""

    def abandon(self) -> None:
        """Throw it away."""


class Library(Protocol):
    """Checkpoints to be read."""

    url: str

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""

    def manifest(self, number: int) -> Manifest:
        """Read a manifest; DamageError if it is none, CheckpointError if it is not there."""

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""

    def require(self) -> None:
        """Refuse a place that holds no checkpoints, or of a version to come."""

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records, to be read by position; return it and its bytes."""

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""


class Place(Protocol):
    """A place that one writer holds."""

    url: str
    epoch: str
    behind_bytes: int
    """Bytes from which on a file that is written behind the memory is finished before the next commit."""

    @property
    def library(self) -> Library:
        """What is there, to be read."""

    def new_file(self) -> NewFile:
        """Begin a file of records."""

    def adopt(self, file: SegmentFile) -> tuple[str, int] | None:
        """Take over a file of records that takes no more, without copying it; return its name here and its bytes.

        None where that cannot be done. The file is durable at the latest when the next manifest is committed.
        """

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; FencedError if its number is taken."""

    def collect(self, keep: int, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` checkpoints, and the files that nothing names; return their bytes."""

    def close(self) -> None:
        """Let another writer in."""

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""


def next_number(library: Library, last: int, epoch: str) -> int:
    """Return the number of a writer's next checkpoint.

    A writer whose number was taken by another stops for good: what it wrote may have been collected meanwhile.

    Args:
        last: The newest number when the writer came, or its own last one.
        epoch: The writer's name.
    """
    newest = max(library.numbers(), default=0)
    if newest > last and library.manifest(newest).epoch != epoch:
        raise FencedError(
            f"{library.url} holds checkpoint {newest}, which another writer made since {last}; save to a place of its "
            "own, or load what is there"
        )
    return max(newest, last) + 1


def new_epoch() -> str:
    """Name a writer: without it, one that comes after a crash would use the same names again."""
    return secrets.token_hex(8)


def data_name(epoch: str, sequence: int) -> str:
    """Name a file of records."""
    return f"{epoch}-{sequence:016x}.seg"


def format_text() -> bytes:
    """Return the content of FORMAT."""
    words = {"format": FORMAT, "min_reader": VERSION, "version": VERSION}
    return signed(json.dumps(words, sort_keys=True).encode())


def require_format(raw: bytes, url: str) -> None:
    """Refuse a place that is none of holdall's, or newer than this reader."""
    try:
        words = json.loads(signed_text(raw))
        known = words["format"] == FORMAT
        readable = known and type(words["min_reader"]) is int and words["min_reader"] <= VERSION
    except (DamageError, ValueError, KeyError, TypeError, RecursionError):
        known = readable = False
    if not known:
        raise DamageError(f"{url}: its FORMAT file is damaged, or none of holdall's; choose another place")
    if not readable:
        raise DamageError(f"{url} needs a reader of version {words['min_reader']}, this one has {VERSION}; upgrade it")


def require_files(manifest: Manifest, sizes: dict[str, int]) -> None:
    """Refuse a manifest whose files are not all there, in full."""
    for name, nbytes in manifest.files.items():
        if name not in sizes:
            raise CheckpointError(f"checkpoint {manifest.number} needs the file {name}, which is not there")
        if sizes[name] < nbytes:
            raise CheckpointError(
                f"checkpoint {manifest.number} needs {nbytes} bytes of the file {name}, which has {sizes[name]}"
            )

"""What directories and object stores have in common: how checkpoints are read and written there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from holdall.checkpoint.manifest import Buffer, Manifest
    from holdall.storage import SegmentFile


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


class CheckpointReader(Protocol):
    """Checkpoints to be read."""

    url: str

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""

    def manifest(self, number: int) -> Manifest:
        """Read a manifest; DamageError if it is none, CheckpointError if it is not there."""

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""

    def require(self) -> bool:
        """Refuse a url that holds no checkpoints, or of a version to come; return whether its FORMAT is whole."""

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records, to be read by position; return it and its bytes."""

    def reopened(self) -> CheckpointReader:
        """Return the same checkpoints; `interrupt` does not end reading them."""

    def below(self, folder: str) -> CheckpointReader:
        """Return the checkpoints of one shard."""

    def above(self) -> CheckpointReader | None:
        """Return the checkpoints whose manifests may name those here; None if these are no shard's."""

    def wait_on(self) -> None:
        """Wait for a server from now on until it answers, or is interrupted."""

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""


class CheckpointWriter(Protocol):
    """Checkpoints that this writer alone writes to."""

    url: str
    writer_id: str
    behind_bytes: int
    """Bytes from which on a file that is written behind the memory is finished before the next commit."""

    @property
    def reader(self) -> CheckpointReader:
        """What is there, to be read."""

    def new_file(self) -> NewFile:
        """Begin a file of records."""

    def is_there(self) -> bool:
        """Whether the place is still the one that was opened: nobody removed it, or put another in its stead."""

    def adopt(self, file: SegmentFile) -> tuple[str, int] | None:
        """Take over a file of records that takes no more, without copying it; return its name here and its bytes.

        None where that cannot be done. The file is durable at the latest when the next manifest is committed.
        """

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; FencedError if its number is taken.

        CheckpointError if something that it names is not there in full: then there is no such checkpoint.
        """

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` checkpoints, and the files that nothing names; return their bytes.

        None keeps what the manifest of a memory over shards names, or will name: for the shards themselves.
        """

    def close(self) -> None:
        """Let another writer in."""

    def interrupt(self) -> None:
        """Give up waiting for a server that does not answer."""

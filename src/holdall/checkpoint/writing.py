"""Writing records into files of a place, one after another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from holdall.checkpoint.manifest import Ref
from holdall.checkpoint.place import NewFile, Place
from holdall.experience.disk.record import Buffer

FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes FILE_BYTES, or this share of what was written if that is more, so that a reader can open them all."""


class RecordWriter:
    """Appends records to a file, and begins the next when it is full.

    Args:
        wrote: Is told of every record's bytes.
    """

    def __init__(self, place: Place, wrote: Callable[[int], None]) -> None:
        self.files: dict[str, int] = {}
        self._place = place
        self._wrote = wrote
        self._file: NewFile | None = None
        self._written = 0

    def append(self, record: Sequence[Buffer]) -> Ref:
        """Write a record; it is durable once the writer is finished and a manifest committed."""
        if self._file is not None and self._file.nbytes >= max(FILE_BYTES, self._written // _FILES):
            self.finish()
        if self._file is None:
            self._file = self._place.new_file()
        file, start = self._file, self._file.nbytes
        for buffer in record:
            file.write(buffer)
        nbytes = file.nbytes - start
        self._written += nbytes
        self._wrote(nbytes)
        digest = hashlib.sha256(bytes(record[0]) + bytes(record[1])).hexdigest()[:32]
        return Ref(file.name, start, nbytes, digest)

    def settle(self) -> None:
        """Bring what was written so far out of the way: it will be a while before the file is finished."""
        if self._file is not None and self._file.nbytes >= self._place.behind_bytes:
            self.finish()
        elif self._file is not None:
            self._file.settle()

    def finish(self) -> None:
        """Make the file that is being written complete."""
        if self._file is not None:
            self._file.finish()
            self.files[self._file.name] = self._file.nbytes
            self._file = None

    def abandon(self) -> None:
        """Throw the file that is being written away."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

"""An example of a blob store: all blobs are in one zip file. docs/extending.md refers to it.

Every change writes the archive again, so this store is for small memories. POSIX only, because of its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from holdall.checkpoint import Waiting, check_name
from holdall.errors import BlobMissingError, DamageError, FencedError, LockedError
from holdall.store.records import Buffer

_MAX_OWNER_BYTES = 200


class ZipLease:
    """The lock file beside the archive."""

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file: int | None = file

    def check(self) -> None:
        """Raise FencedError if the lock was released, or if its file was removed or replaced."""
        with contextlib.suppress(FileNotFoundError):
            if self._file is not None and os.path.samestat(os.fstat(self._file), self._path.stat()):
                return
        raise FencedError(f"The lock {self._path} was released or replaced. Save again.")

    def release(self) -> None:
        """Release the lock."""
        file = self._file
        self._file = None
        if file is not None:
            os.close(file)


class ZipBlobs:
    """The blobs in a zip file, which is written when the first blob is created."""

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self.waiting = Waiting(self.url)
        self._path = path

    def create(self, name: str, data: Buffer) -> bool:
        """Create a blob. See `BlobStore.create`."""
        check_name(name)
        self.waiting.check()
        content = bytes(data)
        with self._lock_archive():
            blobs = self._read_all()
            if name in blobs:
                return blobs[name] == content
            self._replace(blobs | {name: content})
        return True

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a part of a blob. See `BlobStore.read`."""
        check_name(name)
        blobs = self._read_all()
        if name not in blobs:
            raise BlobMissingError(f"{self.url} has no blob {name!r}.")
        if start + length > len(blobs[name]):
            raise DamageError(f"Blob {name!r} of {self.url} ends before byte {start + length}.")
        return blobs[name][start : start + length]

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and sizes. See `BlobStore.list`."""
        yield from ((name, len(blob)) for name, blob in self._read_all().items() if name.startswith(prefix))

    def delete(self, name: str) -> None:
        """Delete a blob if it exists."""
        check_name(name)
        with self._lock_archive():
            blobs = self._read_all()
            if blobs.pop(name, None) is not None:
                self._replace(blobs)

    def lock(self, owner: str) -> ZipLease:
        """Become the only writer. The lock ends with the process."""
        path = self._path.with_suffix(".lock")
        file = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, _MAX_OWNER_BYTES, 0).decode()
            os.close(file)
            raise LockedError(f"{self.url} is in use by {holder}. Save to another place.") from error
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode()[:_MAX_OWNER_BYTES], 0)
        return ZipLease(path, file)

    @contextlib.contextmanager
    def _lock_archive(self) -> Iterator[None]:
        """Keep other processes and threads from changing the archive at the same time."""
        with self._path.with_suffix(".mutex").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_all(self) -> dict[str, bytes]:
        try:
            with zipfile.ZipFile(self._path) as archive:
                return {name: archive.read(name) for name in archive.namelist()}
        except FileNotFoundError:
            return {}
        except zipfile.BadZipFile as error:
            raise DamageError(f"{self.url} is damaged ({error}).") from error

    def _replace(self, blobs: dict[str, bytes]) -> None:
        """Write a new archive, and rename it to the old one. A reader sees the old or the new archive."""
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, content in blobs.items():
                    archive.writestr(name, content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.waiting.record_progress()

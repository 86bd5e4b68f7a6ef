"""The file system, as far as checkpoints use it: every call that changes a disk is one method here.

In:  paths and bytes.  Out: what the operating system did, or its OSError.
Invariant: checkpoints touch a disk through this class alone, so that a simulated disk can take its
place, lose what was not synced, and fail at any call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdall.checkpoint.manifest import (
    DATA_NAME,
    MOST_FORMAT_BYTES,
    MOST_MANIFEST_BYTES,
    SHARD_FOLDER,
    Buffer,
    Manifest,
    data_name,
    decode,
    encode,
    format_text,
    kept_and_stale,
    manifest_name,
    new_writer_id,
    numbers_of,
    require_format,
)
from holdall.errors import CheckpointError, DamageError, FencedError
from holdall.storage import SegmentFile

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_WRITE_AT_ONCE = 4 * 2**20
"""A write to a slow disk can be watched, and given up, at this grain."""
_FULL_SYNC = 51
"""F_FULLFSYNC: on macOS fsync leaves the bytes in the drive's own cache."""


class FileSystem:
    """The disk of this machine."""

    def make_directory(self, path: Path) -> bool:
        """Make a directory; say whether it was not there before."""
        try:
            path.mkdir()
        except FileExistsError:
            return False
        return True

    def create(self, path: Path) -> int:
        """Create a file that must not exist yet, and open it for writing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, 0o644)

    def write(self, file: int, data: Buffer) -> None:
        """Write all of `data` at the end of what was written before."""
        left = memoryview(data).cast("B")
        while left.nbytes:
            left = left[os.write(file, left[:_WRITE_AT_ONCE]) :]

    def sync(self, file: int) -> None:
        """Wait until the file's bytes are on the disk."""
        if sys.platform == "darwin":
            fcntl.fcntl(file, _FULL_SYNC)
        else:
            os.fsync(file)
        if hasattr(os, "posix_fadvise"):
            # What a checkpoint wrote is not read again soon; a container would count its pages.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file another name, which nothing has yet."""
        old.rename(new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name; fails if something has it already."""
        os.link(old, new)

    def is_same(self, one: int, other: int) -> bool:
        """Whether two descriptors are of one file."""
        return os.path.samestat(os.fstat(one), os.fstat(other))

    def unlink(self, path: Path) -> None:
        """Take a name away."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk; Windows writes them in order by itself."""
        if sys.platform == "win32":
            return
        directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(directory, _FULL_SYNC)
            else:
                os.fsync(directory)
        finally:
            os.close(directory)

    def names(self, path: Path) -> list[str]:
        """List a directory, in no order; nothing if it is not there."""
        try:
            return [entry.name for entry in os.scandir(path)]
        except FileNotFoundError:
            return []

    def size(self, path: Path) -> int:
        """Return a file's bytes."""
        return path.stat().st_size

    def open(self, path: Path) -> int:
        """Open a file for reading."""
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))

    def read_at(self, file: int, start: int, nbytes: int) -> bytes:
        """Read `nbytes` from `start` on; fewer at the end of the file."""
        if sys.platform == "win32":
            os.lseek(file, start, os.SEEK_SET)
            return os.read(file, nbytes)
        pieces = []
        while nbytes > 0 and (piece := os.pread(file, nbytes, start)):
            pieces.append(piece)
            start, nbytes = start + len(piece), nbytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def lock(self, path: Path) -> int | None:
        """Take a lock that ends with this process at the latest; None if another holds it."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            if sys.platform == "win32":
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(file)
            return None
        except OSError:
            os.close(file)
            raise
        return file

    def unlock(self, file: int) -> None:
        """Give a lock back."""
        with contextlib.suppress(OSError):
            os.close(file)


_TEMPORARY = ".tmp"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class DirectoryReader:
    """Checkpoints in a directory, to be read."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self.root = root
        self._disk = disk or FileSystem()

    def require(self) -> None:
        """Refuse a directory that holds no checkpoints."""
        raw = self._read("FORMAT", MOST_FORMAT_BYTES, f"{self.url} holds no checkpoints: there is no FORMAT file in it")
        require_format(raw, self.url)

    def numbers(self) -> list[int]:
        """Return the numbers of the manifests that are there, newest first."""
        return numbers_of(self._disk.names(self.root / "manifests"))

    def manifest(self, number: int) -> Manifest:
        """Read a manifest."""
        name = manifest_name(number)
        raw = self._read(f"manifests/{name}", MOST_MANIFEST_BYTES, f"{self.url} has no checkpoint {number}")
        return decode(raw, f"{self.url}/manifests/{name}", number)

    def file_sizes(self) -> dict[str, int]:
        """Return the bytes of every file of records that is there, by name."""
        folder = self.root / "segments"
        sizes = {}
        for name in self._disk.names(folder):
            if DATA_NAME.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # collected by its writer just now
                    sizes[name] = self._disk.size(folder / name)
        return sizes

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records."""
        path = self.root / "segments" / name
        try:
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(error.errno, f"{path} cannot be opened ({error.strerror})") from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return SegmentFile(path, descriptor, is_temporary=False), os.fstat(descriptor).st_size

    def reopened(self) -> DirectoryReader:
        """Return the same checkpoints; `interrupt` does not end reading them."""
        return self

    def below(self, folder: str) -> DirectoryReader:
        """Return the checkpoints of one shard."""
        return DirectoryReader(self.root / folder, self._disk)

    def above(self) -> DirectoryReader | None:
        """Return the checkpoints whose manifests may name those here."""
        top = self.root.parent.parent
        is_below = SHARD_FOLDER.fullmatch(f"{self.root.parent.name}/{self.root.name}") is not None
        return DirectoryReader(top, self._disk) if is_below and "FORMAT" in self._disk.names(top) else None

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def _read(self, name: str, most_bytes: int, missing: str) -> bytes:
        try:
            file = self._disk.open(self.root / name)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CheckpointError(f"{missing}; check the path") from error
        except OSError as error:
            raise CheckpointError(f"{self.url}/{name} cannot be read ({error}); check its permissions") from error
        try:
            raw = self._disk.read_at(file, 0, most_bytes + 1)
        except OSError as error:
            raise CheckpointError(f"{self.url}/{name} cannot be read ({error})") from error
        finally:
            self._disk.close(file)
        if len(raw) > most_bytes:
            raise DamageError(f"{self.url}/{name} has more than {most_bytes} bytes, which none of holdall's has")
        return raw


class DirectoryFile:
    """A file of records under a temporary name."""

    def __init__(self, disk: FileSystem, path: Path) -> None:
        self.name = path.name
        self.nbytes = 0
        self._disk = disk
        self._path = path
        self._temporary = path.with_name(path.name + _TEMPORARY)
        self._file: int | None = disk.create(self._temporary)

    def write(self, data: Buffer) -> None:
        """Add bytes at its end."""
        if self._file is None:
            raise CheckpointError(f"{self._path} was written to after it was finished; report this")
        self._disk.write(self._file, data)
        self.nbytes += memoryview(data).nbytes

    def settle(self) -> None:
        """Sync what was written so far."""
        if self._file is not None:
            self._disk.sync(self._file)

    def finish(self) -> None:
        """Sync it and give it its name; the name is durable with the next commit."""
        if self._file is not None:
            self._disk.sync(self._file)
            self._close()
            self._disk.rename(self._temporary, self._path)

    def abandon(self) -> None:
        """Throw it away, as far as the disk still lets us."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self._temporary)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._disk.close(file)


class DirectoryWriter:
    """A directory that this writer holds.

    Args:
        root: The directory; made if it is not there.
    """

    behind_bytes = 64 * 2**20

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self.writer_id = new_writer_id()
        self._disk = disk or FileSystem()
        self._root = root
        self._segments, self._manifests = root / "segments", root / "manifests"
        self._sequence = 0
        self.reader = DirectoryReader(root, self._disk)
        with disk_errors_explained(self.url, "opened for writing"):
            for parent in reversed(root.parents):
                self._make_directory(parent)
            for folder in (root, self._segments, self._manifests):
                self._make_directory(folder)
            self._lock: int | None = self._take_lock()
            try:
                self._require_format()
                self._sweep()
            except BaseException:
                self.close()
                raise

    def new_file(self) -> DirectoryFile:
        """Begin a file of records."""
        self._sequence += 1
        return DirectoryFile(self._disk, self._segments / data_name(self.writer_id, self._sequence))

    def adopt(self, file: SegmentFile) -> tuple[str, int] | None:
        """Give a file of this disk a second name here; its bytes are synced first."""
        try:
            found = self._disk.open(file.path)
        except OSError:
            return None  # it lies elsewhere, or somebody took its name away
        try:
            if not self._disk.is_same(found, file.descriptor):
                return None
            self._disk.sync(found)
        finally:
            self._disk.close(found)
        self._sequence += 1
        path = self._segments / data_name(self.writer_id, self._sequence)
        try:
            self._disk.link(file.path, path)
        except OSError as error:
            if error.errno in _NO_LINKS | {errno.EXDEV, errno.ENOENT}:
                return None
            raise
        return path.name, self._disk.size(path)

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; when this returns, it survives a power cut."""
        name = manifest_name(manifest.number)
        final, temporary = self._manifests / name, self._manifests / f"{name}.{self.writer_id}{_TEMPORARY}"
        self._disk.sync_directory(self._segments)
        file = self._disk.create(temporary)
        try:
            try:
                self._disk.write(file, encode(manifest))
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            self._publish(temporary, final)
        finally:
            with contextlib.suppress(OSError):
                self._disk.unlink(temporary)
        self._disk.sync_directory(self._manifests)

    def collect(self, keep: int | None, in_use: Iterable[str]) -> int:
        """Remove all but the last `keep` whole checkpoints, and the files that none of them nor `in_use` names."""
        kept, stale = kept_and_stale(self.reader, keep)
        named = set(in_use).union(*(manifest.files for manifest in kept))
        for number in stale:
            self._disk.unlink(self._manifests / manifest_name(number))
        self._disk.sync_directory(self._manifests)
        freed = 0
        for name, nbytes in self.reader.file_sizes().items():
            if name not in named:
                self._disk.unlink(self._segments / name)
                freed += nbytes
        return freed

    def close(self) -> None:
        """Let another writer in."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._disk.unlock(lock)

    def interrupt(self) -> None:
        """Nothing is waited for."""

    def _make_directory(self, path: Path) -> None:
        if self._disk.make_directory(path):
            self._disk.sync_directory(path.parent)

    def _take_lock(self) -> int:
        lock = self._disk.lock(self._root / "LOCK")
        if lock is None:
            raise FencedError(
                f"{self.url} is held by another writer, in this process or another; save to a place of its own, or "
                "close that memory first"
            )
        return lock

    def _require_format(self) -> None:
        if "FORMAT" in self._disk.names(self._root):
            self.reader.require()
            return
        temporary = self._root / f"FORMAT.{self.writer_id}{_TEMPORARY}"
        file = self._disk.create(temporary)
        try:
            self._disk.write(file, format_text())
            self._disk.sync(file)
        finally:
            self._disk.close(file)
        self._disk.rename(temporary, self._root / "FORMAT")
        self._disk.sync_directory(self._root)

    def _sweep(self) -> None:
        """Remove what a writer that died left behind under temporary names."""
        for folder in (self._root, self._segments, self._manifests):
            for name in self._disk.names(folder):
                if name.endswith(_TEMPORARY):
                    self._disk.unlink(folder / name)

    def _publish(self, temporary: Path, final: Path) -> None:
        """Give the manifest its number, which only one writer can."""
        try:
            self._disk.link(temporary, final)
        except FileExistsError as error:
            raise FencedError(
                f"{final} is there already: another writer saves to {self.url}; save to a place of its own"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without links: renaming is as atomic, and the lock keeps others out.
            if final.name in self._disk.names(final.parent):
                raise FencedError(f"{final} is there already: another writer saves to {self.url}") from error
            self._disk.rename(temporary, final)


@contextlib.contextmanager
def disk_errors_explained(url: str, what: str) -> Iterator[None]:
    """Turn what the operating system says into an error that names the url and the remedy."""
    try:
        yield
    except (CheckpointError, DamageError):
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk")
        raise CheckpointError(
            error.errno,
            f"{url} could not be {what} ({error.strerror or error}); {remedy}. Earlier checkpoints are intact",
        ) from error


_REMEDIES = {
    errno.ENOSPC: "free some room on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free some of the quota, or keep fewer checkpoints",
    errno.EROFS: "it is read-only: choose another place",
    errno.EACCES: "allow this user to write there, or choose another place",
    errno.EPERM: "allow this user to write there, or choose another place",
    errno.EIO: "the disk fails: choose another one",
}

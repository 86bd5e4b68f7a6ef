"""Checkpoints in a directory of this machine.

All access to the disk goes through `FileSystem`, so that tests can use a simulated disk that loses data which was not
synced and fails at any call.

Guarantee: a committed checkpoint survives a power cut. Only files with names of the format are read and removed. Links
are not followed, and anything but a regular file is refused. Damage, missing files and missing permissions are three
different errors.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdall.checkpoint.data_file import DataFile
from holdall.checkpoint.manifest import (
    DATA_NAME,
    LEASE_S,
    MANIFEST_NAME,
    CheckpointReader,
    Manifest,
    data_names,
    encode,
    format_text,
    manifest_name,
    new_writer_id,
    require_whole,
)
from holdall.checkpoint.retention import CheckpointWriter
from holdall.errors import CheckpointError, DamageError, FencedError, HoldallError
from holdall.store.records import Buffer

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of `link` on a file system without hard links."""
_TEMPORARY = ".tmp"
_LEFT_BEHIND = re.compile(rf"({DATA_NAME.pattern}|(FORMAT|{MANIFEST_NAME.pattern})\.[0-9a-f]{{16}})\.tmp")
_BYTES_AT_ONCE = 4 * 2**20
"""Bytes of one write or read call, so that progress is visible on a slow disk."""
_ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_TRAPS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags with which opening a link fails, and opening a FIFO does not wait for its other end."""
_NO_FILE = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}
"""Errors of opening a link, a socket or a folder."""
_UNREADABLE = {errno.EIO, *(getattr(errno, name, errno.EIO) for name in ("EBADMSG", "EILSEQ", "ENODATA", "EUCLEAN"))}
"""Errors of sectors that cannot be read, and of file systems whose checksums do not match."""


class FileSystem:
    """The disk of this machine."""

    def make_directory(self, path: Path) -> bool:
        """Make a directory. Return whether it did not exist."""
        try:
            path.mkdir()
        except FileExistsError:
            return False
        return True

    def create(self, path: Path) -> int:
        """Create a file that does not exist, and open it for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS, 0o644)

    def write(self, file: int, data: Buffer) -> None:
        """Append `data`."""
        left = memoryview(data).cast("B")
        while left.nbytes:
            left = left[os.write(file, left[:_BYTES_AT_ONCE]) :]

    def sync(self, file: int) -> None:
        """Wait until the file's bytes are on the disk."""
        _sync(file)
        if hasattr(os, "posix_fadvise"):
            # Checkpoints are not read again soon, and containers count cached pages.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file to a name that does not exist."""
        old.rename(new)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name. Raise FileExistsError if the name exists."""
        os.link(old, new)

    def is_same(self, one: int, other: int) -> bool:
        """Return whether two descriptors belong to one file."""
        return os.path.samestat(os.fstat(one), os.fstat(other))

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk. Windows writes them in order by itself."""
        if sys.platform == "win32":
            return
        directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(directory)
        finally:
            os.close(directory)

    def names(self, path: Path) -> list[str]:
        """Return the names in a directory, in any order. A missing directory has none."""
        try:
            return [entry.name for entry in os.scandir(path)]
        except FileNotFoundError:
            return []

    def is_link(self, path: Path) -> bool:
        """Return whether a path is a symbolic link."""
        return path.is_symlink()

    def size(self, path: Path) -> int:
        """Return the size of a regular file."""
        return _regular(path, path.lstat()).st_size

    def age_s(self, path: Path) -> float:
        """Return the seconds since a file was last written."""
        return time.time() - path.lstat().st_mtime

    def open(self, path: Path) -> int:
        """Open a regular file for reading."""
        return _opened(path, os.O_RDONLY)

    def read(self, file: int, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes of a file that was just opened, or all if it has fewer."""
        pieces = []
        while nbytes > 0 and (piece := os.read(file, min(nbytes, _BYTES_AT_ONCE))):
            pieces.append(piece)
            nbytes -= len(piece)
        return b"".join(pieces)

    def lock(self, path: Path) -> int | None:
        """Take a lock, which ends with this process at the latest. Return None if another process has it."""
        file = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            if sys.platform == "win32":
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError | PermissionError):
                return None
            raise
        return file

    def is_locked(self, file: int, path: Path) -> bool:
        """Return whether a lock file still has its name: it was neither removed nor replaced."""
        try:
            return os.path.samestat(os.fstat(file), path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def unlock(self, file: int) -> None:
        """Release a lock."""
        with contextlib.suppress(OSError):
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_UN)  # A forked child may have a copy of the descriptor.
            os.close(file)


def _sync(file: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # fsync leaves the bytes in the cache of the drive.
    else:
        os.fsync(file)


def _regular(path: Path, found: os.stat_result | None) -> os.stat_result:
    """Return `found` if it describes a regular file. Raise DamageError otherwise."""
    if found is None or not stat.S_ISREG(found.st_mode):
        raise DamageError(f"{path} is no regular file; put the file itself there, or remove it")
    return found


def _opened(path: Path, flags: int) -> int:
    """Open a regular file. Raise DamageError for anything else."""
    try:
        file = os.open(path, flags | _ALWAYS | _NO_TRAPS, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE:
            _regular(path, None)
        raise
    try:
        _regular(path, os.fstat(file))
    except DamageError:
        os.close(file)
        raise
    return file


def create_whole(disk: FileSystem, path: Path, content: Buffer, writer_id: str, *, is_locked: bool) -> bool:
    """Create a file atomically. It is durable when this returns. Return False if it exists.

    Args:
        is_locked: Whether no other process can create it at the same time.
    """
    temporary = path.with_name(f"{path.name}.{writer_id}{_TEMPORARY}")
    file = disk.create(temporary)
    try:
        try:
            disk.write(file, content)
            disk.sync(file)
        finally:
            disk.close(file)
        try:
            disk.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS or not is_locked:
                raise
            # The file system has no links. Renaming is atomic, too, and the lock keeps other writers out.
            if path.name in disk.names(path.parent):
                return False
            disk.rename(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
    disk.sync_directory(path.parent)
    return True


def read_error(path: Path, error: OSError) -> HoldallError:
    """Return the error to raise when a file cannot be read: damage, a missing file, or something to repair."""
    if isinstance(error, HoldallError):
        return error
    if error.errno in _UNREADABLE:
        return DamageError(error.errno, f"{path} cannot be read ({error.strerror}): the disk fails")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return CheckpointError(errno.ENOENT, f"{path} is not there; check the path")
    return CheckpointError(error.errno, f"{path} cannot be read ({error.strerror}); {remedy(error)}")


def remedy(error: OSError) -> str:
    """Return the remedy of an error of the operating system."""
    return _REMEDIES.get(error.errno or 0, "check the disk")


@contextlib.contextmanager
def disk_errors_explained(url: str, what: str) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError that names the place and the remedy."""
    try:
        yield
    except (CheckpointError, DamageError):
        raise
    except OSError as error:
        raise CheckpointError(
            error.errno,
            f"{url} could not be {what} ({error.strerror or error}); {remedy(error)}. Earlier checkpoints are intact",
        ) from error


_REMEDIES = {
    errno.ENOSPC: "free some room on the disk, or keep fewer checkpoints",
    errno.EDQUOT: "free some of the quota, or keep fewer checkpoints",
    errno.ENOTDIR: "a part of this path is a file: choose another directory",
    errno.EROFS: "it is read-only: choose another place",
    errno.EACCES: "allow this user to use it, or choose another place",
    errno.EPERM: "allow this user to use it, or choose another place",
    errno.EIO: "the disk fails: choose another one",
}


class DirectoryReader(CheckpointReader):
    """Reader of the checkpoints of a directory."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        super().__init__(str(root))
        self.root = root
        self._disk = disk or FileSystem()

    def names(self, folder: str) -> list[str]:
        """List one of the folders. Raise an error if it, or the place of the checkpoints, is not a directory."""
        path = self.root / folder
        try:
            self.require_no_link(folder)
            return self._disk.names(path)
        except NotADirectoryError as error:
            if folder == ".":
                return []
            if not self._is_directory():
                raise CheckpointError(
                    f"{self.root} is not a directory, so it contains no checkpoints. Pass the directory that was "
                    "passed to save."
                ) from error
            raise DamageError(
                f"{path} is a file, but checkpoints have a directory of this name. Check whether {self.root} is the "
                "directory that was passed to save."
            ) from error
        except (CheckpointError, DamageError):
            raise
        except OSError as error:
            raise CheckpointError(error.errno, f"{path} cannot be read ({error.strerror}); {remedy(error)}") from error

    def _is_directory(self) -> bool:
        try:
            self._disk.names(self.root)
        except NotADirectoryError:
            return False
        return True

    def require_no_link(self, *folders: str) -> None:
        """Raise DamageError if a folder is a link, because its files belong to another place."""
        for path in [self.root / folder for folder in folders if folder != "."]:
            if self._disk.is_link(path):
                raise DamageError(f"{path} is a link, which is not followed; put the folder itself there")

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Return the content of a file, or None if it does not exist. Raise DamageError if it is larger."""
        try:
            file = self._disk.open(self.root / name)
            try:
                raw = self._disk.read(file, most_bytes + 1)
            finally:
                self._disk.close(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise read_error(self.root / name, error) from error
        if len(raw) > most_bytes:
            raise DamageError(f"{self.url}/{name} has more than {most_bytes} bytes, which none of holdall's has")
        return raw

    def file_sizes(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Return the sizes of all files of records by name, or only of those in `names`."""
        sizes = {}
        for name in filter(DATA_NAME.fullmatch, self.names("segments")) if names is None else names:
            path = self.root / "segments" / name
            try:
                sizes[name] = self._disk.size(path)
            except OSError as error:
                explained = read_error(path, error)
                is_gone = isinstance(error, FileNotFoundError | NotADirectoryError | DamageError)
                if not is_gone and (names is not None or not isinstance(explained, DamageError)):
                    raise explained from error  # A bad sector is an error only for a requested file.
        return sizes

    def open(self, name: str) -> tuple[DataFile, int]:
        """Open a file of records. Return the file and its size."""
        path = self.root / "segments" / name
        try:
            descriptor = self._disk.open(path)
        except OSError as error:
            raise read_error(path, error) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return DataFile(path, descriptor), os.fstat(descriptor).st_size

    def below(self, folder: str) -> DirectoryReader:
        """Return the reader of one shard's checkpoints."""
        self.require_no_link("shards", folder)
        return DirectoryReader(self.root / folder, self._disk)

    def top(self) -> DirectoryReader:
        """Return the reader of the checkpoints two folders above."""
        return DirectoryReader(self.root.parent.parent, self._disk)


class DirectoryFile:
    """A file of records that is being written under a temporary name."""

    def __init__(self, disk: FileSystem, path: Path) -> None:
        self.name = path.name
        self.nbytes = 0
        self._disk = disk
        self._path = path
        self._temporary = path.with_name(path.name + _TEMPORARY)
        self._file = disk.create(self._temporary)

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        self._disk.write(self._file, data)
        self.nbytes += memoryview(data).nbytes

    def finish(self) -> None:
        """Sync the file and give it its name, which is durable with the next commit."""
        self._disk.sync(self._file)
        self._close()
        self._disk.rename(self._temporary, self._path)

    def abandon(self) -> None:
        """Delete the file. Errors are ignored."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._disk.unlink(self._temporary)

    def _close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            self._disk.close(file)


class DirectoryWriter(CheckpointWriter):
    """The only writer of the checkpoints of a directory, which is made if it does not exist."""

    reader: DirectoryReader

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self._disk = disk or FileSystem()
        self.reader = DirectoryReader(root, self._disk)
        self.url, self.writer_id, self._root = self.reader.url, new_writer_id(), root
        self._names, self._process = data_names(self.writer_id), os.getpid()
        self._segments, self._manifests = root / "segments", root / "manifests"
        with disk_errors_explained(self.url, "opened for writing"):
            if self.reader.shard_folder is not None:
                self.reader.top().require_no_link("shards", self.reader.shard_folder)
            self.reader.require_no_link("segments", "manifests")
            for folder in (*reversed(root.parents), root, self._segments, self._manifests):
                if self._disk.make_directory(folder):
                    self._disk.sync_directory(folder.parent)
            self._lock: int | None = self._disk.lock(root / "LOCK")
            if self._lock is None:
                raise FencedError(
                    f"{self.url} is held by another writer, in this process or another; save to a place of its own, or "
                    "close that memory first"
                )
            try:
                self._require_format()
                for name in (".", "segments", "manifests"):  # Temporary files of writers that were killed.
                    self.remove(name, filter(_LEFT_BEHIND.fullmatch, self.reader.names(name)), LEASE_S)
            except BaseException:
                self.close()
                raise

    def new_file(self) -> DirectoryFile:
        """Start a file of records."""
        return DirectoryFile(self._disk, self._segments / next(self._names))

    def is_there(self) -> bool:
        """Return whether the directory is still the one that was opened: it was neither removed nor replaced."""
        return self._lock is not None and self._disk.is_locked(self._lock, self._root / "LOCK")

    def commit(self, manifest: Manifest) -> None:
        """Commit a checkpoint of finished files. When this returns, it survives a power cut.

        All files that it names are looked up first, because another process may have removed them.
        """
        self._disk.sync_directory(self._segments)
        self._require_all(manifest)
        path, raw = self._manifests / manifest_name(manifest.number), encode(manifest)
        if not create_whole(self._disk, path, raw, self.writer_id, is_locked=True):
            raise FencedError(
                f"{path} is there already: another writer saves to {self.url}; save to a place of its own"
            )
        self.reader.committed.append((raw, manifest))

    def unclaimed(self) -> tuple[dict[str, int], set[str]]:
        """Return the sizes of all files of records, and the names of those of this writer or older than a lease."""
        found, disk = self.reader.file_sizes(), self._disk
        return found, {n for n in found if n.startswith(self.writer_id) or disk.age_s(self._segments / n) > LEASE_S}

    def remove(self, folder: str, names: Iterable[str], least_age_s: float = -math.inf) -> None:
        """Remove files. The removal of manifests is durable before the files that they named are removed."""
        for path in [self._root / folder / name for name in names]:
            with contextlib.suppress(FileNotFoundError, DamageError):  # Anything but a regular file belongs to others.
                self._disk.size(path)
                if self._disk.age_s(path) > least_age_s:
                    self._disk.unlink(path)
        if folder == "manifests":
            self._disk.sync_directory(self._manifests)

    def close(self) -> None:
        """Release the directory for other writers."""
        lock, self._lock = self._lock, None
        if lock is not None:
            (self._disk.unlock if self._process == os.getpid() else self._disk.close)(lock)

    def _require_all(self, manifest: Manifest) -> None:
        """Raise CheckpointError if a file of the manifest is missing, or if the directory was replaced."""
        if not self.is_there():
            raise CheckpointError(f"{self.url} was removed while it was saved to; nothing was committed, save again")
        try:
            require_whole(manifest, self.reader, self.reader.file_sizes(manifest.files))
        except (CheckpointError, DamageError) as error:
            raise CheckpointError(
                error.errno or errno.ENOENT,
                f"{self.url}: {error}; somebody removed or changed it, so nothing was committed. The next save writes "
                "it again",
            ) from error

    def _require_format(self) -> None:
        path, is_there = self._root / "FORMAT", "FORMAT" in self.reader.names(".")
        if (is_there or self.reader.numbers()) and self.reader.require():
            return
        if is_there:
            self._disk.size(path)  # Raises DamageError unless FORMAT is a regular file.
            self._disk.unlink(path)
        create_whole(self._disk, path, format_text(), self.writer_id, is_locked=True)

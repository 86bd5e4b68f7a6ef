"""Blobs in a directory of this machine.

All access to the disk goes through `FileSystem`, so that tests can use a simulated disk that loses data which was not
synced and fails at any call.

Guarantee: a created blob survives a power cut. Links are not followed, and anything but a regular file is refused.
Damage, missing files and missing permissions are three different errors.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdall.checkpoint.blobs import check_name, explain_lock
from holdall.checkpoint.manifest import SHARD_FOLDER
from holdall.checkpoint.waiting import Waiting
from holdall.errors import BlobMissingError, CheckpointError, DamageError, FencedError, HoldallError
from holdall.store.records import Buffer

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK_NAME = "LOCK"
_TEMPORARY = re.compile(r"[A-Za-z0-9_.\-]+\.[0-9a-f]{16}\.tmp")
_MAX_CALL_BYTES = 4 * 2**20
"""Bytes of one write or read call, so that a cancelled job on a slow disk ends soon."""
_MAX_LISTINGS = 20
"""Maximum number of listings of a directory from which files are being removed. The last one omits removed files."""
_LOCK_RETRY_S = 0.05
"""Seconds before a lock that was refused is tried again, because `FileSystem.is_taken` locks the file for a moment."""
_MAX_OWNER_BYTES = 200
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of `link` on a file system without hard links."""
_OPEN_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags with which every file is opened."""
_REGULAR_ONLY_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags with which opening a link fails, and opening a FIFO does not wait for its other end."""
_NOT_REGULAR = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}
"""Errors of opening a link, a socket or a directory."""
_UNREADABLE = {errno.EIO, *(getattr(errno, name, errno.EIO) for name in ("EBADMSG", "EILSEQ", "ENODATA", "EUCLEAN"))}
"""Errors of sectors that cannot be read, and of file systems whose checksums do not match."""
_REMEDIES = {
    errno.ENOSPC: "Free some disk space, or keep fewer checkpoints.",
    errno.EDQUOT: "Free some of the quota, or keep fewer checkpoints.",
    errno.ENOTDIR: "A part of this path is a file. Choose another directory.",
    errno.EROFS: "The disk is read-only. Choose another directory.",
    errno.EACCES: "Give this user permission, or choose another directory.",
    errno.EPERM: "Give this user permission, or choose another directory.",
    errno.EIO: "The disk fails. Choose another disk.",
    errno.EMFILE: "The process has too many open files. Raise the limit with ulimit -n.",
}


class DiskEntry(NamedTuple):
    """A file or a directory in a listing."""

    name: str
    nbytes: int | None  # None: a directory.


class FileSystem:
    """The disk of this machine."""

    def make_directory(self, path: Path) -> bool:
        """Make a directory. Return False if it exists already."""
        try:
            path.mkdir()
        except FileExistsError:
            return False
        return True

    def create(self, path: Path) -> int:
        """Create a file that does not exist, and open it for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o644)

    def write(self, file: int, data: Buffer) -> None:
        """Append `data`, which has at most `_MAX_CALL_BYTES` bytes."""
        remaining = memoryview(data).cast("B")
        while remaining.nbytes:
            written = os.write(file, remaining)
            remaining = remaining[written:]

    def sync(self, file: int) -> None:
        """Wait until the file's bytes are on the disk."""
        _sync(file)
        if hasattr(os, "posix_fadvise"):
            # Checkpoints are not read again soon, and containers count cached pages.
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name. Raise FileExistsError if the name exists."""
        os.link(old, new)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file to a name that does not exist."""
        old.rename(new)

    def unlink(self, path: Path) -> None:
        """Remove a regular file. Raise DamageError for anything else."""
        _require_regular(path, path.lstat())
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Wait until the names in a directory are on the disk. On Windows do nothing: it writes names in order."""
        if sys.platform == "win32":
            return
        directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _sync(directory)
        finally:
            os.close(directory)

    def list(self, path: Path) -> list[DiskEntry]:
        """Return the files and the directories in a directory. Links and special files have 0 bytes.

        If a file was removed meanwhile, list again, because the file that replaced it may not have been listed.
        """
        entries: list[DiskEntry | None] = []
        for _ in range(_MAX_LISTINGS):
            with os.scandir(path) as children:
                entries = [_describe(child) for child in children]
            if None not in entries:
                break
        return [entry for entry in entries if entry is not None]

    def is_link(self, path: Path) -> bool:
        """Return whether a path is a symbolic link."""
        return path.is_symlink()

    def open(self, path: Path) -> int:
        """Open a regular file for reading."""
        return _open_regular(path, os.O_RDONLY)

    def read(self, file: int, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from byte `start`. The result is shorter at the end of the file."""
        if hasattr(os, "pread"):
            return os.pread(file, nbytes, start)
        os.lseek(file, start, os.SEEK_SET)
        return os.read(file, nbytes)

    def lock(self, path: Path, owner: str) -> int | None:
        """Take a lock, which ends with this process at the latest.

        Return the descriptor of the lock file, or None if another process has the lock. `owner` is written to the file
        for `read_owner`.
        """
        file = _open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            if sys.platform == "win32":
                msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(file, 0)
                os.write(file, owner.encode()[:_MAX_OWNER_BYTES])
        except OSError as error:
            os.close(file)
            if isinstance(error, BlockingIOError | PermissionError):
                return None
            raise
        return file

    def is_taken(self, path: Path) -> bool:
        """Return whether a process holds the lock now. Always False on Windows."""
        try:
            file = self.open(path)
        except OSError:
            return False
        try:
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # A file system without locks.
            return False
        finally:
            self.close(file)
        return False

    def read_owner(self, path: Path) -> str:
        """Return the owner that `lock` wrote to a lock file, or an empty text if the file cannot be read."""
        try:
            file = self.open(path)
        except OSError:
            return ""
        try:
            return self.read(file, 0, _MAX_OWNER_BYTES).decode(errors="replace")
        except OSError:
            return ""
        finally:
            self.close(file)

    def is_same_file(self, file: int, path: Path) -> bool:
        """Return whether the open `file` is still the file at `path`, which was neither removed nor replaced."""
        try:
            return os.path.samestat(os.fstat(file), path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def unlock(self, file: int) -> None:
        """Release a lock."""
        with contextlib.suppress(OSError):
            if sys.platform != "win32":
                # A forked child may have a copy of the descriptor, so closing this one may not release the lock.
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _describe(entry: os.DirEntry[str]) -> DiskEntry | None:
    """Return the entry of a listing, or None if its file was removed meanwhile."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return DiskEntry(entry.name, None)
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return DiskEntry(entry.name, status.st_size if stat.S_ISREG(status.st_mode) else 0)


def _sync(file: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # fsync leaves the bytes in the cache of the drive.
    else:
        os.fsync(file)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _explain_irregular(path)


def _explain_irregular(path: Path) -> DamageError:
    return DamageError(f"{path} is a link, a directory or a special file. holdall reads only regular files.")


def _open_regular(path: Path, flags: int) -> int:
    try:
        file = os.open(path, flags | _OPEN_FLAGS | _REGULAR_ONLY_FLAGS, 0o644)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _explain_irregular(path) from error
        raise
    try:
        _require_regular(path, os.fstat(file))
    except DamageError:
        os.close(file)
        raise
    return file


class DirectoryLease:
    """The lock file of a directory."""

    def __init__(self, disk: FileSystem, path: Path, file: int) -> None:
        self._disk = disk
        self._path = path
        self._file: int | None = file
        self._process = os.getpid()

    def check(self) -> None:
        """Raise FencedError if the lock was released, or if the directory was removed or replaced."""
        folder = self._path.parent
        if self._file is None:
            raise FencedError(f"The lock of {folder} was released.")
        with _explain_errors(str(folder), "read"):
            if not self._disk.is_same_file(self._file, self._path):
                raise FencedError(f"{folder} was removed or replaced while it was in use. Save again.")

    def release(self) -> None:
        """Give the lock up. A forked child only closes its copy of the descriptor."""
        file = self._file
        self._file = None
        if file is None:
            return
        if self._process == os.getpid():
            self._disk.unlock(file)
        else:
            self._disk.close(file)


class DirectoryBlobs:
    """The blobs of a directory, which is made by the first `create` or `lock`.

    A blob is written to a temporary file. The file is synced and linked to the name of the blob. Then the directory is
    synced, so that the name survives a power cut.
    """

    def __init__(self, root: Path, disk: FileSystem | None = None, waiting: Waiting | None = None) -> None:
        self.url = str(root)
        self.waiting = waiting or Waiting(self.url)
        self.root = root
        self._disk = disk or FileSystem()
        # Links below this directory are refused. For a shard it is the directory of the memory over all shards.
        self._top = root.parent.parent if SHARD_FOLDER.fullmatch("/".join(root.parts[-2:])) else root

    def create(self, name: str, data: Buffer) -> bool:
        """Create a blob. See `BlobStore.create`."""
        path = self._make_path(name)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        with _explain_errors(self.url, "written"):
            file = self._create_file(temporary)
            try:
                self._write_and_close(file, data)
                is_new = self._give_name(temporary, path)
            finally:
                with contextlib.suppress(OSError):
                    self._disk.unlink(temporary)
            self._disk.sync_directory(path.parent)
        self.waiting.record_progress()
        return is_new or self._has(name, data)

    def read(self, name: str, start: int, length: int) -> bytes:
        """Return a part of a blob. See `BlobStore.read`."""
        file = self.open(name)
        pieces = []
        found = 0
        try:
            while found < length:
                piece = self._disk.read(file, start + found, min(length - found, _MAX_CALL_BYTES))
                if not piece:
                    raise DamageError(
                        f"{self.root / name} ends at byte {start + found}. Byte {start + length - 1} is missing."
                    )
                pieces.append(piece)
                found += len(piece)
        except OSError as error:
            raise _explain_read(self.root / name, error) from error
        finally:
            self._disk.close(file)
        self.waiting.record_progress()
        return b"".join(pieces)

    def open(self, name: str) -> int:
        """Return a descriptor from which a blob can be read. The errors are those of `read`."""
        path = self._make_path(name)
        try:
            self._refuse_links(path.parent)
            return self._disk.open(path)
        except OSError as error:
            raise _explain_read(path, error) from error

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield names and sizes. See `BlobStore.list`."""
        folder = prefix.rpartition("/")[0]
        if folder:
            check_name(folder)
        yield from self._list_folder(folder, prefix)

    def delete(self, name: str) -> None:
        """Delete a blob if it exists."""
        path = self._make_path(name)
        with _explain_errors(self.url, "written"):
            self._refuse_links(path.parent)
            try:
                self._disk.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            self._disk.sync_directory(path.parent)
        self.waiting.record_progress()

    def lock(self, owner: str) -> DirectoryLease:
        """Become the only writer, and remove the temporary files of writers that were killed."""
        path = self.root / LOCK_NAME
        with _explain_errors(self.url, "opened for writing"):
            self._make_directories(self.root)
            self._refuse_links(self.root)
            file = self._disk.lock(path, owner)
            if file is None:
                time.sleep(_LOCK_RETRY_S)
                file = self._disk.lock(path, owner)
            if file is None:
                raise explain_lock(self.url, self._disk.read_owner(path) or "another writer", owner)
            lease = DirectoryLease(self._disk, path, file)
            try:
                self._remove_temporary(self.root)
            except BaseException:
                lease.release()
                raise
        return lease

    def find_writer(self) -> str:
        """Return the process that saves to this directory now, or an empty text."""
        path = self.root / LOCK_NAME
        return (self._disk.read_owner(path) or "another process") if self._disk.is_taken(path) else ""

    def _make_path(self, name: str) -> Path:
        check_name(name)
        return self.root / name

    def _has(self, name: str, data: Buffer) -> bool:
        """Return whether a blob has the content `data`."""
        view = memoryview(data).cast("B")
        if dict(self.list(name)).get(name) != view.nbytes:
            return False
        return self.read(name, 0, view.nbytes) == view

    def _create_file(self, path: Path) -> int:
        """Create a file, and its directory if that does not exist."""
        self._refuse_links(path.parent)
        try:
            return self._disk.create(path)
        except FileNotFoundError:
            self._make_directories(path.parent)
            return self._disk.create(path)

    def _write_and_close(self, file: int, data: Buffer) -> None:
        """Write the content of a file and sync it."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, view.nbytes, _MAX_CALL_BYTES):
                self.waiting.check()
                self._disk.write(file, view[start : start + _MAX_CALL_BYTES])
                self.waiting.record_progress()
            self._disk.sync(file)
        finally:
            self._disk.close(file)

    def _give_name(self, temporary: Path, path: Path) -> bool:
        """Give a complete file its name. Return False if the name exists."""
        try:
            self._disk.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # The file system has no hard links. Renaming is atomic, too, and other writers do not have the lock.
            if any(entry.name == path.name for entry in self._disk.list(path.parent)):
                return False
            self._disk.rename(temporary, path)
        return True

    def _make_directories(self, path: Path) -> None:
        for folder in (*reversed(path.parents), path):
            if self._disk.make_directory(folder):
                self._disk.sync_directory(folder.parent)

    def _list_folder(self, folder: str, prefix: str) -> Iterator[tuple[str, int]]:
        path = self.root / folder
        try:
            self._refuse_links(path)
            entries = self._disk.list(path)
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            raise self._explain_file(path) from error
        except DamageError:
            raise
        except OSError as error:  # Not damage to one checkpoint: older ones could not be listed either.
            raise _explain_refusal(path, error) from error
        for entry in entries:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.nbytes is not None and name.startswith(prefix):
                if name != LOCK_NAME and not _TEMPORARY.fullmatch(entry.name):
                    yield name, entry.nbytes
            elif entry.nbytes is None and f"{name}/".startswith(prefix):
                yield from self._list_folder(name, prefix)

    def _explain_file(self, path: Path) -> HoldallError:
        """Return the error for a file where a directory is expected."""
        try:
            self._disk.list(self.root)
        except NotADirectoryError:
            return CheckpointError(
                errno.ENOTDIR,
                f"{self.root} is not a directory, so it contains no checkpoints. Pass the directory that was passed to "
                "save.",
            )
        return DamageError(
            f"{path} is a file, but checkpoints have a directory of this name. Check whether {self.root} is the "
            "directory that was passed to save."
        )

    def _refuse_links(self, folder: Path) -> None:
        """Raise DamageError if a directory below `_top` is a link, because its files belong to another place."""
        while self._top in folder.parents:
            if self._disk.is_link(folder):
                raise DamageError(f"{folder} is a link, which is not followed. Use the directory itself.")
            folder = folder.parent

    def _remove_temporary(self, folder: Path) -> None:
        """Remove the temporary files of killed writers from the root and its directories. The caller holds the lock."""
        for entry in self._disk.list(folder):
            if entry.nbytes is None and folder == self.root:
                self._remove_temporary(folder / entry.name)
            elif entry.nbytes is not None and _TEMPORARY.fullmatch(entry.name):
                self._disk.unlink(folder / entry.name)


def _explain_read(path: Path, error: OSError) -> HoldallError:
    """Return the error to raise when a file cannot be read: damage, a missing blob, or a refusal."""
    if isinstance(error, HoldallError):
        return error
    if error.errno in _UNREADABLE:
        return DamageError(error.errno, f"{path} cannot be read ({error.strerror}). The disk fails.")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return BlobMissingError(
            errno.ENOENT, f"{path} does not exist. If a memory that saves there has removed it, load again."
        )
    return _explain_refusal(path, error)


def _explain_refusal(path: Path, error: OSError) -> CheckpointError:
    """Return the error to raise when the operating system refuses to read a file or a directory."""
    return CheckpointError(error.errno, f"{path} cannot be read ({error.strerror}). {_find_remedy(error)}")


def _find_remedy(error: OSError) -> str:
    return _REMEDIES.get(error.errno or 0, "Check the disk.")


@contextlib.contextmanager
def _explain_errors(url: str, action: str) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError that names the directory and the remedy.

    `action` is a participle: the message says that `url` could not be read, written or opened.
    """
    try:
        yield
    except (CheckpointError, DamageError):
        raise
    except OSError as error:
        raise CheckpointError(
            error.errno,
            f"{url} could not be {action} ({error.strerror or error}). {_find_remedy(error)} Earlier checkpoints are "
            "intact.",
        ) from error

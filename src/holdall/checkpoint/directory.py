"""Checkpoints in a directory of this machine: the disk below, and how a checkpoint becomes durable on it.

In:  files of records and manifests, written and read through `FileSystem`.  Out: a checkpoint, complete or not at all.
Invariant: checkpoints touch a disk through that class alone, so that a simulated disk can take its place, lose what
was not synced, and fail at any call. Only names of the format's own pattern are read and removed; no link is followed,
and what is no regular file is refused. What is acknowledged was there in full, in the directory that bears the name.
Damage, what may not be read and what is not there are three different errors.
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

from holdall.checkpoint.files import NO_LINKS, CheckpointWriter, has_linked
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
from holdall.errors import CheckpointError, DamageError, FencedError, HoldallError
from holdall.storage import Buffer, SegmentFile

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_TEMPORARY = ".tmp"
_LEFT_BEHIND = re.compile(rf"({DATA_NAME.pattern}|(FORMAT|{MANIFEST_NAME.pattern})\.[0-9a-f]{{16}})\.tmp")
_BYTES_AT_ONCE = 4 * 2**20
"""A write to a slow disk can be watched, and given up, at this grain; what is read may be much less than was asked."""
_ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_TRAPS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Opening a link fails, and opening a FIFO does not wait for its other end."""
_NO_FILE = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}
"""What opening a link, a socket or a folder ends with."""
_UNREADABLE = {errno.EIO, *(getattr(errno, name, errno.EIO) for name in ("EBADMSG", "EILSEQ", "ENODATA", "EUCLEAN"))}
"""What a disk says of sectors that it cannot read, or a file system of sums that do not fit."""


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
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS, 0o644)

    def write(self, file: int, data: Buffer) -> None:
        """Write all of `data` at the end of what was written before."""
        left = memoryview(data).cast("B")
        while left.nbytes:
            left = left[os.write(file, left[:_BYTES_AT_ONCE]) :]

    def sync(self, file: int) -> None:
        """Wait until the file's bytes are on the disk."""
        _sync(file)
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
            _sync(directory)
        finally:
            os.close(directory)

    def names(self, path: Path) -> list[str]:
        """List a directory, in no order; nothing if it is not there."""
        try:
            return [entry.name for entry in os.scandir(path)]
        except FileNotFoundError:
            return []

    def is_link(self, path: Path) -> bool:
        """Whether a name stands for another."""
        return path.is_symlink()

    def size(self, path: Path) -> int:
        """Return a regular file's bytes."""
        return _regular(path, path.lstat()).st_size

    def age_s(self, path: Path) -> float:
        """Return for how long a file has not been written to."""
        return time.time() - path.lstat().st_mtime

    def open(self, path: Path) -> int:
        """Open a regular file for reading."""
        return _opened(path, os.O_RDONLY)

    def read(self, file: int, nbytes: int) -> bytes:
        """Read the first bytes of a file that was just opened; fewer if it has no more."""
        pieces = []
        while nbytes > 0 and (piece := os.read(file, min(nbytes, _BYTES_AT_ONCE))):
            pieces.append(piece)
            nbytes -= len(piece)
        return b"".join(pieces)

    def lock(self, path: Path) -> int | None:
        """Take a lock that ends with this process at the latest; None if another holds it."""
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
        """Whether a lock is the one that bears the name: not if it was removed, or made again."""
        try:
            return os.path.samestat(os.fstat(file), path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def unlock(self, file: int) -> None:
        """Give a lock back."""
        with contextlib.suppress(OSError):
            if sys.platform != "win32":
                fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may have a copy of the file
            os.close(file)


def _sync(file: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(file, fcntl.F_FULLFSYNC)  # fsync leaves the bytes in the drive's own cache
    else:
        os.fsync(file)


def _regular(path: Path, found: os.stat_result | None) -> os.stat_result:
    """Return what was found under a path, if it is a regular file."""
    if found is None or not stat.S_ISREG(found.st_mode):
        raise DamageError(f"{path} is no regular file; put the file itself there, or remove it")
    return found


def _opened(path: Path, flags: int) -> int:
    """Open a regular file and nothing else."""
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
    """Make a file in one step where none is, durable when this returns; return whether it was done.

    Args:
        is_locked: Whether nobody else can make it at the same time.
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
            # A file system without links: renaming is as atomic, and the lock keeps others out.
            if path.name in disk.names(path.parent):
                return False
            disk.rename(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
    disk.sync_directory(path.parent)
    return True


def read_error(path: Path, error: OSError) -> HoldallError:
    """Say what an error means to a reader: damage, something that is gone, or something that can be mended."""
    if isinstance(error, HoldallError):
        return error
    if error.errno in _UNREADABLE:
        return DamageError(error.errno, f"{path} cannot be read ({error.strerror}): the disk fails")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return CheckpointError(errno.ENOENT, f"{path} is not there; check the path")
    return CheckpointError(error.errno, f"{path} cannot be read ({error.strerror}); {remedy(error)}")


def remedy(error: OSError) -> str:
    """Say what to do about an error of the operating system."""
    return _REMEDIES.get(error.errno or 0, "check the disk")


@contextlib.contextmanager
def disk_errors_explained(url: str, what: str) -> Iterator[None]:
    """Turn what the operating system says into an error that names the url and the remedy."""
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
    """Checkpoints in a directory, to be read."""

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
        """Refuse folders that stand elsewhere: what lies there is another's."""
        for path in [self.root / folder for folder in folders if folder != "."]:
            if self._disk.is_link(path):
                raise DamageError(f"{path} is a link, which is not followed; put the folder itself there")

    def read(self, name: str, most_bytes: int) -> bytes | None:
        """Read a file whole; None if it is not there, DamageError if it has more bytes than that."""
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
        """Return the bytes of every file of records that is there, by name; or of those among some names."""
        sizes = {}
        for name in filter(DATA_NAME.fullmatch, self.names("segments")) if names is None else names:
            path = self.root / "segments" / name
            try:
                sizes[name] = self._disk.size(path)
            except OSError as error:
                explained = read_error(path, error)
                is_gone = isinstance(error, FileNotFoundError | NotADirectoryError | DamageError)
                if not is_gone and (names is not None or not isinstance(explained, DamageError)):
                    raise explained from error  # of a sector that cannot be read, only if it is asked for by name
        return sizes

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Open a file of records."""
        path = self.root / "segments" / name
        try:
            descriptor = self._disk.open(path)
        except OSError as error:
            raise read_error(path, error) from error
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        return SegmentFile(path, descriptor, is_temporary=False), os.fstat(descriptor).st_size

    def below(self, folder: str) -> DirectoryReader:
        """Return the checkpoints of one shard."""
        self.require_no_link("shards", folder)
        return DirectoryReader(self.root / folder, self._disk)

    def top(self) -> DirectoryReader:
        """Return the checkpoints two folders above."""
        return DirectoryReader(self.root.parent.parent, self._disk)


class DirectoryFile:
    """A file of records under a temporary name."""

    def __init__(self, disk: FileSystem, path: Path) -> None:
        self.name = path.name
        self.nbytes = 0
        self._disk = disk
        self._path = path
        self._temporary = path.with_name(path.name + _TEMPORARY)
        self._file = disk.create(self._temporary)

    def write(self, data: Buffer) -> None:
        """Add bytes at its end."""
        self._disk.write(self._file, data)
        self.nbytes += memoryview(data).nbytes

    def settle(self) -> None:
        """Sync what was written so far."""
        self._disk.sync(self._file)

    def finish(self) -> None:
        """Sync it and give it its name; the name is durable with the next commit."""
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
        file, self._file = self._file, -1
        if file >= 0:
            self._disk.close(file)


class DirectoryWriter(CheckpointWriter):
    """A directory that this writer holds; it is made if it is not there."""

    behind_bytes = 64 * 2**20
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
                for name in (".", "segments", "manifests"):  # what writers that died left behind
                    self.remove(name, filter(_LEFT_BEHIND.fullmatch, self.reader.names(name)), LEASE_S)
            except BaseException:
                self.close()
                raise

    def new_file(self) -> DirectoryFile:
        """Begin a file of records."""
        return DirectoryFile(self._disk, self._segments / next(self._names))

    def is_there(self) -> bool:
        """Whether the directory that bears the name is the one that was opened: it may have been removed."""
        return self._lock is not None and self._disk.is_locked(self._lock, self._root / "LOCK")

    def adopt(self, file: SegmentFile) -> tuple[str, int] | None:
        """Give a file of this disk a second name here."""
        path = self._segments / next(self._names)
        return (path.name, self._disk.size(path)) if has_linked(self._disk, file, path) else None

    def commit(self, manifest: Manifest) -> None:
        """Make a checkpoint of what was finished; when this returns, it survives a power cut.

        All that it names is looked for first: somebody may have removed it since it was written.
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
        """Return the files of records, and those among them that are this writer's, or older than a lease."""
        found, disk = self.reader.file_sizes(), self._disk
        return found, {n for n in found if n.startswith(self.writer_id) or disk.age_s(self._segments / n) > LEASE_S}

    def remove(self, folder: str, names: Iterable[str], least_age_s: float = -math.inf) -> None:
        """Remove files; manifests are gone for good before the files go that they named."""
        for path in [self._root / folder / name for name in names]:
            with contextlib.suppress(FileNotFoundError, DamageError):  # no file: another's, whatever it is
                self._disk.size(path)
                if self._disk.age_s(path) > least_age_s:
                    self._disk.unlink(path)
        if folder == "manifests":
            self._disk.sync_directory(self._manifests)

    def close(self) -> None:
        """Let another writer in."""
        lock, self._lock = self._lock, None
        if lock is not None:
            (self._disk.unlock if self._process == os.getpid() else self._disk.close)(lock)

    def _require_all(self, manifest: Manifest) -> None:
        """Refuse a manifest that names what is not there, or a directory that is another by now."""
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
            self._disk.size(path)  # refuses what is no file
            self._disk.unlink(path)
        create_whole(self._disk, path, format_text(), self.writer_id, is_locked=True)

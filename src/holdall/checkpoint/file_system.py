"""What checkpoints are written to: the file system, and what directories and object stores have in common.

Every call that looks at a disk or changes it is one method of `FileSystem`.

In:  paths and bytes.  Out: what the operating system did, or its OSError.
Invariant: checkpoints touch a disk through that class alone, so that a simulated disk can take its
place, lose what was not synced, and fail at any call. No link is followed, and nothing is waited for: what is no
regular file is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from holdall.checkpoint.manifest import Buffer, Manifest, is_remote, new_writer_id
from holdall.checkpoint.objects import Objects
from holdall.errors import CheckpointError, DamageError, HoldallError
from holdall.storage import SegmentFile

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_SLOT = re.compile(r"[0-9a-f]{16}\.slot")
_MOST_SLOT_BYTES = 2**30
_REQUEST_S = 0.2
_WRITE_AT_ONCE = 4 * 2**20
"""A write to a slow disk can be watched, and given up, at this grain."""
_READ_AT_ONCE = 2**20
"""The most that is set aside for what may be much less."""
_FULL_SYNC = 51
"""F_FULLFSYNC: on macOS fsync leaves the bytes in the drive's own cache."""
_ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_TRAPS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Opening a link fails, and opening a FIFO does not wait for its other end."""
_NO_FILE = {errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR}
"""What opening a link, a socket or a folder ends with."""
UNREADABLE = {errno.EIO, *(getattr(errno, name, errno.EIO) for name in ("EBADMSG", "EILSEQ", "ENODATA", "EUCLEAN"))}
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

    def is_link(self, path: Path) -> bool:
        """Whether a name stands for another."""
        return path.is_symlink()

    def size(self, path: Path) -> int:
        """Return a regular file's bytes."""
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise DamageError(f"{path} is no regular file; put the file itself there, or remove it")
        return found.st_size

    def age_s(self, path: Path) -> float:
        """Return for how long a file has not been written to."""
        return time.time() - path.lstat().st_mtime

    def open(self, path: Path) -> int:
        """Open a regular file for reading."""
        return _opened(path, os.O_RDONLY)

    def read_at(self, file: int, start: int, nbytes: int) -> bytes:
        """Read `nbytes` from `start` on; fewer at the end of the file."""
        if sys.platform == "win32":
            os.lseek(file, start, os.SEEK_SET)
            return os.read(file, nbytes)
        pieces = []
        while nbytes > 0 and (piece := os.pread(file, min(nbytes, _READ_AT_ONCE), start)):
            pieces.append(piece)
            start, nbytes = start + len(piece), nbytes - len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def lock(self, path: Path) -> int | None:
        """Take a lock that ends with this process at the latest; None if another holds it."""
        file = _opened(path, os.O_RDWR | os.O_CREAT)
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

    def is_locked(self, file: int, path: Path) -> bool:
        """Whether a lock is the one that bears the name: not if it was removed, or made again."""
        try:
            return os.path.samestat(os.fstat(file), path.lstat())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def unlock(self, file: int) -> None:
        """Give a lock back."""
        with contextlib.suppress(OSError):
            os.close(file)


class FileObjects:
    """The files of a directory, with those calls of `Objects` that make each of them once."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url, self._root, self._disk = str(root), root, disk or FileSystem()
        try:
            for folder in (*reversed(root.parents), root):
                if not folder.exists() and self._disk.make_directory(folder):
                    self._disk.sync_directory(folder.parent)
        except OSError as error:
            raise CheckpointError(f"{root} cannot be made ({error}); check the path and its permissions") from error

    def create(self, key: str, content: Buffer) -> bool:
        """Make a file where none is; return whether it was done. It is durable then."""
        temporary = self._root / f"{new_writer_id()}.tmp"
        try:
            file = self._disk.create(temporary)
            try:
                self._disk.write(file, content)
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            try:
                self._disk.link(temporary, self._root / key)
            except FileExistsError:
                return False
            finally:
                self._disk.unlink(temporary)
            self._disk.sync_directory(self._root)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be written to ({error}); make room, or check the disk") from error
        return True

    def get(self, key: str, _most_bytes: int) -> bytes | None:
        """Return a file's bytes; None if it is not there."""
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{key} cannot be read ({error})") from error

    def names(self) -> list[str]:
        """Return the names of what is there."""
        return self._disk.names(self._root)

    def folders(self) -> list[str]:
        """Return the names of the folders right below."""
        return [each.name for each in self._root.iterdir() if each.is_dir()]

    def delete(self, keys: list[str]) -> None:
        """Remove files; some may be gone already."""
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def honours_conditions(self) -> bool:
        """Whether making a file twice fails the second time: every file system makes a link once."""
        return True


class Slots:
    """Numbered files, on a disk or in an object store, that are each created once and never written again.

    Of several that create one at a time, one succeeds.
    """

    def __init__(self, objects: Objects | FileObjects) -> None:
        self._objects, self.url = objects, objects.url
        # How long to wait for more to write before the next one is created: a request costs time and money.
        self.batching_s = _REQUEST_S if isinstance(objects, Objects) else 0.0

    @classmethod
    def at(cls, url: str | os.PathLike[str], *folders: str) -> Slots:
        """Return those in a folder below a url or path."""
        return cls(objects_at(url, *folders))

    def require_fencing(self) -> None:
        """Refuse a place where a number could be created twice: some stores take conditions, and do not keep them."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead looks like its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """Return the numbers that are there, in order."""
        return sorted(int(name[:16], 16) for name in self._objects.names() if _SLOT.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot; False if another stands there, and not one of an earlier try whose answer was lost."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a slot; None if it is not there: slots may be removed at any time."""
        return self._objects.get(_name(number), _MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"


def objects_at(url: str | os.PathLike[str], *folders: str) -> Objects | FileObjects:
    """Return what lies in a folder below a url or path."""
    if is_remote(url):
        return Objects("/".join((os.fspath(url).rstrip("/"), *folders)))
    return FileObjects(Path(os.fspath(url)).joinpath(*folders))


def _opened(path: Path, flags: int) -> int:
    """Open a regular file and nothing else."""
    try:
        file = os.open(path, flags | _ALWAYS | _NO_TRAPS, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise DamageError(f"{path} is no regular file; put the file itself there, or remove it") from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DamageError(f"{path} is no regular file; put the file itself there, or remove it")
    return file


def read_error(path: Path, error: OSError) -> HoldallError:
    """Say what an error means to a reader: damage, something that is gone, or something that can be mended."""
    if isinstance(error, HoldallError):
        return error
    if error.errno in UNREADABLE:
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
    errno.EROFS: "it is read-only: choose another place",
    errno.EACCES: "allow this user to use it, or choose another place",
    errno.EPERM: "allow this user to use it, or choose another place",
    errno.EIO: "the disk fails: choose another one",
}


# ---------------------------------------------------------------- directories and object stores


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

    def outline(self, number: int) -> Manifest:
        """The same, perhaps without its records."""

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

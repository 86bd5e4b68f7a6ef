"""The file system, as far as checkpoints use it: every call that changes a disk is one method here.

In:  paths and bytes.  Out: what the operating system did, or its OSError.
Invariant: checkpoints touch a disk through this class alone, so that a simulated disk can take its
place, lose what was not synced, and fail at any call.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_WRITE_AT_ONCE = 4 * 2**20
"""A write to a slow disk can be watched, and given up, at this grain."""
_FULL_SYNC = 51
"""F_FULLFSYNC: on macOS fsync leaves the bytes in the drive's own cache."""

Buffer = bytes | bytearray | memoryview


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

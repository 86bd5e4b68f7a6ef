"""Spilling: blocks that the budget does not hold are written to files, in a folder of their memory's own.

In:  sealed blocks.  Out: the same, read from a file by position.
Invariant: a block is handed out as one on disk only when all of it was written; what a write that failed left behind
is never read. Nobody but this user enters the folder. What dead processes left is removed: folders and files of these
names, through no link.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import weakref
from dataclasses import replace
from pathlib import Path

from holdall.errors import ArgumentError, SpillError
from holdall.storage.blocks import Coder, Extent, SealedSlices, SegmentFile
from holdall.storage.codec import Dictionary
from holdall.storage.records import Buffer, pack_dictionary, pack_slices
from holdall.units import require_path

if sys.platform != "win32":
    import fcntl

_FOLDER = re.compile(r"\.?holdall-spill-[0-9a-f]{16}")
_LOCK = "lock"
_SPILLED = re.compile(r"[0-9]{8}\.seg")
_FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes at least _FILE_BYTES, and this share of all that was written if that is more: so the number of open
files grows with the logarithm of what is spilled."""
_WRITE_BYTES = 4 * 2**20


class SpillFolder:
    """Writes blocks to files below `spill_dir`, in a folder of its own; used by one worker at a time.

    Blocks are records (records.py), several in a file, so that a large memory does not run out of descriptors. A file
    is deleted with the last block that lies in it; the folder, when the memory is closed or forgotten. A process that
    was killed leaves its folder behind: the next memory that spills to the same place removes it.
    """

    def __init__(self, spill_dir: str | os.PathLike[str], coder: Coder) -> None:
        self._coder = coder
        self._place = Path(require_path("spill_dir", spill_dir))
        self._path = self._place / f"holdall-spill-{secrets.token_hex(8)}"
        self._open: _OpenFile | None = None
        self._files = 0
        self._written = 0
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            self._locks = [_locked_folder(self._path)]
            _sweep(self._place)
        except OSError as error:
            raise ArgumentError(
                f"spill_dir ({self._place}) cannot be written to ({error.strerror}); name a directory that can"
            ) from error
        self._process = os.getpid()
        self._remove = weakref.finalize(self, _remove, self._path, self._locks, self._process)

    def _leave_parents_folder(self) -> None:
        """In a forked child, write to a folder of its own; what the parent wrote so far can be read from here."""
        self._process, self._locks, self._open = os.getpid(), [], None
        self._path = self._place / f"holdall-spill-{secrets.token_hex(8)}"
        self._remove.detach()
        self._remove = weakref.finalize(self, _remove, self._path, self._locks, self._process)

    def write(self, sealed: SealedSlices) -> SealedSlices:
        """Write a block to a file and return it as it is read from there."""
        data = sealed.coded.data
        if isinstance(data, Extent):
            return sealed
        if self._process != os.getpid():
            self._leave_parents_folder()
        checks = self._coder.checksums(data, sealed.coded.offsets)
        try:
            file = self._file()
            dictionary = sealed.codec.dictionary
            if dictionary is not None and file.lacks(dictionary):
                file.append(pack_dictionary(dictionary))
            start, end = file.end, file.append(pack_slices(sealed.coded, checks))
            file.settle()
        except OSError as error:
            self._finish_file()  # what it holds already stays readable
            raise SpillError(
                f"spill_dir ({self._place}): a block of {data.nbytes} bytes could not be written ({error.strerror}); "
                "free disk space, or see that the directory is there and can be written to"
            ) from error
        self._written += data.nbytes
        extent = Extent(file.file, end - data.nbytes, data.nbytes, checks, start)
        return self._coder.adopt(replace(sealed.coded, data=extent))

    def close(self) -> None:
        """Delete the folder; blocks that are being read stay readable until then where the system allows it."""
        self._finish_file()
        self._remove()

    def _finish_file(self) -> None:
        if self._open is not None:
            self._open.file.is_growing = False
            self._open = None

    def _file(self) -> _OpenFile:
        """Return the file that blocks are written to, a new one if the last is full."""
        if self._open is None or self._open.end >= max(_FILE_BYTES, self._written // _FILES):
            self._finish_file()
            if self._place.is_dir() and not self._path.is_dir():  # somebody cleared it
                self._locks.append(_locked_folder(self._path))
            self._open = _OpenFile(self._path / f"{self._files:08d}.seg")
            self._files += 1
        return self._open


class _OpenFile:
    """A segment file that is still written to."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        descriptor = os.open(path, flags, 0o644)  # others cannot enter the folder; they may read a checkpoint of it
        self.file = SegmentFile(path, descriptor, is_temporary=True)
        self.file.is_growing = True
        self.end = 0
        self._settled = 0
        self._dictionaries: set[str] = set()
        if hasattr(os, "posix_fadvise"):  # batches are drawn from anywhere: what lies behind a slice is not needed
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def lacks(self, dictionary: Dictionary) -> bool:
        """Whether a dictionary has to be written first; it then counts as written."""
        name = dictionary.name
        known = name in self._dictionaries
        self._dictionaries.add(name)
        return not known

    def append(self, record: list[Buffer]) -> int:
        """Write a record behind the others and return where it ends."""
        position = self.end
        os.lseek(self.file.descriptor, position, os.SEEK_SET)
        for buffer in record:
            left = memoryview(buffer).cast("B")
            while left:
                written = os.write(self.file.descriptor, left[:_WRITE_BYTES])
                left, position = left[written:], position + written
        self.end = position
        return position

    def settle(self) -> None:
        """Bring what was written to the disk and out of the page cache, which a container pays for."""
        if not hasattr(os, "posix_fadvise"):
            return
        os.fdatasync(self.file.descriptor)
        os.posix_fadvise(self.file.descriptor, self._settled, self.end - self._settled, os.POSIX_FADV_DONTNEED)
        self._settled = self.end


def _locked_folder(path: Path, tries: int = 16) -> int:
    """Make a folder with a lock file, held for as long as this process, or its children, live."""
    # Under its name only once it is locked: a folder that nobody locks is swept, even one that is just being made.
    unlocked = path.with_name(f".{path.name}")
    unlocked.mkdir(0o700, exist_ok=True)
    descriptor = None
    try:
        descriptor = _take_lock(unlocked, is_patient=True)
        unlocked.rename(path)
    except FileNotFoundError:
        if descriptor is not None:
            os.close(descriptor)
        if not tries:
            raise
        return _locked_folder(path, tries - 1)
    return descriptor


def _take_lock(folder: Path, *, is_patient: bool) -> int:
    """Lock a folder, by a file that is made if it is not there."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(folder / _LOCK, flags, 0o600)
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX if is_patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), (folder / _LOCK).lstat()):
                raise FileNotFoundError(f"{folder}: who swept it had the lock before, and there is another one now")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep(place: Path) -> None:
    """Delete the folders of processes that died, those without a lock and those that never got their name as well."""
    if sys.platform == "win32":
        return
    for folder in place.iterdir():
        if _FOLDER.fullmatch(folder.name) is None or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):  # another one's, or gone by now
            descriptor = _take_lock(folder, is_patient=False)
            try:
                _clear(folder)
            finally:
                os.close(descriptor)


def _clear(folder: Path) -> None:
    """Delete a folder, unless somebody put something else into it; its lock comes last, for one that is killed."""
    with contextlib.suppress(OSError):
        for path in [path for path in folder.iterdir() if _SPILLED.fullmatch(path.name)]:
            path.unlink(missing_ok=True)
        (folder / _LOCK).unlink(missing_ok=True)
        folder.rmdir()


def _remove(folder: Path, locks: list[int], process: int) -> None:
    if process == os.getpid():
        _clear(folder)
    for lock in locks:
        os.close(lock)

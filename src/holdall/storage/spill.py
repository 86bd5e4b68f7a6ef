"""The disk tier: sealed blocks in files, in a folder of this memory's own.

In:  sealed blocks, oldest first.  Out: the same blocks, to be read from a file.
Invariant: a block is handed out only when all of it was written. What a write that failed left behind is never read.

Blocks are records of segment files (record.py), several in a file, so that a large memory does not run out of
descriptors. A file is deleted with the last block that lies in it; the folder, when the memory is closed or forgotten.
A process that was killed leaves its folder behind: the next memory that spills to the same place removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import sys
import weakref
from dataclasses import replace
from pathlib import Path

from holdall.errors import ArgumentError, SpillError
from holdall.storage.blocks import Coder, Extent, SealedSlices, SegmentFile
from holdall.storage.codec import Dictionary
from holdall.storage.records import Buffer, dictionary_name, pack_dictionary, pack_slices

if sys.platform != "win32":
    import fcntl

_FOLDER = re.compile(r"holdall-spill-[0-9a-f]{16}")
_LOCK = "lock"
_FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes at least _FILE_BYTES, and this share of all that was written if that is more: so the number of open
files grows with the logarithm of what is spilled."""
_WRITE_BYTES = 4 * 2**20


class SpillFolder:
    """Writes blocks to files below `spill_dir`; used by one worker at a time."""

    def __init__(self, spill_dir: str | os.PathLike[str], coder: Coder) -> None:
        self._coder = coder
        self._place = Path(spill_dir)
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
        self._remove = weakref.finalize(self, _remove, self._path, self._locks, os.getpid())

    def write(self, sealed: SealedSlices) -> SealedSlices:
        """Write a block to a file and return it as it is read from there."""
        data = sealed.coded.data
        if isinstance(data, Extent):
            return sealed
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
        descriptor = os.open(path, flags, 0o600)
        self.file = SegmentFile(path, descriptor, is_temporary=True)
        self.file.is_growing = True
        self.end = 0
        self._settled = 0
        self._dictionaries: set[str] = set()
        if hasattr(os, "posix_fadvise"):  # batches are drawn from anywhere: what lies behind a slice is not needed
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def lacks(self, dictionary: Dictionary) -> bool:
        """Whether a dictionary has to be written first; it then counts as written."""
        name = dictionary_name(dictionary)
        known = name in self._dictionaries
        self._dictionaries.add(name)
        return not known

    def append(self, record: list[Buffer]) -> int:
        """Write a record behind the others and return where it ends."""
        position = self.end
        os.lseek(self.file.descriptor, position, os.SEEK_SET)
        for buffer in record:
            flat = memoryview(buffer).cast("B")
            for first in range(0, len(flat), _WRITE_BYTES):
                piece = flat[first : first + _WRITE_BYTES]
                while piece:
                    written = os.write(self.file.descriptor, piece)
                    piece, position = piece[written:], position + written
        self.end = position
        return position

    def settle(self) -> None:
        """Bring what was written to the disk and out of the page cache, which a container pays for."""
        if not hasattr(os, "posix_fadvise"):
            return
        os.fdatasync(self.file.descriptor)
        os.posix_fadvise(self.file.descriptor, self._settled, self.end - self._settled, os.POSIX_FADV_DONTNEED)
        self._settled = self.end


def _locked_folder(path: Path) -> int:
    """Make a folder with a lock file, held for as long as this process, or its children, live."""
    # Under its name only once it is locked: a folder that nobody locks is swept.
    unlocked = path.with_name(f".{path.name}")
    unlocked.mkdir()
    descriptor = os.open(unlocked / _LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    if sys.platform != "win32":
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    unlocked.rename(path)
    return descriptor


def _sweep(place: Path) -> None:
    """Delete the folders of processes that died."""
    if sys.platform == "win32":
        return
    for folder in place.iterdir():
        if _FOLDER.fullmatch(folder.name) is None or folder.is_symlink():
            continue
        with contextlib.suppress(OSError):  # another one's, or gone by now
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(folder: Path, locks: list[int], process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
    for lock in locks:
        os.close(lock)

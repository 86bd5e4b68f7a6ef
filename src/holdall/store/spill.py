"""The disk tier: files that hold the data of compressed blocks.

`SpillFolder.store` appends the data of a block to a file and returns the block's slices, which are read from that file
from then on. Every process writes to a folder of its own, which it locks. A file is deleted when no block needs it any
more, and the folder is deleted when it is closed or its process ends. A killed process leaves its folder on the disk.
The next `SpillFolder` in the same directory deletes that folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import weakref
from collections.abc import Collection
from pathlib import Path

from holdall._native import Block, Coded
from holdall.checks import require_path
from holdall.errors import ArgumentError, ClosedError
from holdall.store.tuning import Tuning

if sys.platform != "win32":
    import fcntl

_FOLDER_NAME = re.compile(r"\.?holdall-spill-[0-9a-f]{16}")
_FILE_NAME = re.compile(r"[0-9]{8}\.seg")
_LOCK_NAME = "lock"
_MAX_LOCK_ATTEMPTS = 16
"""Maximum attempts to make a folder. Another process may delete a new folder before it is locked, because an unlocked
folder looks like that of a killed process."""


class SpillFile:
    """One open file of the disk tier. It is closed and deleted when no block and no folder refers to it any more.

    Attributes:
        path: Path of the file.
        number: Number of the file, unique within its `SpillFolder`.
        descriptor: Descriptor for reading and writing.
        nbytes: Bytes of finished writes. Further bytes of the file belong to a write that is not finished.
    """

    def __init__(self, path: Path, number: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        self.path = path
        self.number = number
        self.nbytes = 0
        self.descriptor = os.open(path, flags, 0o600)
        self._delete = weakref.finalize(self, _delete_file, path, self.descriptor, os.getpid())
        if hasattr(os, "posix_fadvise"):
            # Batches read slices at random, so reading ahead would be useless.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def append(self, data: memoryview, write_bytes: int) -> int:
        """Write `data` at the end, at most `write_bytes` per system call. Return the position of its first byte.

        If writing fails, the file gets its old length back.
        """
        start = self.nbytes
        written = 0
        try:
            os.lseek(self.descriptor, start, os.SEEK_SET)
            while written < len(data):
                written += os.write(self.descriptor, data[written : written + write_bytes])
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, start)
            raise
        self.nbytes = start + written
        return start

    def delete(self) -> None:
        """Close and delete the file. Call this only if no block refers to the file."""
        self._delete()


class SpillFolder:
    """The files of one memory's disk tier, in a locked folder below `spill_dir`.

    After a fork, the child reads the files of its parent and writes to a folder of its own. Not thread-safe: only the
    compactor's worker calls `store`. `disk_bytes` and `close` may be called from any thread.
    """

    def __init__(self, spill_dir: str | os.PathLike[str], tuning: Tuning) -> None:
        self._spill_dir = Path(require_path("spill_dir", spill_dir))
        self._tuning = tuning
        try:
            self._spill_dir.mkdir(parents=True, exist_ok=True)
            self._folder = _LockedFolder(self._spill_dir)
        except OSError as error:
            raise ArgumentError(
                f"spill_dir ('{spill_dir}') cannot be written to ({error}). Pass a directory of a disk with free space."
            ) from error
        # File that `store` appends to. It stays on disk when its last block is evicted.
        self._file: SpillFile | None = None
        self._files: tuple[weakref.ref[SpillFile], ...] = ()
        self._next_number = 0
        self._is_closed = False
        _delete_stale_folders(self._spill_dir)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files, including the bytes of evicted blocks in files that other blocks still need."""
        files = [reference() for reference in self._files]
        return sum(file.nbytes for file in files if file is not None)

    def store(self, coded: Coded) -> Coded:
        """Write the data of `coded` to disk. Return the same slices with their data in a file.

        Raise OSError if the disk is full or fails, and ClosedError after `close`. In both cases, no data of `coded` is
        left on the disk.
        """
        if self._is_closed:
            raise ClosedError("The disk tier was closed.")
        data = coded.data
        if data is None:
            return coded  # The data is in a file already.
        file = self._choose_file(data.nbytes)
        try:
            start = file.append(data.data, self._tuning.write_bytes)
        except BaseException:
            # The next block gets a file of its own, so that this file is deleted with its last block.
            self._file = None
            if file.nbytes == 0:
                file.delete()
            raise
        return coded.in_file(file.descriptor, start, file)

    def move(self, block: Block, _is_behind: bool) -> Coded:
        """Write the data of a compressed block to disk, and return its new form. A job of the compactor."""
        form = block.form
        assert isinstance(form, Coded)
        return self.store(form)

    def close(self) -> None:
        """Delete the folder with all its files. Idempotent.

        Open files stay readable until the last block that needs them is gone, except on Windows.
        """
        self._is_closed = True
        self._file = None
        self._folder.delete()

    def _choose_file(self, nbytes: int) -> SpillFile:
        """Return the file for the next `nbytes`. Make a new file if the current one is full or cannot be used."""
        is_usable = self._folder.is_usable()
        file = self._file
        if is_usable and file is not None and (file.nbytes == 0 or file.nbytes + nbytes <= self._max_file_bytes()):
            return file
        self._file = None
        if not is_usable:
            # `spill_dir` itself is not made again, because it may be a disk that is not mounted at the moment.
            self._folder = _LockedFolder(self._spill_dir)
        number = self._next_number
        file = SpillFile(self._folder.path / f"{number:08d}.seg", number)
        self._next_number += 1
        self._files = (*(reference for reference in self._files if reference() is not None), weakref.ref(file))
        self._file = file
        return file

    def _max_file_bytes(self) -> int:
        # Files grow with the tier, because every file takes one of the descriptors that a process may have.
        return max(self._tuning.spill_file_bytes, self.disk_bytes // self._tuning.spill_files)


class DiskRoom:
    """Estimate of the free space for the disk tier.

    The free space is unknown until the disk refuses a block. From then on, it is the space that evictions from this
    tier have freed. Other programs may free more, so a block is written on trial now and then. If the disk takes it,
    the free space is unknown again.

    Attributes:
        free_bytes: Bytes that can still be written. None: unknown, because the disk has taken every block lately.
        failure: Why the last block was refused, and what to do.
        trial: The block that is written on trial. None: no block.
    """

    def __init__(self, trial_interval: int) -> None:
        self.free_bytes: int | None = None
        self.failure = ""
        self.trial: Block | None = None
        self._trial_interval = trial_interval
        self._pause_segments = 0

    def is_trial_due(self) -> bool:
        """Count a closed segment. Return whether a block should be written on trial."""
        if self.free_bytes is None or self.trial is not None:
            return False
        self._pause_segments -= 1
        return self._pause_segments < 0

    def record_failure(self, block: Block, failure: str) -> None:
        """Record that the disk refused a block. `free_bytes` becomes 0, unless the block was the trial."""
        self.failure = failure
        if block is self.trial:
            self.trial = None
            self._pause_segments = self._trial_interval
        else:
            self.free_bytes = 0

    def record_success(self, block: Block, nbytes: int) -> None:
        """Record that the disk took a block of `nbytes` bytes."""
        if block is self.trial or self.free_bytes == 0:  # The disk has more room than was known.
            self.trial = None
            self.free_bytes = None
        elif self.free_bytes is not None:
            self.free_bytes = max(self.free_bytes - nbytes, 0)

    def record_eviction(self, blocks: Collection[Block]) -> None:
        """Record that blocks were evicted. One of them may have been the trial."""
        if self.trial in blocks:
            self.trial = None

    def record_freed(self, nbytes: int) -> None:
        """Record that `nbytes` on the disk were freed."""
        if self.free_bytes is not None:
            self.free_bytes += nbytes


class _LockedFolder:
    """A new folder that is locked for as long as this process, or a child that it forked, is alive."""

    def __init__(self, parent: Path) -> None:
        self.path = parent / f"holdall-spill-{secrets.token_hex(8)}"
        self._process_id = os.getpid()
        lock = _make_locked_folder(self.path)
        self._delete = weakref.finalize(self, _delete_own_folder, self.path, lock, self._process_id)

    def is_usable(self) -> bool:
        """Return whether the folder exists and belongs to this process, and not to the parent of a fork."""
        return self._process_id == os.getpid() and self.path.is_dir()

    def delete(self) -> None:
        """Delete the folder and its files, unless the folder belongs to the parent of a fork."""
        self._delete()


def _make_locked_folder(path: Path) -> int:
    """Make the folder `path` with a locked lock file. Return the descriptor of the lock file."""
    # Another process may delete the folder before it is locked. Then the folder is made again. It gets its final name
    # after it is locked.
    unlocked = path.with_name(f".{path.name}")
    for attempt in range(1, _MAX_LOCK_ATTEMPTS + 1):
        unlocked.mkdir(0o700, exist_ok=True)
        try:
            lock = _lock_folder(unlocked, can_wait=True)
        except FileNotFoundError:
            if attempt == _MAX_LOCK_ATTEMPTS:
                raise
            continue
        try:
            unlocked.rename(path)
        except FileNotFoundError:
            os.close(lock)
            if attempt == _MAX_LOCK_ATTEMPTS:
                raise
            continue
        except BaseException:
            os.close(lock)
            _delete_folder(unlocked)
            raise
        return lock
    raise AssertionError("The last attempt returns or raises.")


def _lock_folder(folder: Path, *, can_wait: bool) -> int:
    """Lock a folder. Return the descriptor of its lock file, which is made if it does not exist.

    Raise BlockingIOError if another process has the lock and `can_wait` is False, and FileNotFoundError if the folder
    was deleted meanwhile.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    path = folder / _LOCK_NAME
    descriptor = os.open(path, flags, 0o600)
    is_replaced = False
    try:
        if sys.platform != "win32":
            fcntl.flock(descriptor, fcntl.LOCK_EX if can_wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_replaced = not os.path.samestat(os.fstat(descriptor), path.lstat())
    except BaseException:
        os.close(descriptor)
        raise
    if is_replaced:
        os.close(descriptor)
        raise FileNotFoundError(f"The lock file '{path}' was replaced.")
    return descriptor


def _delete_stale_folders(parent: Path) -> None:
    """Delete the folders of processes that ended without deleting them."""
    if sys.platform == "win32":
        return
    for folder in list(parent.iterdir()):
        if _FOLDER_NAME.fullmatch(folder.name) is None or folder.is_symlink():
            continue
        # An error means that the folder is in use, belongs to another user, or was deleted by another process.
        with contextlib.suppress(OSError):
            lock = _lock_folder(folder, can_wait=False)
            _delete_folder(folder)
            os.close(lock)


def _delete_folder(folder: Path) -> None:
    """Delete the spill files in a folder, and the folder itself if it has no other files."""
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if _FILE_NAME.fullmatch(path.name) is not None:
                path.unlink(missing_ok=True)
        # The lock file is deleted last. If this process is killed here, another one can still lock and delete the rest.
        (folder / _LOCK_NAME).unlink(missing_ok=True)
        folder.rmdir()


def _delete_own_folder(folder: Path, lock: int, process_id: int) -> None:
    if process_id == os.getpid():
        _delete_folder(folder)
    os.close(lock)


def _delete_file(path: Path, descriptor: int, process_id: int) -> None:
    os.close(descriptor)
    if process_id == os.getpid():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

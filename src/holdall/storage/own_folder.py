"""A folder for files that nobody needs once their process is gone.

In:  a place that several processes share.  Out: a folder in it, locked for as long as its process, or a child, lives.
Invariant: what dead processes left is removed: folders and files of the disk tier's names, through no link. Nobody but
this user enters such a folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import weakref
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_FOLDER = re.compile(r"\.?holdall-spill-[0-9a-f]{16}")
_LOCK = "lock"
_SPILLED = re.compile(r"[0-9]{8}\.seg")


class OwnFolder:
    """A locked folder below a place; it is deleted when it is removed or forgotten.

    A process that was killed leaves its folder behind: the next one that is made in the same place removes it.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        place.mkdir(parents=True, exist_ok=True)
        self._name()
        self._locks.append(_locked_folder(self._path))
        _sweep(place)

    def _name(self) -> None:
        self.process = os.getpid()  # whose it is: in a forked child, its parent's
        self._locks: list[int] = []
        self._path = self._place / f"holdall-spill-{secrets.token_hex(8)}"
        self._remove = weakref.finalize(self, _remove, self._path, self._locks, self.process)

    def leave_to_parent(self) -> None:
        """In a child, go on in a folder of its own."""
        self._remove.detach()
        self._name()

    def path_in_use(self) -> Path:
        """Return the folder; make it if it is not there: in a child, or because somebody cleared it."""
        if self._place.is_dir() and not self._path.is_dir():
            self._locks.append(_locked_folder(self._path))
        return self._path

    def remove(self) -> None:
        """Delete the folder."""
        self._remove()


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
                raise FileNotFoundError(f"{folder}: the lock file was replaced during cleanup.")
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

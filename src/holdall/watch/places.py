"""Where a watched process and its watcher meet: a folder that belongs to one user alone.

In:  a process id.  Out: paths of the files that the two exchange.
Invariant: a folder that others could write to is neither used nor believed.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdall.errors import WatchError

_VARIABLE = "HOLDALL_RUNTIME_DIR"
LARGEST_FILE = 16 * 2**20


def own_folder() -> Path:
    """Return this user's folder, made if it is not there."""
    folder = next(_candidates(_user()))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WatchError(
            f"{folder} cannot be made ({error.strerror}); set {_VARIABLE} to a folder of your own"
        ) from error
    if not is_private(folder, _user()):
        raise WatchError(
            f"{folder} is open to other users, who could write there what a watch believes; remove it, or set "
            f"{_VARIABLE} to a folder of your own"
        )
    return folder


def folders_of(pid: int) -> list[Path]:
    """Return the folders in which a process may have left its files, those that can be believed."""
    try:
        user = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        user = _user()
    return [folder for folder in dict.fromkeys(_candidates(user)) if is_private(folder, user)]


def is_private(folder: Path, user: int) -> bool:
    """Whether a folder is there, belongs to the user, and nobody else may write to it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if sys.platform == "win32":  # the temporary folder there is the user's own
        return stat.S_ISDIR(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077


def read_small(path: Path) -> bytes | None:
    """Return what a file holds; None if it is not there, is a link, or is larger than anything that is written here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_FILE:
            return None
        return file.read(LARGEST_FILE)


def replace(path: Path, content: bytes) -> None:
    """Put a file in the place of the one before: a reader sees either, never half of one."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    written.replace(path)


def _candidates(user: int) -> Iterator[Path]:
    """Yield where the folder of a user may be, the first one being where it is made."""
    if wish := os.environ.get(_VARIABLE):
        yield Path(wish)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield Path(runtime) / "holdall"
    if Path(f"/run/user/{user}").is_dir():
        yield Path(f"/run/user/{user}/holdall")
    yield Path(tempfile.gettempdir()) / f"holdall-{user}"


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0

"""Slots: numbered files that are each created once, on a disk or in an object store.

In:  a number and bytes.  Out: whether the number was free.
Invariant: a number that was created is never written again; of several that create it at once, one succeeds.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from holdall.checkpoint import FileSystem, Objects, is_remote
from holdall.errors import CheckpointError

_NAME = re.compile(r"[0-9a-f]{16}\.slot")
MOST_SLOT_BYTES = 2**30


def slots_at(url: str | os.PathLike[str], *folders: str) -> LocalSlots | RemoteSlots:
    """Return the slots in a folder below a url or path."""
    if is_remote(url):
        return RemoteSlots("/".join((os.fspath(url).rstrip("/"), *folders)))
    return LocalSlots(Path(os.fspath(url)).joinpath(*folders))


def folders_at(url: str | os.PathLike[str], folder: str) -> list[str]:
    """Return the names of the folders in a folder below a url or path."""
    if is_remote(url):
        return Objects(f"{os.fspath(url).rstrip('/')}/{folder}").folders()
    place = Path(os.fspath(url)) / folder
    return [each.name for each in place.iterdir() if each.is_dir()] if place.is_dir() else []


class LocalSlots:
    """Numbered files in a directory."""

    batching_s = 0.0
    """How long to wait for more segments before the next one is created: a request to a store costs time and money."""

    def __init__(self, root: Path, disk: FileSystem | None = None) -> None:
        self.url = str(root)
        self._root = root
        self._disk = disk or FileSystem()
        try:
            for folder in (*reversed(root.parents), root):
                if not folder.exists() and self._disk.make_directory(folder):
                    self._disk.sync_directory(folder.parent)
        except OSError as error:
            raise CheckpointError(f"{root} cannot be made ({error}); check the path and its permissions") from error

    def require_fencing(self) -> None:
        """Refuse a place where a number could be created twice; every file system makes a link once."""

    def numbers(self) -> list[int]:
        """Return the numbers that are there, in order."""
        return sorted(int(name[:16], 16) for name in self._disk.names(self._root) if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot; False if another stands there."""
        temporary = self._root / f"{secrets.token_hex(8)}.tmp"
        try:
            file = self._disk.create(temporary)
            try:
                self._disk.write(file, content)
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            try:
                self._disk.link(temporary, self._root / _name(number))
            except FileExistsError:
                return self.read(number) == content  # an earlier try may have got this far
            finally:
                self._disk.unlink(temporary)
            self._disk.sync_directory(self._root)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be written to ({error}); make room, or check the disk") from error
        return True

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a slot; None if it is not there: slots may be removed at any time."""
        try:
            return (self._root / _name(number)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{_name(number)} cannot be read ({error})") from error

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""
        for number in numbers:
            (self._root / _name(number)).unlink(missing_ok=True)


class RemoteSlots:
    """The same in an object store."""

    batching_s = 0.2

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects = Objects(url)

    def require_fencing(self) -> None:
        """See `LocalSlots`; some stores take conditions, and do not keep to them."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead looks like its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """See `LocalSlots`."""
        return sorted(int(name[:16], 16) for name in self._objects.sizes("") if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """See `LocalSlots`; whether a put succeeded whose answer was lost is found out by reading it back."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """See `LocalSlots`."""
        return self._objects.get(_name(number), MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """See `LocalSlots`."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"

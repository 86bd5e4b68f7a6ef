"""Slots: numbered files at a place, each created once and by one writer alone.

In:  a number and bytes.  Out: whether they stand there now; the bytes of a number.
Invariant: a number that was created is never written again. Of several that create the same number at once, on a
disk or in an object store, one succeeds, and the bytes are durable when it is told so.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Protocol

from holdall.checkpoint.filesystem import FileSystem
from holdall.checkpoint.objectstore import Objects, is_remote
from holdall.errors import CheckpointError

_NAME = re.compile(r"[0-9a-f]{16}\.slot")
MOST_SLOT_BYTES = 2**30


class Slots(Protocol):
    """Numbered files."""

    url: str
    lingers_s: float
    """How long to gather more before the next one is created: a request to a store costs time and money."""

    def require_fencing(self) -> None:
        """Refuse a place where a number could be created twice."""

    def numbers(self) -> list[int]:
        """Return the numbers that are there, in order."""

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot; False if another stands there."""

    def read(self, number: int) -> bytes | None:
        """Return the bytes of a slot; None if it is not there: who removes slots may do so at any time."""

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""


def slots_at(url: str | os.PathLike[str], *folders: str) -> Slots:
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
    """Slots in a directory."""

    lingers_s = 0.0

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
        """See `Slots`; a link is made once on every file system that has them."""

    def numbers(self) -> list[int]:
        """See `Slots`."""
        return sorted(int(name[:16], 16) for name in self._disk.names(self._root) if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """See `Slots`."""
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
        """See `Slots`."""
        try:
            return (self._root / _name(number)).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{self.url}/{_name(number)} cannot be read ({error})") from error

    def delete(self, numbers: list[int]) -> None:
        """See `Slots`."""
        for number in numbers:
            (self._root / _name(number)).unlink(missing_ok=True)


class RemoteSlots:
    """Slots in an object store."""

    lingers_s = 0.2

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects = Objects(url)

    def require_fencing(self) -> None:
        """See `Slots`; some stores take conditions, and do not keep to them."""
        if not self._objects.honours_conditions():
            raise CheckpointError(
                f"{self.url} ignores conditions, so a shard that was taken for dead could not be told from its "
                "successor; use a store that has conditional puts, or durability='memory' and checkpoints"
            )

    def numbers(self) -> list[int]:
        """See `Slots`."""
        return sorted(int(name[:16], 16) for name in self._objects.sizes("") if _NAME.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """See `Slots`; whether a put succeeded whose answer was lost is found out by reading it back."""
        return self._objects.create(_name(number), content) or self.read(number) == content

    def read(self, number: int) -> bytes | None:
        """See `Slots`."""
        return self._objects.get(_name(number), MOST_SLOT_BYTES)

    def delete(self, numbers: list[int]) -> None:
        """See `Slots`."""
        self._objects.delete([_name(number) for number in numbers])


def _name(number: int) -> str:
    return f"{number:016x}.slot"

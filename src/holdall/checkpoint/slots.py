"""Slots: numbered blobs for journals that are each created once and never written again."""

from __future__ import annotations

import os
import re

from holdall.checkpoint.blobs import BlobStore, has_exclusive_create, open_blobs
from holdall.checkpoint.urls import is_remote
from holdall.errors import BlobMissingError, CheckpointError

_SLOT = re.compile(r"[0-9a-f]{16}\.slot")
_REQUEST_S = 0.2


class Slots:
    """Numbered blobs in one folder of a blob store. If several processes create the same slot, exactly one succeeds."""

    def __init__(self, blobs: BlobStore, *folders: str) -> None:
        self.blobs = blobs
        self.url = "/".join((blobs.url, *folders))
        # Seconds to wait for more data before a slot is created, because a request costs time and money.
        self.batching_s = _REQUEST_S if is_remote(self.url) else 0.0
        self._prefix = "".join(f"{folder}/" for folder in folders)

    @classmethod
    def at(cls, url: str | os.PathLike[str], *folders: str) -> Slots:
        """Return the slots in a folder below a URL or path."""
        return cls(open_blobs(url), *folders)

    def require_fencing(self) -> None:
        """Raise CheckpointError if a number could be created twice, because the store ignores conditions."""
        if not has_exclusive_create(self.blobs):
            raise CheckpointError(
                f"{self.url} overwrites objects although they must be new, so two owners of a journal would not notice "
                "each other. Use a store with conditional puts, or durability='memory' and checkpoints."
            )

    def numbers(self) -> list[int]:
        """Return the numbers of all slots, in order."""
        names = [name.removeprefix(self._prefix) for name, _ in self.blobs.list(self._prefix)]
        return sorted(int(name[:16], 16) for name in names if _SLOT.fullmatch(name))

    def create(self, number: int, content: bytes) -> bool:
        """Create a slot. Return False if it exists with another content than that of an earlier attempt."""
        return self.blobs.create(self._name(number), content)

    def read(self, number: int) -> bytes | None:
        """Return the content of a slot, or None if it does not exist."""
        name = self._name(number)
        nbytes = dict(self.blobs.list(name)).get(name)
        if nbytes is None:
            return None
        try:
            return self.blobs.read(name, 0, nbytes)
        except BlobMissingError:
            return None

    def delete(self, numbers: list[int]) -> None:
        """Remove slots."""
        for number in numbers:
            self.blobs.delete(self._name(number))

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:016x}.slot"


class Folders:
    """The folders below a URL or path."""

    def __init__(self, url: str | os.PathLike[str], *folders: str) -> None:
        self._blobs = open_blobs(url)
        self._prefix = "".join(f"{folder}/" for folder in folders)

    def folders(self) -> list[str]:
        """Return the names of the folders directly below."""
        names = [name.removeprefix(self._prefix) for name, _ in self._blobs.list(self._prefix)]
        return sorted({name.partition("/")[0] for name in names if "/" in name})


def objects_at(url: str | os.PathLike[str], *folders: str) -> Folders:
    """Return the folders in a folder below a URL or path."""
    return Folders(url, *folders)

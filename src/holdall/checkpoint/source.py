"""Sources: where checkpoints are looked for, and which of them is the newest that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdall.checkpoint.local import LocalLibrary, told
from holdall.checkpoint.manifest import Manifest
from holdall.checkpoint.place import require_files
from holdall.checkpoint.restore import Attached, Shelf
from holdall.errors import CheckpointError, DamageError

_LOG = logging.getLogger("holdall")
_T = TypeVar("_T")


def place_of(url: str | os.PathLike[str]) -> Path:
    """Return the directory that a path names, whole, so that two ways of writing it are one."""
    return Path(os.path.abspath(os.path.expanduser(os.fspath(url))))  # noqa: PTH100, PTH111  # links are not followed


def attached_files(url: str | os.PathLike[str]) -> Attached:
    """Return the files that were saved with the newest memory, without loading it."""
    path = place_of(url)
    return newest(LocalLibrary(path), lambda manifest: Attached(Shelf(path / "segments"), manifest.attached))


def newest(library: LocalLibrary, build: Callable[[Manifest], _T]) -> _T:
    """Build something of the newest checkpoint that is whole; those before it are said to be passed over.

    Args:
        build: May refuse a checkpoint as damaged; then the one before it is tried.
    """
    with told(library.url, "read"):
        library.require()
        sizes, numbers = library.file_sizes(), library.numbers()
    refused: list[str] = []
    first: Exception | None = None
    for number in numbers:
        try:
            manifest = library.manifest(number)
            require_files(manifest, sizes)
            built = build(manifest)
        except (DamageError, CheckpointError) as error:
            refused.append(f"checkpoint {number}: {error}")
            first = first or error
            continue
        for reason in refused:
            _LOG.warning("%s: a newer checkpoint is not whole, so %d was loaded (%s)", library.url, number, reason)
        return built
    why = f": {'; '.join(refused)}" if refused else ""
    raise CheckpointError(f"{library.url} holds no checkpoint that is whole{why}; check the path") from first

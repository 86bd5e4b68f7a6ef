"""Sources: where checkpoints are looked for, and which of them is the newest that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdall.checkpoint.local import LocalLibrary, LocalPlace, told
from holdall.checkpoint.manifest import Manifest
from holdall.checkpoint.objectstore import Objects, RemoteLibrary, RemotePlace, is_remote
from holdall.checkpoint.place import Library, Place, require_files
from holdall.checkpoint.restore import Attached, Shelf
from holdall.errors import CheckpointError, DamageError

_LOG = logging.getLogger("holdall")
_T = TypeVar("_T")


def place_of(url: str | os.PathLike[str]) -> str:
    """Return what a url or a path names, in one way of writing it."""
    if is_remote(url):
        return os.fspath(url).rstrip("/")
    return os.path.abspath(os.path.expanduser(os.fspath(url)))  # noqa: PTH100, PTH111  # links are not followed


def library_at(url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> Library:
    """Return the checkpoints at a url or path, to be read.

    Args:
        cache_dir: Where what is read of an object store lies meanwhile; None: where temporary files do.
    """
    place = place_of(url)
    return RemoteLibrary(Objects(place), cache_dir) if is_remote(place) else LocalLibrary(Path(place))


def open_place(url: str | os.PathLike[str]) -> Place:
    """Take hold of a place, to write to it."""
    place = place_of(url)
    return RemotePlace(place) if is_remote(place) else LocalPlace(Path(place))


def attached_files(url: str | os.PathLike[str]) -> Attached:
    """Return the files that were saved with the newest memory, without loading it."""
    library = library_at(url)
    return newest(library, lambda manifest: Attached(Shelf(library), manifest.attached))


def newest(library: Library, build: Callable[[Manifest], _T]) -> _T:
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

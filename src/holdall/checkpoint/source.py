"""Sources: where checkpoints are looked for, and which of them is the newest that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from holdall.checkpoint.directory import DirectoryReader, DirectoryWriter, told
from holdall.checkpoint.ledger import RecordFiles
from holdall.checkpoint.load import Attached, sensible
from holdall.checkpoint.manifest import (
    CheckpointReader,
    CheckpointWriter,
    Manifest,
    Ref,
    require_files,
)
from holdall.checkpoint.object_store import Objects, ObjectStoreReader, ObjectStoreWriter, is_remote
from holdall.errors import CheckpointError, DamageError
from holdall.storage.blocks import Coder
from holdall.storage.records import SLICES, Record, numbers

_LOG = logging.getLogger("holdall")
_T = TypeVar("_T")


def normalized_url(url: str | os.PathLike[str]) -> str:
    """Return what a url or a path names, in one way of writing it."""
    if is_remote(url):
        return os.fspath(url).rstrip("/")
    return os.path.abspath(os.path.expanduser(os.fspath(url)))  # noqa: PTH100, PTH111  # links are not followed


def open_reader(url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> CheckpointReader:
    """Return the checkpoints at a url or path, to be read.

    Args:
        cache_dir: Where what is read of an object store lies meanwhile; None: where temporary files do.
    """
    place = normalized_url(url)
    return ObjectStoreReader(Objects(place), cache_dir) if is_remote(place) else DirectoryReader(Path(place))


def open_writer(url: str | os.PathLike[str]) -> CheckpointWriter:
    """Take hold of a place, to write to it."""
    place = normalized_url(url)
    return ObjectStoreWriter(place) if is_remote(place) else DirectoryWriter(Path(place))


def attached_files(url: str | os.PathLike[str]) -> Attached:
    """Return the files that were saved with the newest memory, without loading it."""
    reader = open_reader(url)
    return newest(reader, lambda manifest: Attached(RecordFiles(reader), manifest.attached))


def newest(reader: CheckpointReader, build: Callable[[Manifest], _T]) -> _T:
    """Build something of the newest checkpoint that is whole; those before it are said to be passed over.

    Args:
        build: May refuse a checkpoint as damaged; then the one before it is tried.
    """
    with told(reader.url, "read"):
        reader.require()
        sizes, numbers = reader.file_sizes(), reader.numbers()
    refused: list[str] = []
    first: Exception | None = None
    for number in numbers:
        try:
            manifest = reader.manifest(number)
            require_files(manifest, sizes)
            built = build(manifest)
        except (DamageError, CheckpointError) as error:
            refused.append(f"checkpoint {number}: {error}")
            first = first or error
            continue
        for reason in refused:
            _LOG.warning("%s: a newer checkpoint is not whole, so %d was loaded (%s)", reader.url, number, reason)
        return built
    why = f": {'; '.join(refused)}" if refused else ""
    raise CheckpointError(f"{reader.url} holds no checkpoint that is whole{why}; check the path") from first


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that is not as it was written."""

    file: str
    start: int
    reason: str


def damages(
    reader: CheckpointReader, manifest: Manifest, coder: Coder, read: Callable[[int], None] = lambda _: None
) -> list[Damage]:
    """Read everything that a checkpoint names; `read` is told of every record's bytes."""
    try:
        require_files(manifest, reader.file_sizes())
    except CheckpointError as error:
        return [Damage("", 0, str(error))]
    shelf = RecordFiles(reader)
    found = []
    for ref in dict.fromkeys(manifest.refs):
        try:
            with sensible(f"the record at byte {ref.start} of {ref.file}"):
                _require_whole(shelf, ref, coder)
        except (DamageError, CheckpointError) as error:
            found.append(Damage(ref.file, ref.start, str(error)))
        read(ref.nbytes)
    return found


def _require_whole(shelf: RecordFiles, ref: Ref, coder: Coder) -> None:
    record, file = shelf.record(ref)
    parts = {name: record.part(name, file.read) for name in record.parts}
    if record.kind == SLICES:
        _require_units(record, parts, coder)


def _require_units(record: Record, parts: dict[str, bytes], coder: Coder) -> None:
    """Sum every unit of a block up: these have no sum of their own in the head."""
    offsets, checks = numbers(parts["offsets"], "u4"), numbers(parts["checks"], "u4")
    data = np.frombuffer(parts["units"], np.uint8)
    ascending = bool((np.diff(offsets.astype(np.int64)) >= 0).all()) and int(offsets[-1]) <= data.size
    if len(checks) != len(offsets) - 1 or not ascending:
        raise DamageError(f"the block at byte {record.start} has offsets that make no sense")
    wrong = np.flatnonzero(coder.checksums(data, offsets) != checks)
    if wrong.size:
        raise DamageError(
            f"{wrong.size} of {len(checks)} units of the block at byte {record.start} are damaged, the first is "
            f"{int(wrong[0])}"
        )

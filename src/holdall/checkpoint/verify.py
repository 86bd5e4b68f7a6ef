"""Verifying: every byte of a checkpoint is read and held against its sums.

In:  a manifest and where its files lie.  Out: what is damaged, record by record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from holdall.checkpoint.manifest import Manifest, Ref
from holdall.checkpoint.place import Library, require_files
from holdall.checkpoint.restore import Shelf, sensible
from holdall.errors import CheckpointError, DamageError
from holdall.experience.disk.record import Record, numbers
from holdall.experience.disk.slice_record import SLICES
from holdall.experience.sealing.sealed import Coder


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that is not as it was written."""

    file: str
    start: int
    reason: str


def damages(
    library: Library, manifest: Manifest, coder: Coder, read: Callable[[int], None] = lambda _: None
) -> list[Damage]:
    """Read everything that a checkpoint names; `read` is told of every record's bytes."""
    try:
        require_files(manifest, library.file_sizes())
    except CheckpointError as error:
        return [Damage("", 0, str(error))]
    shelf = Shelf(library)
    found = []
    for ref in dict.fromkeys(manifest.refs):
        try:
            with sensible(f"the record at byte {ref.start} of {ref.file}"):
                _require_whole(shelf, ref, coder)
        except (DamageError, CheckpointError) as error:
            found.append(Damage(ref.file, ref.start, str(error)))
        read(ref.nbytes)
    return found


def _require_whole(shelf: Shelf, ref: Ref, coder: Coder) -> None:
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

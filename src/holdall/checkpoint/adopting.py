"""Adopting: blocks that lie in files of this disk already become part of a checkpoint without being written again.

In:  full blocks.  Out: the files that are worth it, and where the blocks' records are in them.
Invariant: a file is taken over as a whole and stays as a whole, so most of it must be wanted; one that still grows is
left alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import NamedTuple

from holdall.checkpoint.manifest import Ref
from holdall.experience.disk.record import unpack
from holdall.experience.disk.segment_file import Extent, SegmentFile
from holdall.experience.slices import SliceBlock

_WORTH_IT = 0.5


class Adoptable(NamedTuple):
    """A file, and the blocks that are wanted of it."""

    file: SegmentFile
    blocks: list[tuple[SliceBlock, Extent]]


def adoptable(blocks: Iterable[SliceBlock]) -> list[Adoptable]:
    """Return the files of which most is wanted."""
    found: dict[int, Adoptable] = {}
    for block in blocks:
        extent = block.extent
        if extent is not None and extent.record_start >= 0 and not extent.file.is_growing:
            found.setdefault(id(extent.file), Adoptable(extent.file, [])).blocks.append((block, extent))
    return [each for each in found.values() if not each.file.is_awaited and _is_worth_it(each)]


def _is_worth_it(each: Adoptable) -> bool:
    wanted = sum(extent.nbytes for _, extent in each.blocks)
    return wanted >= _WORTH_IT * os.fstat(each.file.descriptor).st_size


def ref_of(extent: Extent, name: str, nbytes: int) -> Ref:
    """Name the record of a block in a file that goes by another name now."""
    record = unpack(extent.file.read, extent.record_start, nbytes)
    head_bytes = record.nbytes - sum(part.nbytes for part in record.parts.values())
    head = extent.file.read(record.start, head_bytes)
    return Ref(name, record.start, record.nbytes, hashlib.sha256(head).hexdigest()[:32])

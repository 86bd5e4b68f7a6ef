"""Damage: find it in a checkpoint, and load what is left.

In:  a checkpoint whose files are damaged or gone.  Out: which records are not as they were written; or a memory in
which ticks that touch them hold no transition.
Invariant: everything is read, so that what is not said to be lost is as it was written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from holdall.checkpoint.load import RecordFiles, Restored
from holdall.checkpoint.manifest import (
    CheckpointReader,
    Losses,
    Manifest,
    Ref,
    SegmentEntry,
    require_files,
    shard_manifest,
)
from holdall.errors import CheckpointError, DamageError
from holdall.schema import Leaf, malformed_refused
from holdall.storage import SLICES, ClosedPart, Coder, KeptBlock, Like, Record, RowChunk, Window, numbers, unit_of

_INVALID = "invalid.0"

_LOG = logging.getLogger("holdall")


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that is not as it was written."""

    file: str
    start: int
    reason: str


def damages(
    reader: CheckpointReader, manifest: Manifest, coder: Coder, read: Callable[[int], None] = lambda _: None
) -> list[Damage]:
    """Read everything that a checkpoint names; `read` is called with every record's bytes."""
    sizes = reader.file_sizes()
    try:
        require_files(manifest, sizes)
    except CheckpointError as error:
        return [Damage("", 0, str(error))]
    files = RecordFiles(reader)
    found = []
    for ref in dict.fromkeys(manifest.refs):
        with Losses() as lost, malformed_refused(f"the record at byte {ref.start} of {ref.file}"):
            _require_whole(files, ref, coder)
        found += [Damage(ref.file, ref.start, str(error)) for error in lost]
        read(ref.nbytes)
    for shard in manifest.shards:
        below = reader.below(shard.folder)
        with Losses() as lost:
            of_shard = damages(below, shard_manifest(below, shard), coder, read)
        of_shard = [Damage("", 0, str(error)) for error in lost] or of_shard
        found += [replace(one, file=f"{shard.folder}/{one.file}") for one in of_shard]
    return found


def _require_whole(files: RecordFiles, ref: Ref, coder: Coder) -> None:
    record, file = files.record(ref)
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


class Salvage(Restored):
    """Reads what is left of a checkpoint that may be damaged; blocks are read whole, to know."""

    keeps_all = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lost: list[tuple[int, int, str]] = []  # runs of ticks: first tick, ticks, reason
        self._checked: set[int] = set()  # blocks, by number

    def read_dictionary(self, name: str, ref: Ref) -> None:
        """Read a dictionary; blocks that name one that is lost are lost."""
        with Losses():
            super().read_dictionary(name, ref)

    def parts(self, entry: SegmentEntry, leaves: list[Leaf]) -> list[ClosedPart]:
        """Read a segment's logs and blocks, or stand in for them."""
        with Losses() as lost:
            parts = super().parts(entry, leaves)
            for number in set(entry.blocks) - self._checked:
                self._require_units(self.blocks[number])
                self._checked.add(number)
            return parts
        self._lost.append((entry.first_tick, entry.ticks, str(lost[0])))
        return _blank_parts(leaves, self.schema.num_envs)

    @staticmethod
    def _require_units(block: KeptBlock) -> None:
        """Read a block whole and hold every unit against its sum."""
        if block.sealed is not None and block.extent is not None:
            block.extent.bring()
            for unit in range(len(block.sealed.coded.offsets) - 1):
                unit_of(block.sealed.coded, unit)

    def rows(self, like: Like) -> Iterator[RowChunk]:
        """Read rows; where they are damaged, the ticks are lost, and so is the one before: its next observations."""
        self.require_rows()
        blank: set[int] = set()
        for chunk in self.chunks:  # once to know what is lost, since a chunk may be lost to the one before it
            with Losses() as lost:
                self.chunk(chunk, like)
            if lost:
                self._lost.append((chunk.first_tick - 1, chunk.ticks + 1, str(lost[0])))
                blank.add(chunk.first_tick)
        for chunk in self.chunks:
            if chunk.first_tick in blank:
                columns = {name: np.zeros((chunk.ticks, *shape), dtype) for name, (shape, dtype) in like.items()}
                yield self._marked(RowChunk(chunk.first_tick, chunk.ticks, columns, {}))
            else:
                yield self._marked(self.chunk(chunk, like))
        where = f"{self.url}, checkpoint {self.manifest.number}"
        for first, ticks, reason in self._lost:
            _LOG.warning("%s: ticks %d to %d are lost (%s)", where, first, first + ticks - 1, reason)

    def _marked(self, chunk: RowChunk) -> RowChunk:
        """Mark the ticks of a chunk that are lost as holding no transition."""
        invalid = chunk.columns.get(_INVALID, np.zeros((chunk.ticks, self.schema.num_envs), np.bool_)).copy()
        for first, ticks, _ in self._lost:
            start = max(0, first - chunk.first_tick)
            invalid[start : max(start, first + ticks - chunk.first_tick)] = True
        return replace(chunk, columns=chunk.columns | {_INVALID: invalid})


def _blank_parts(leaves: list[Leaf], lanes: int) -> list[ClosedPart]:
    """Stand in for a segment that cannot be read."""
    parts = []
    for leaf in leaves:
        block = KeptBlock(leaf.nbytes, 1, np.zeros(leaf.nbytes, np.uint8))
        parts.append(ClosedPart(Window.whole(leaf), np.zeros((1, lanes), np.uint16), 1, block, 1, 0, 0))
    return parts

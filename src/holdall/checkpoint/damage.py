"""Damaged checkpoints: find the damage, and load the readable part.

`find_damage` reads everything that a checkpoint names and returns the records that are damaged. `Salvage` loads a
checkpoint in which every transition that needs a damaged record is marked as invalid.

Guarantee: everything is read, so a transition that is not marked is as it was saved.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall._native import FLAG_INVALID, Block, Coded, Dictionary, Part, Segment, decode
from holdall.checkpoint.load import RecordFiles, Restored
from holdall.checkpoint.manifest import Manifest, Ref, SegmentEntry, ShardEntry, require_files
from holdall.checkpoint.reader import CheckpointReader, Loss, read_shard_manifest, try_read
from holdall.checks import refuse_malformed
from holdall.errors import CheckpointError, DamageError
from holdall.store.format import BLOCK, NEXT_FOLLOWS, find_damaged_slices, mark_invalid, read_block
from holdall.store.layouts import PAIRED, find_sliced_layout
from holdall.store.records import MAX_RECORD_BYTES, Record
from holdall.store.windows import Window

_LOG = logging.getLogger("holdall")


@dataclass(frozen=True, slots=True)
class Damage:
    """A record that is not as it was written."""

    file: str
    start: int
    reason: str


def find_damage(
    reader: CheckpointReader, manifest: Manifest, progress: Callable[[int], None] = lambda _: None
) -> list[Damage]:
    """Read everything that a checkpoint names. `progress` is called with the size of every record."""
    sizes = reader.file_sizes()
    try:
        require_files(manifest, sizes)
    except CheckpointError as error:
        return [Damage("", 0, str(error))]
    checker = _RecordChecker(RecordFiles(reader, manifest.files), manifest)
    found = []
    for ref in dict.fromkeys(manifest.refs):
        checked = try_read(partial(checker.check, ref))
        if isinstance(checked, Loss):
            found.append(Damage(ref.file, ref.start, str(checked.error)))
        progress(ref.nbytes)
    for shard in manifest.shards:
        of_shard = try_read(partial(_find_shard_damage, reader.open_shard(shard.folder), shard, progress))
        if isinstance(of_shard, Loss):
            of_shard = [Damage("", 0, str(of_shard.error))]
        found += [replace(damage, file=f"{shard.folder}/{damage.file}") for damage in of_shard]
    return found


def _find_shard_damage(reader: CheckpointReader, shard: ShardEntry, progress: Callable[[int], None]) -> list[Damage]:
    return find_damage(reader, read_shard_manifest(reader, shard), progress)


class _LostTransitions(NamedTuple):
    """Transitions of one segment that are lost."""

    transitions: int
    is_exact: bool  # False: `transitions` is an upper bound, because some of the entries may not be transitions.
    first_tick: int
    last_tick: int
    reason: str


class _RecordChecker:
    """Compares all bytes of records with their checksums."""

    def __init__(self, files: RecordFiles, manifest: Manifest) -> None:
        self._files = files
        self._dictionaries: dict[str, Dictionary] = {}
        for name, ref in manifest.dictionaries.items():
            dictionary = try_read(partial(files.read_dictionary, name, ref))
            if not isinstance(dictionary, Loss):
                self._dictionaries[name] = dictionary

    def check(self, ref: Ref) -> None:
        """Raise DamageError if a record is damaged."""
        with refuse_malformed(f"The record at byte {ref.start} of {ref.file}"):
            self._check(ref)

    def _check(self, ref: Ref) -> None:
        record, ahead = self._files.read_record(ref)
        if record.kind == BLOCK:
            read_block(record, ahead.read, self._dictionaries)
            return
        for name in record.arrays:
            record.read_bytes(name, ahead.read, MAX_RECORD_BYTES)


class Salvage(Restored):
    """The readable part of a checkpoint that may be damaged. Blocks are read completely."""

    def __init__(self, manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None = None) -> None:
        super().__init__(manifest, reader, capacity_ticks)
        self._reader = reader
        self._damaged: dict[int, NDArray[np.bool_]] = {}  # By number of a block: which slices are damaged.
        self._reasons: dict[int, str] = {}
        self._losses: list[_LostTransitions] = []
        entries = (manifest.next_tick - manifest.first_tick) * self.schema.num_envs
        self._has_only_transitions = manifest.transitions == entries

    def read(self) -> None:
        """Read everything that is readable."""
        super().read()
        self.saved = None  # The next save writes everything again.
        self._log_losses()

    def open_attached(self) -> None:
        """Open the attached files that exist."""
        try_read(super().open_attached)

    def read_dictionary(self, name: str, ref: Ref) -> None:
        """Read a dictionary, or its copy in another checkpoint.

        If no copy is readable, the blocks that need the dictionary count as damaged.
        """
        if not isinstance(try_read(partial(super().read_dictionary, name, ref)), Loss):
            return
        for number in self._reader.numbers():
            copy = try_read(partial(self._read_copy, name, number))
            if isinstance(copy, Dictionary):
                self.dictionaries[name] = copy
                return

    def _read_copy(self, name: str, number: int) -> Dictionary | None:
        """Read a dictionary as checkpoint `number` has it. Return None if that checkpoint does not need it."""
        manifest = self._reader.manifest(number)
        if name not in manifest.dictionaries:
            return None
        return RecordFiles(self._reader, manifest.files).read_dictionary(name, manifest.dictionaries[name])

    def read_segment(self, entry: SegmentEntry) -> Segment:
        """Read a segment, or return a blank one if it is unreadable."""
        segment = try_read(partial(self._read_marked, entry))
        if not isinstance(segment, Loss):
            return segment
        is_lost = np.ones(entry.ticks * self.schema.num_envs, np.bool_)
        self._record_loss(entry, is_lost, str(segment.error), is_exact=self._has_only_transitions)
        return self._make_blank(entry)

    def _read_marked(self, entry: SegmentEntry) -> Segment:
        """Read a segment. Mark transitions that need damaged slices as invalid."""
        segment = super().read_segment(entry)
        is_lost = self._find_lost(entry, segment)
        if not is_lost.any():
            return segment
        marked = mark_invalid(segment, is_lost)
        reasons = [self._reasons[number] for number in entry.blocks if number in self._reasons]
        self._record_loss(entry, is_lost, reasons[0], is_exact=True)
        return marked

    def read_block(self, number: int) -> Block:
        """Read a block completely. Damaged slices are replaced by zeros."""
        if number in self.blocks:
            return self.blocks[number]
        block = super().read_block(number)
        entry = self.manifest.blocks[number]
        record, ahead = self.files.read_record(entry.ref, entry.ref.nbytes)
        form = block.form
        assert isinstance(form, Coded)  # Blocks of checkpoints are compressed.
        is_damaged = _find_damaged(record, ahead.read, form)
        if is_damaged.any():
            self._damaged[number] = is_damaged
            self._reasons[number] = (
                f"{int(is_damaged.sum())} of {form.slice_count} slices at byte {entry.ref.start} of {entry.ref.file} "
                "are damaged"
            )
            self.blocks[number] = _replace_damaged(form, is_damaged)
        return self.blocks[number]

    def _find_lost(self, entry: SegmentEntry, segment: Segment) -> NDArray[np.bool_]:
        """Return which entries of a segment are transitions that need a damaged slice, numbered by tick and lane."""
        is_lost = np.zeros(segment.ticks * segment.lanes, np.bool_)
        numbers = {self.blocks[number].serial: number for number in entry.blocks}
        for part in segment.parts:
            number = None if part.block is None else numbers[part.block.serial]
            if number is not None and number in self._damaged:
                is_lost |= _find_dependent(part, self._damaged[number], segment.lanes)
        flags = segment.parts[self.columns.flags].arrays()["rows"]
        is_transition: NDArray[np.bool_] = flags & FLAG_INVALID == 0
        return is_lost & is_transition

    def _make_blank(self, entry: SegmentEntry) -> Segment:
        """Return a segment of the same ticks without any valid transition."""
        lanes = self.schema.num_envs
        ticks = entry.ticks
        parts = []
        for leaf in self.schema.observation.leaves:
            if leaf.nbytes == 0:
                empty = {"rows": np.zeros(0, np.uint8)}
                parts.append(Part.restore("paired", ticks, lanes, 0, empty, PAIRED, None))
                continue
            block = Block(leaf.nbytes, 1, bytes(leaf.nbytes))
            arrays = {"cursors": np.zeros(ticks * lanes, np.uint32), "log": np.zeros(2 * lanes, np.uint16)}
            layout = Window.whole(leaf).layout()
            parts.append(Part.restore("sliced", ticks, lanes, leaf.nbytes, arrays, layout, block))
        for column in range(self.columns.observations, self.columns.flags + 1):
            row_bytes = self.columns.count_row_bytes(column, self.reward_dtype) or 0
            rows = np.zeros(ticks * lanes * row_bytes, np.uint8)
            if column == self.columns.flags:
                rows[:] = FLAG_INVALID
            parts.append(Part.restore("rows", ticks, lanes, row_bytes, {"rows": rows}, None, None))
        return Segment(entry.first_tick, ticks, lanes, parts)

    def _record_loss(self, entry: SegmentEntry, is_lost: NDArray[np.bool_], reason: str, *, is_exact: bool) -> None:
        """Record which entries of a segment are lost. Ticks before `first_tick` do not count: they were evicted."""
        ticks = np.flatnonzero(is_lost) // self.schema.num_envs + entry.first_tick
        ticks = ticks[ticks >= self.first_tick]
        if len(ticks) > 0:
            self._losses.append(_LostTransitions(len(ticks), is_exact, int(ticks[0]), int(ticks[-1]), reason))

    def _log_losses(self) -> None:
        """Log which ticks have lost transitions. Consecutive losses with the same reason are logged together."""
        for (reason, is_exact), losses in itertools.groupby(self._losses, attrgetter("reason", "is_exact")):
            group = list(losses)
            _LOG.warning(
                "%s, checkpoint %d: %s%d transitions of ticks %d to %d are lost: %s",
                self.url,
                self.manifest.number,
                "" if is_exact else "at most ",
                sum(loss.transitions for loss in group),
                group[0].first_tick,
                group[-1].last_tick,
                reason,
            )


def _find_damaged(record: Record, read: Any, coded: Coded) -> NDArray[np.bool_]:
    """Return which slices of a block are damaged. All slices count as damaged if their units are unreadable."""
    is_damaged = try_read(partial(find_damaged_slices, record, read, coded))
    return np.ones(coded.slice_count, np.bool_) if isinstance(is_damaged, Loss) else is_damaged


def _replace_damaged(coded: Coded, is_damaged: NDArray[np.bool_]) -> Block:
    """Return an uncompressed block with zeros in place of damaged slices."""
    slices = np.zeros((coded.slice_count, coded.slice_bytes), np.uint8)
    for number in np.flatnonzero(~is_damaged).tolist():
        try:
            slices[number] = decode(coded, number, 1)[0]
        except ValueError as error:
            raise DamageError(f"A slice cannot be decoded: {error}") from error
    return Block(coded.slice_bytes, coded.slice_count, slices.reshape(-1))


def _find_dependent(part: Part, is_damaged: NDArray[np.bool_], lanes: int) -> NDArray[np.bool_]:
    """Return which transitions of a sliced part use a damaged slice."""
    arrays = part.arrays()
    layout = find_sliced_layout(part)
    window = layout.slice_count
    log = arrays["log"].reshape(-1, lanes)
    # counts[e, lane] is the number of damaged entries before entry e.
    counts = np.zeros((len(log) + 1, lanes), np.int64)
    np.cumsum(is_damaged[log], axis=0, out=counts[1:])
    cursors = arrays["cursors"]
    starts = (cursors & ~NEXT_FOLLOWS).astype(np.int64)
    next_starts = starts + np.where(cursors & NEXT_FOLLOWS, window, layout.shift)
    lane = np.arange(len(cursors)) % lanes
    dependent: NDArray[np.bool_] = counts[starts + window, lane] > counts[starts, lane]
    return dependent | (counts[next_starts + window, lane] > counts[next_starts, lane])

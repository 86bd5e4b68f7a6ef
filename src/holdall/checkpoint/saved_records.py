"""Records of a checkpoint: written one after another into files, remembered for the next save, and read back.

In:  records; blocks of the disk tier.  Out: where each of them lies (`Ref`), and the records of such refs, checked.
Invariant: `SavedRecords` names only what lies in files that are complete. A record is read only if it is the very one
that a manifest names.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from holdall.checkpoint.file_system import CheckpointReader, CheckpointWriter, NewFile
from holdall.checkpoint.manifest import Chunk, Manifest, Ref, is_lost, require_files, shard_manifest
from holdall.errors import CheckpointError, DamageError
from holdall.schema import Leaf
from holdall.storage import (
    SLICES,
    Buffer,
    ClosedPart,
    Coder,
    Demand,
    Extent,
    KeptBlock,
    Like,
    Record,
    RowChunk,
    SegmentFile,
    SliceBlock,
    Window,
    bring,
    is_settled,
    numbers,
    unpack,
    unpack_file,
)
from holdall.units import malformed_refused

FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes FILE_BYTES, or this share of what was written if that is more, so that a reader can open them all."""

_READ_AHEAD_BYTES = 2**15


class RecordWriter:
    """Appends records to a file, and begins the next when it is full.

    Args:
        wrote: Called with every record's bytes.
    """

    def __init__(self, target: CheckpointWriter, wrote: Callable[[int], None]) -> None:
        self.files: dict[str, int] = {}
        self._target = target
        self._wrote = wrote
        self._file: NewFile | None = None
        self._written = 0

    def append(self, record: Sequence[Buffer]) -> Ref:
        """Write a record; it is durable once the writer is finished and a manifest committed."""
        if self._file is not None and self._file.nbytes >= max(FILE_BYTES, self._written // _FILES):
            self.finish()
        if self._file is None:
            self._file = self._target.new_file()
        file, start = self._file, self._file.nbytes
        for buffer in record:
            file.write(buffer)
        nbytes = file.nbytes - start
        self._written += nbytes
        self._wrote(nbytes)
        digest = hashlib.sha256(bytes(record[0]) + bytes(record[1])).hexdigest()[:32]
        return Ref(file.name, start, nbytes, digest)

    def settle(self) -> None:
        """Bring what was written so far out of the way: it will be a while before the file is finished."""
        if self._file is not None and self._file.nbytes >= self._target.behind_bytes:
            self.finish()
        elif self._file is not None:
            self._file.settle()

    def finish(self) -> None:
        """Make the file that is being written complete."""
        if self._file is not None:
            self._file.finish()
            self.files[self._file.name] = self._file.nbytes
            self._file = None

    def abandon(self) -> None:
        """Throw the file that is being written away."""
        if self._file is not None:
            self._file.abandon()
            self._file = None


RowsKey = tuple[int, tuple[str, ...]]
"""How often rows of a chunk were written again, and its columns."""


@dataclass(slots=True)
class PartialBlock:
    """What was written of a block that is still being filled."""

    refs: tuple[Ref, ...] = ()
    slices: int = 0


@dataclass(slots=True)
class SavedRecords:
    """All records that lie at a url already."""

    files: dict[str, int] = field(default_factory=dict)
    rows: dict[int, tuple[RowsKey, Chunk]] = field(default_factory=dict)  # by number of the chunk
    logs: dict[int, Ref] = field(default_factory=dict)  # by a closed segment's first tick
    blocks: weakref.WeakKeyDictionary[SliceBlock, tuple[Ref, ...]] = field(default_factory=weakref.WeakKeyDictionary)
    filling: weakref.WeakKeyDictionary[object, PartialBlock] = field(default_factory=weakref.WeakKeyDictionary)
    split: weakref.WeakSet[SliceBlock] = field(default_factory=weakref.WeakSet)  # full blocks in pieces
    dictionaries: dict[str, Ref] = field(default_factory=dict)  # by the sha256 of their content

    def rows_saved(self) -> dict[int, RowsKey]:
        """Name the chunks of rows that are there."""
        return {number: key for number, (key, _) in self.rows.items()}

    def take_over(self, moved: SavedRecords) -> None:
        """Name records where they lie now; the same ones, in other files."""
        self.rows, self.logs, self.dictionaries = moved.rows, moved.logs, moved.dictionaries
        self.blocks, self.filling = moved.blocks, moved.filling

    def merge(self, fresh: SavedRecords) -> None:
        """Take over what was written since, now that its files are finished."""
        # New dicts: the training thread may be looking at the old ones.
        self.files = self.files | fresh.files
        self.rows = self.rows | fresh.rows
        self.logs = self.logs | fresh.logs
        self.dictionaries = self.dictionaries | fresh.dictionaries
        for block, refs in fresh.blocks.items():
            self.blocks[block] = refs
        self.filling = fresh.filling
        for block in fresh.split:
            self.split.add(block)

    def forget_before(self, tick: int) -> None:
        """Forget what ended before a tick; blocks are forgotten with the memory's own."""
        self.rows = {n: entry for n, entry in self.rows.items() if entry[1].first_tick + entry[1].ticks > tick}
        held = sorted(self.logs)
        for first, following in itertools.pairwise(held):
            if following <= tick:
                del self.logs[first]

    def refs(self) -> list[Ref]:
        """Return all of them; blocks may be freed by another thread meanwhile."""
        refs = [chunk.ref for _, chunk in self.rows.values()]
        refs += [*self.logs.values(), *self.dictionaries.values()]
        refs += [ref for written in list(self.blocks.values()) for ref in written]
        return refs + [ref for filled in list(self.filling.values()) for ref in filled.refs]

    def adopt_rows(self, chunks: Iterable[Chunk], chunk_ticks: int, columns: tuple[str, ...], next_tick: int) -> None:
        """Take over the chunks of rows of a memory that was loaded."""
        for chunk in chunks:
            number = chunk.first_tick // chunk_ticks
            is_whole = chunk.first_tick + chunk.ticks == (number + 1) * chunk_ticks
            if is_whole and is_settled(number, chunk_ticks, next_tick):
                self.rows[number] = ((0, columns), chunk)

    def keep_only(self, sizes: dict[str, int]) -> None:
        """Forget what lies in files that are not there any more, or not in full."""
        gone = {name for name, nbytes in self.files.items() if sizes.get(name, -1) < nbytes}
        if not gone:
            return
        self.files = {name: nbytes for name, nbytes in self.files.items() if name not in gone}
        self.rows = {n: entry for n, entry in self.rows.items() if entry[1].ref.file not in gone}
        self.logs = {first: ref for first, ref in self.logs.items() if ref.file not in gone}
        self.dictionaries = {name: ref for name, ref in self.dictionaries.items() if ref.file not in gone}
        for block in [block for block, refs in self.blocks.items() if any(ref.file in gone for ref in refs)]:
            del self.blocks[block]
        for key in [key for key, f in self.filling.items() if any(ref.file in gone for ref in f.refs)]:
            del self.filling[key]


_WORTH_IT = 0.5

_LOG = logging.getLogger("holdall")


def adoptable(blocks: Iterable[SliceBlock]) -> list[tuple[SegmentFile, list[tuple[SliceBlock, Extent]]]]:
    """Return the files of the disk tier of which most is wanted, and what is wanted of each."""
    found: dict[int, tuple[SegmentFile, list[tuple[SliceBlock, Extent]]]] = {}
    for block in blocks:
        extent = block.extent
        if extent is not None and extent.record_start >= 0 and not extent.file.is_growing:
            found.setdefault(id(extent.file), (extent.file, []))[1].append((block, extent))
    return [
        (file, wanted)
        for file, wanted in found.values()
        if not file.is_awaited
        and sum(extent.nbytes for _, extent in wanted) >= _WORTH_IT * os.fstat(file.descriptor).st_size
    ]


def ref_of(extent: Extent, name: str, nbytes: int) -> Ref:
    """Name the record of a block in a file that goes by another name now."""
    record = unpack(extent.file.read, extent.record_start, nbytes)
    head_bytes = record.nbytes - sum(part.nbytes for part in record.parts.values())
    head = extent.file.read(record.start, head_bytes)
    return Ref(name, record.start, record.nbytes, hashlib.sha256(head).hexdigest()[:32])


MOST_FILES = 192
_FILES_LEFT = 96


def compacted(saved: SavedRecords, reader: CheckpointReader, writer: RecordWriter) -> SavedRecords:
    """Copy the records of the smallest files to `writer` if there are too many; return where all of them lie then."""
    used: Counter[str] = Counter()
    for ref in set(saved.refs()):
        used[ref.file] += ref.nbytes
    if len(used) <= MOST_FILES:
        return saved
    smallest = {name for name, _ in used.most_common()[_FILES_LEFT:]}
    files = RecordFiles(reader)
    moved = {ref: _copied(files, ref, writer) for ref in dict.fromkeys(saved.refs()) if ref.file in smallest}

    def now(ref: Ref) -> Ref:
        return moved.get(ref, ref)

    merged = replace(
        saved,
        rows={n: (key, replace(chunk, ref=now(chunk.ref))) for n, (key, chunk) in saved.rows.items()},
        logs={first: now(ref) for first, ref in saved.logs.items()},
        dictionaries={name: now(ref) for name, ref in saved.dictionaries.items()},
        blocks=type(saved.blocks)(),
        filling=type(saved.filling)(),
    )
    for block, refs in list(saved.blocks.items()):
        merged.blocks[block] = tuple(now(ref) for ref in refs)
    for key, filled in list(saved.filling.items()):
        merged.filling[key] = PartialBlock(tuple(now(ref) for ref in filled.refs), filled.slices)
    return merged


def _copied(files: RecordFiles, ref: Ref, writer: RecordWriter) -> Ref:
    record, file = files.record(ref)
    head_bytes = record.nbytes - sum(part.nbytes for part in record.parts.values())
    raw = memoryview(file.read(ref.start, ref.nbytes))
    return writer.append([raw[:32], raw[32:head_bytes], raw[head_bytes:]])


class ReadAhead:
    """A file whose next bytes were read in one go: a record's head and its small parts mostly lie in them."""

    def __init__(self, file: SegmentFile, start: int, nbytes: int) -> None:
        self.file = file
        self._start = start
        self._raw = file.read(start, nbytes)

    def read(self, start: int, nbytes: int) -> bytes:
        """Read from a position; shorter at the file's end."""
        first = start - self._start
        if first >= 0 and first + nbytes <= len(self._raw):
            return self._raw[first : first + nbytes]
        return self.file.read(start, nbytes)


class RecordFiles:
    """The files of a checkpoint, opened as they are needed and read by position."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._library = reader
        self._files: dict[str, tuple[SegmentFile, int]] = {}

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Return a file, and its bytes."""
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = self._library.open(name)
        return found

    def expect(self, records: Iterable[tuple[Ref, int]]) -> None:
        """Have the first bytes of records that will be read brought near, all of them at once."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for ref, nbytes in records:
            ranges.setdefault(ref.file, []).append((ref.start, ref.start + min(ref.nbytes, nbytes)))
        demands = []
        for name, wanted in ranges.items():
            with contextlib.suppress(DamageError, CheckpointError):  # reading it raises the error
                demands.append(Demand(self.open(name)[0], *np.array(wanted, np.int64).T))
        if any(demand.file.is_awaited for demand in demands):
            bring(demands)
            return
        for file, starts, ends in demands:
            file.bring(starts, ends)

    def record(self, ref: Ref, ahead_bytes: int = _READ_AHEAD_BYTES) -> tuple[Record, ReadAhead]:
        """Read the head of a record, which must be the very one that the manifest names.

        Args:
            ahead_bytes: What will be needed of it, or about as much.
        """
        file, nbytes = self.open(ref.file)
        ahead = ReadAhead(file, ref.start, min(ref.nbytes, ahead_bytes))
        record = unpack(ahead.read, ref.start, nbytes)
        body = sum(part.nbytes for part in record.parts.values())
        head = ahead.read(ref.start, record.nbytes - body)
        if record.nbytes != ref.nbytes or hashlib.sha256(head).hexdigest()[:32] != ref.digest:
            raise DamageError(f"the record at byte {ref.start} of {file.path} is another than the manifest names")
        return record, ahead


class Attached(Mapping[str, bytes]):
    """A trainer's own files, as they were saved with the memory; read when they are asked for."""

    def __init__(self, files: RecordFiles | None = None, refs: Mapping[str, tuple[Ref, ...]] | None = None) -> None:
        self._shelf = files
        self._refs = dict(refs or {})

    def __getitem__(self, name: str) -> bytes:
        return b"".join(self._pieces(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def extract(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write a file out, piece by piece."""
        with Path(path).open("wb") as file:
            for piece in self._pieces(name):
                file.write(piece)

    def _pieces(self, name: str) -> Iterator[bytes]:
        for ref in self._refs[name]:
            if self._shelf is not None:
                record, file = self._shelf.record(ref)
                yield unpack_file(record, file.read)


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
        try:
            with malformed_refused(f"the record at byte {ref.start} of {ref.file}"):
                _require_whole(files, ref, coder)
        except (DamageError, CheckpointError) as error:
            if not is_lost(error):
                raise
            found.append(Damage(ref.file, ref.start, str(error)))
        read(ref.nbytes)
    for shard in manifest.shards:
        below = reader.below(shard.folder)
        try:
            of_shard = damages(below, shard_manifest(below, shard), coder, read)
        except (DamageError, CheckpointError) as error:
            if not is_lost(error):
                raise
            of_shard = [Damage("", 0, str(error))]
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


_INVALID = "invalid.0"


@dataclass(slots=True)
class LostTicks:
    """Runs of ticks that are lost, and why."""

    runs: list[tuple[int, int, str]] = field(default_factory=list)  # first tick, ticks, reason

    def lose(self, first_tick: int, ticks: int, reason: str) -> None:
        """Note a run."""
        self.runs.append((first_tick, ticks, reason))

    def report(self, url: str, number: int) -> None:
        """Say in the log what is lost."""
        for first, ticks, reason in self.runs:
            _LOG.warning(
                "%s, checkpoint %d: ticks %d to %d are lost (%s)", url, number, first, first + ticks - 1, reason
            )

    def marked(self, chunk: RowChunk, lanes: int) -> RowChunk:
        """Mark the ticks of a chunk that are lost as holding no transition."""
        columns = dict(chunk.columns)
        invalid = columns.get(_INVALID, np.zeros((chunk.ticks, lanes), np.bool_)).copy()
        for first, ticks, _ in self.runs:
            start = max(0, first - chunk.first_tick)
            invalid[start : max(start, first + ticks - chunk.first_tick)] = True
        columns[_INVALID] = invalid
        return RowChunk(chunk.first_tick, chunk.ticks, columns, chunk.apart)


def blank_rows(first_tick: int, ticks: int, like: Like) -> RowChunk:
    """Stand in for rows that cannot be read."""
    return RowChunk(
        first_tick, ticks, {name: np.zeros((ticks, *shape), dtype) for name, (shape, dtype) in like.items()}, {}
    )


def blank_parts(leaves: Sequence[Leaf], lanes: int) -> list[ClosedPart]:
    """Stand in for a segment that cannot be read."""
    parts = []
    for leaf in leaves:
        block = KeptBlock(leaf.nbytes, 1, np.zeros(leaf.nbytes, np.uint8))
        parts.append(ClosedPart(Window.whole(leaf), np.zeros((1, lanes), np.uint16), 1, block, 1, 0, 0))
    return parts

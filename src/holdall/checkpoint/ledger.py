"""Writing records into files of a place, one after another."""

from __future__ import annotations

import hashlib
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from holdall.checkpoint.manifest import CheckpointReader, CheckpointWriter, Chunk, NewFile, Ref
from holdall.errors import DamageError
from holdall.storage.blocks import Extent, SegmentFile, SliceBlock
from holdall.storage.records import Buffer, Record, unpack
from holdall.storage.remote_file import Demand, bring
from holdall.storage.snapshot import is_settled

FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes FILE_BYTES, or this share of what was written if that is more, so that a reader can open them all."""

_READ_AHEAD_BYTES = 2**15


class RecordWriter:
    """Appends records to a file, and begins the next when it is full.

    Args:
        wrote: Is told of every record's bytes.
    """

    def __init__(self, place: CheckpointWriter, wrote: Callable[[int], None]) -> None:
        self.files: dict[str, int] = {}
        self._place = place
        self._wrote = wrote
        self._file: NewFile | None = None
        self._written = 0

    def append(self, record: Sequence[Buffer]) -> Ref:
        """Write a record; it is durable once the writer is finished and a manifest committed."""
        if self._file is not None and self._file.nbytes >= max(FILE_BYTES, self._written // _FILES):
            self.finish()
        if self._file is None:
            self._file = self._place.new_file()
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
        if self._file is not None and self._file.nbytes >= self._place.behind_bytes:
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
"""How often flags of a chunk were set anew, and its columns."""


@dataclass(slots=True)
class Filling:
    """What was written of a block that is still being filled."""

    refs: tuple[Ref, ...] = ()
    slices: int = 0


@dataclass(slots=True)
class Ledger:
    """All that is known to lie in a place."""

    files: dict[str, int] = field(default_factory=dict)
    rows: dict[int, tuple[RowsKey, Chunk]] = field(default_factory=dict)  # by number of the chunk
    logs: dict[int, Ref] = field(default_factory=dict)  # by a closed segment's first tick
    blocks: weakref.WeakKeyDictionary[SliceBlock, tuple[Ref, ...]] = field(default_factory=weakref.WeakKeyDictionary)
    filling: weakref.WeakKeyDictionary[object, Filling] = field(default_factory=weakref.WeakKeyDictionary)
    split: weakref.WeakSet[SliceBlock] = field(default_factory=weakref.WeakSet)  # full blocks in pieces
    dictionaries: dict[str, Ref] = field(default_factory=dict)  # by the sha256 of their content

    def rows_saved(self) -> dict[int, RowsKey]:
        """Name the chunks of rows that are there."""
        return {number: key for number, (key, _) in self.rows.items()}

    def take_over(self, moved: Ledger) -> None:
        """Name records where they lie now; the same ones, in other files."""
        self.rows, self.logs, self.dictionaries = moved.rows, moved.logs, moved.dictionaries
        self.blocks, self.filling = moved.blocks, moved.filling

    def merge(self, fresh: Ledger) -> None:
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

    def files_in_use(self) -> set[str]:
        """Name the files that hold something of use."""
        refs = [chunk.ref for _, chunk in self.rows.values()]
        refs += [*self.logs.values(), *self.dictionaries.values()]
        refs += [ref for written in self.blocks.values() for ref in written]
        refs += [ref for filled in self.filling.values() for ref in filled.refs]
        return {ref.file for ref in refs}

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


MOST_FILES = 192
_FILES_LEFT = 96


def merge(ledger: Ledger, reader: CheckpointReader, writer: RecordWriter) -> Ledger:
    """Copy the records of the smallest files to `writer` if there are too many; return where all of them lie then."""
    used: Counter[str] = Counter()
    for ref in set(_refs(ledger)):
        used[ref.file] += ref.nbytes
    if len(used) <= MOST_FILES:
        return ledger
    smallest = {name for name, _ in used.most_common()[_FILES_LEFT:]}
    shelf = RecordFiles(reader)
    moved = {ref: _copied(shelf, ref, writer) for ref in dict.fromkeys(_refs(ledger)) if ref.file in smallest}

    def now(ref: Ref) -> Ref:
        return moved.get(ref, ref)

    merged = replace(
        ledger,
        rows={n: (key, replace(chunk, ref=now(chunk.ref))) for n, (key, chunk) in ledger.rows.items()},
        logs={first: now(ref) for first, ref in ledger.logs.items()},
        dictionaries={name: now(ref) for name, ref in ledger.dictionaries.items()},
        blocks=type(ledger.blocks)(),
        filling=type(ledger.filling)(),
    )
    for block, refs in list(ledger.blocks.items()):
        merged.blocks[block] = tuple(now(ref) for ref in refs)
    for key, filled in list(ledger.filling.items()):
        merged.filling[key] = Filling(tuple(now(ref) for ref in filled.refs), filled.slices)
    return merged


def _refs(ledger: Ledger) -> Iterable[Ref]:
    yield from (chunk.ref for _, chunk in ledger.rows.values())
    yield from ledger.logs.values()
    yield from ledger.dictionaries.values()
    for refs in list(ledger.blocks.values()):
        yield from refs
    for filled in list(ledger.filling.values()):
        yield from filled.refs


def _copied(shelf: RecordFiles, ref: Ref, writer: RecordWriter) -> Ref:
    record, file = shelf.record(ref)
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
        opened = [(self.open(name)[0], np.array(wanted, np.int64)) for name, wanted in ranges.items()]
        bring(Demand(file, wanted[:, 0], wanted[:, 1]) for file, wanted in opened)

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

"""Write a snapshot: its segments, blocks and state become records, and a manifest commits them.

A record that an earlier checkpoint wrote is named again and not written. Parts and blocks are recognised by their
serial numbers, so that nothing is kept alive for the comparison. Closed segments go to lasting files. The last segment,
which is mostly still being filled, the state and attached files go to a file that the next checkpoint replaces.

Guarantee: one record at a time is held in memory, besides the snapshot. Segments are written oldest first and released
one by one, because the oldest are evicted next. If anything fails, the earlier checkpoints are as they were.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from holdall._native import Block, Coded, Dictionary, Segment, encode
from holdall.checkpoint.attached import file_pieces, pack_file
from holdall.checkpoint.manifest import BlockEntry, Manifest, Ref, SegmentEntry
from holdall.checkpoint.retention import CheckpointWriter, NewFile, commit_unique
from holdall.codec.choice import FieldCodec
from holdall.codec.codec import Codec
from holdall.errors import CheckpointError
from holdall.schema import Leaf, Schema, dtype_name
from holdall.store.format import (
    code_form,
    list_blocks,
    name_dictionary,
    pack_block,
    pack_dictionary,
    pack_parts,
)
from holdall.store.records import Buffer
from holdall.store.snapshot import StoreState
from holdall.store.states import pack_state
from holdall.store.tuning import Tuning
from holdall.store.windows import Window

MAX_FILES = 192
"""Files that a checkpoint may name, because a memory that was loaded keeps all of them open."""
_KEPT_FILES = 96
"""Files whose records stay when there are too many. The records of smaller files are written again."""
_FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file has at least `_FILE_BYTES`, or this share of everything that was written if that is more."""

Report = Callable[[str, int, int], None]
"""Called with the phase, the bytes written so far, and the approximate total of bytes."""


class Snapshot(Protocol):
    """What is saved: a memory, or the checkpoints of its shards."""

    schema: dict[str, Any]
    capacity_ticks: int
    attach: Mapping[str, Path | bytes]

    @property
    def transitions(self) -> int:
        """Number of transitions, without those of shards."""

    def write(self, writer: SnapshotWriter) -> Content:
        """Write everything but the attached files and the state."""


@dataclass(slots=True)
class Content:
    """What the manifest says of a snapshot."""

    state: dict[str, Any]
    fields: dict[str, Any]  # Fields of the manifest.


class RecordWriter:
    """Appends records to files, and starts the next file when one is full."""

    def __init__(self, target: CheckpointWriter, wrote: Callable[[int], None]) -> None:
        self.files: dict[str, int] = {}  # Bytes of the finished files by name.
        self._target = target
        self._wrote = wrote  # Called with the bytes of every record.
        self._file: NewFile | None = None
        self._written_bytes = 0

    def append(self, record: Sequence[Buffer]) -> Ref:
        """Write a record. It is durable once the writer is finished and a manifest is committed."""
        if self._file is not None and self._file.nbytes >= max(_FILE_BYTES, self._written_bytes // _FILES):
            self.finish()
        if self._file is None:
            self._file = self._target.new_file()
        file = self._file
        start = file.nbytes
        for buffer in record:
            file.write(buffer)
        nbytes = file.nbytes - start
        self._written_bytes += nbytes
        self._wrote(nbytes)
        digest = hashlib.sha256(bytes(record[0]) + bytes(record[1])).hexdigest()[:32]
        return Ref(file.name, start, nbytes, digest)

    def finish(self) -> None:
        """Complete the current file."""
        if self._file is not None:
            self._file.finish()
            self.files[self._file.name] = self._file.nbytes
            self._file = None

    def abandon(self) -> None:
        """Delete the current file."""
        if self._file is not None:
            self._file.abandon()
            self._file = None


@dataclass(frozen=True, slots=True)
class SavedSegment:
    """The records of a closed segment."""

    ticks: int
    serials: tuple[int, ...]  # Serial numbers of the parts in the first record.
    ref: Ref
    changed: tuple[int, ...] = ()  # Serial numbers of all parts when the second record was written. Empty without one.
    changed_ref: Ref | None = None  # Second record: the parts that differ from the first one.

    @property
    def refs(self) -> tuple[Ref, ...]:
        """All records of the segment."""
        return (self.ref,) if self.changed_ref is None else (self.ref, self.changed_ref)


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """The record of a closed block."""

    entry: BlockEntry
    dictionary: str | None  # Name of the dictionary that the record refers to.


@dataclass(slots=True)
class SavedRecords:
    """The records of a memory that a place has already. Replaced as a whole after every commit."""

    files: dict[str, int] = field(default_factory=dict)  # Bytes by name.
    segments: dict[int, SavedSegment] = field(default_factory=dict)  # By first tick.
    blocks: dict[int, SavedBlock] = field(default_factory=dict)  # Closed blocks, by serial number.
    dictionaries: dict[str, Ref] = field(default_factory=dict)  # By name.

    def keep_only(self, sizes: Mapping[str, int]) -> SavedRecords:
        """Return the records whose files are among `sizes`, with all their bytes."""
        files = {name: nbytes for name, nbytes in self.files.items() if sizes.get(name, -1) >= nbytes}
        if len(files) == len(self.files):
            return self
        return SavedRecords(
            files=files,
            segments={
                first_tick: segment
                for first_tick, segment in self.segments.items()
                if all(ref.file in files for ref in segment.refs)
            },
            blocks={serial: block for serial, block in self.blocks.items() if block.entry.ref.file in files},
            dictionaries={name: ref for name, ref in self.dictionaries.items() if ref.file in files},
        )

    def keep_largest(self) -> SavedRecords:
        """Return the records of the largest files if there are more than `MAX_FILES`. The others are written again."""
        used: Counter[str] = Counter()
        for ref in self._list_refs():
            used[ref.file] += ref.nbytes
        if len(used) <= MAX_FILES:
            return self
        return self.keep_only({name: self.files[name] for name, _ in used.most_common(_KEPT_FILES)})

    def _list_refs(self) -> list[Ref]:
        refs = [ref for segment in self.segments.values() for ref in segment.refs]
        refs += [block.entry.ref for block in self.blocks.values()]
        return refs + list(self.dictionaries.values())


class BlockEncoder:
    """Compresses blocks that the memory holds uncompressed. Not thread-safe: used by one saver's thread.

    A block gets the codec that the memory chose for other blocks of the same field and layout. If there is none yet,
    the encoder chooses one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Any], Codec] = {}  # By column and layout.
        self._chosen: dict[tuple[int, Any], FieldCodec] = {}

    def learn(self, segments: Sequence[Segment]) -> None:
        """Remember the codecs of the newest compressed blocks."""
        for segment in segments:
            for column, part in enumerate(segment.parts):
                form = None if part.block is None else part.block.form
                if isinstance(form, Coded):
                    self._known[column, part.layout] = form.codec

    def encode(self, leaf: Leaf, layout: Any, column: int, block: Block) -> Coded:
        """Return the slices of an uncompressed block of a leaf, compressed. Releases the GIL."""
        key = (column, layout)
        codec = self._known.get(key)
        coded = None if codec is None else encode(block, codec)
        if coded is not None:
            return coded
        if key not in self._chosen:
            self._chosen[key] = FieldCodec(leaf, Window.from_layout(leaf, layout), "balanced", Tuning())
        return self._chosen[key].encode(block, False)


class SnapshotWriter:
    """One checkpoint that is being written."""

    def __init__(self, target: CheckpointWriter, saved: SavedRecords, encoder: BlockEncoder, report: Report) -> None:
        self.target = target
        self.phase = "segments"
        self.bytes_written = 0
        self.saved = SavedRecords()  # What can be named by the next checkpoint, once this one is committed.
        self._before = saved.keep_only(target.reader.file_sizes()).keep_largest()
        self._encoder = encoder
        self._report = report
        self._bytes_left = 0  # Approximate number of bytes that are still to be written.
        # A file is deleted as a whole, so records that last and records that are replaced are in separate files.
        self._lasting = RecordWriter(target, self.count_written)
        self._brief = RecordWriter(target, self.count_written)

    def run(self, snapshot: Snapshot, find_number: Callable[[], int]) -> Manifest:
        """Write everything and commit a checkpoint with the number that `find_number` returns.

        `find_number` raises FencedError if another writer uses the place.
        """
        try:
            number = find_number()
            attach_bytes = [
                len(each) if isinstance(each, bytes) else each.stat().st_size for each in snapshot.attach.values()
            ]
            self._bytes_left = sum(attach_bytes)
            content = snapshot.write(self)
            manifest = self._finish(snapshot, number, content)
            self._report("commit", self.bytes_written, self.bytes_written)
            manifest = commit_unique(self.target, manifest, find_number)
        except BaseException:
            self._lasting.abandon()
            self._brief.abandon()
            raise
        # Others may collect files that no manifest names, so only files of this manifest are used again.
        known = self._before.files | self._lasting.files | self._brief.files
        self.saved.files = {name: known[name] for name in manifest.files}
        return manifest

    def write_store(self, state: StoreState, schema: Schema, further: dict[str, Any]) -> Content:
        """Write what a memory holds. `further` is the state of its sampler and generator."""
        leaves = schema.observation.leaves
        self._encoder.learn(state.segments)
        self._bytes_left += self._count_new_bytes(state.segments)
        store_words = describe_store(state)
        first_tick = state.first_tick
        next_tick = state.next_tick
        segments = deque(state.segments)
        del state  # The caller released the snapshot, so every segment is released when it is written.
        entries: list[SegmentEntry] = []
        blocks: list[BlockEntry] = []
        numbers: dict[int, int] = {}  # By serial number of a block: its position in `blocks`.
        while segments:
            segment = segments.popleft()
            for block in list_blocks(segment):
                if block.serial not in numbers:
                    numbers[block.serial] = len(blocks)
                    blocks.append(self._write_block(segment, block, leaves))
            refs = self._write_parts(segment, is_last=not segments)
            named = tuple(numbers[block.serial] for block in list_blocks(segment))
            entries.append(SegmentEntry(segment.first_tick, segment.ticks, refs, named))
        return Content(
            state={"store": store_words, **further},
            fields={
                "first_tick": first_tick,
                "next_tick": next_tick,
                "segments": tuple(entries),
                "blocks": tuple(blocks),
                "dictionaries": dict(self.saved.dictionaries),
            },
        )

    def count_written(self, nbytes: int) -> None:
        """Count bytes that were written, and report them."""
        self.bytes_written += nbytes
        self._bytes_left = max(0, self._bytes_left - nbytes)
        self._report(self.phase, self.bytes_written, self.bytes_written + self._bytes_left)

    def _write_block(self, segment: Segment, block: Block, leaves: Sequence[Leaf]) -> BlockEntry:
        """Write a block and its dictionary, unless they are there already."""
        known = self._before.blocks.get(block.serial)
        name = None if known is None else known.dictionary
        if name is not None:
            dictionary_ref = self._before.dictionaries.get(name)
            if dictionary_ref is None:
                known = None  # The file of the dictionary is gone, so the block cannot be read.
            else:
                self.saved.dictionaries[name] = dictionary_ref
        if known is not None:
            self.saved.blocks[block.serial] = known
            return known.entry
        # An open block grows, so the next checkpoint writes it again. This is read before the slices are: a block that
        # is closed now has all its slices.
        is_open = block.is_open
        column = next(column for column, part in enumerate(segment.parts) if part.block is block)
        encode_raw = functools.partial(self._encoder.encode, leaves[column], segment.parts[column].layout)
        coded = code_form(column, block, encode_raw)
        dictionary = None if coded.codec.dictionary is None else self._write_dictionary(coded.codec.dictionary)
        record = pack_block(coded)
        ref = (self._brief if is_open else self._lasting).append(record)
        entry = BlockEntry(ref, ref.nbytes - memoryview(record[-1]).nbytes)
        if not is_open:
            self.saved.blocks[block.serial] = SavedBlock(entry, dictionary)
        return entry

    def _write_dictionary(self, dictionary: Dictionary) -> str:
        """Write a dictionary, unless it is there already. Return its name."""
        name = name_dictionary(dictionary)
        if name not in self.saved.dictionaries:
            known = self._before.dictionaries.get(name)
            ref = self._lasting.append(pack_dictionary(dictionary)) if known is None else known
            self.saved.dictionaries[name] = ref
        return name

    def _write_parts(self, segment: Segment, *, is_last: bool) -> tuple[Ref, ...]:
        """Write the parts of a segment that are not there already. Return the records of the segment."""
        serials = tuple(part.serial for part in segment.parts)
        saved = self._before.segments.get(segment.first_tick)
        if saved is None and is_last:
            return (self._brief.append(pack_parts(segment)),)
        if saved is None or saved.ticks != segment.ticks or len(saved.serials) != len(serials):
            saved = SavedSegment(segment.ticks, serials, self._lasting.append(pack_parts(segment)))
        elif serials not in (saved.serials, saved.changed):
            saved = self._write_changed(segment, saved, serials)
        self.saved.segments[segment.first_tick] = saved
        return saved.refs

    def _write_changed(self, segment: Segment, saved: SavedSegment, serials: tuple[int, ...]) -> SavedSegment:
        """Write the parts that were rewritten since the first record, or all parts if that costs about the same."""
        changed = {column for column, serial in enumerate(serials) if serial != saved.serials[column]}
        changed_bytes = sum(segment.parts[column].nbytes for column in changed)
        if 2 * changed_bytes > sum(part.nbytes for part in segment.parts):
            return SavedSegment(segment.ticks, serials, self._lasting.append(pack_parts(segment)))
        return replace(saved, changed=serials, changed_ref=self._lasting.append(pack_parts(segment, changed)))

    def _count_new_bytes(self, segments: Sequence[Segment]) -> int:
        """Return the bytes in memory of everything that is about to be written."""
        nbytes = 0
        blocks: dict[int, int] = {}
        for segment in segments:
            if segment.first_tick not in self._before.segments:
                nbytes += sum(part.nbytes for part in segment.parts)
            for block in list_blocks(segment):
                if block.serial not in self._before.blocks:
                    form = block.form
                    is_coded = isinstance(form, Coded)
                    blocks[block.serial] = form.nbytes if is_coded else block.slice_count * block.slice_bytes
        return nbytes + sum(blocks.values())

    def _finish(self, snapshot: Snapshot, number: int, content: Content) -> Manifest:
        """Write what every checkpoint has, finish all files, and return the manifest."""
        self.phase = "files"
        attached = {
            name: tuple(self._brief.append(pack_file(piece)) for piece in file_pieces(given))
            for name, given in snapshot.attach.items()
        }
        state_ref = self._brief.append(pack_state(content.state))
        self._lasting.finish()
        self._brief.finish()
        manifest = Manifest(
            number=number,
            commit=secrets.token_hex(16),
            writer_id=self.target.writer_id,
            time=time.time(),
            capacity_ticks=snapshot.capacity_ticks,
            schema=snapshot.schema,
            files={},
            state=state_ref,
            attached=attached,
            **content.fields,
        )
        known = self._before.files | self._lasting.files | self._brief.files
        names = dict.fromkeys(ref.file for ref in manifest.refs)
        return replace(manifest, files={name: known[name] for name in names})


def describe_store(state: StoreState) -> dict[str, Any]:
    """Return what a store's state has besides segments, as plain values."""
    return {
        "layouts": [list(layout) for layout in state.layouts],
        "windows": [window.to_json() for window in state.windows],
        "reward_dtype": None if state.reward_dtype is None else dtype_name(state.reward_dtype),
    }


def require_unsaved(state: StoreState | None) -> StoreState:
    """Return the state of a snapshot, which may be written once."""
    if state is None:
        raise CheckpointError("A snapshot was saved twice. Please report this.")
    return state

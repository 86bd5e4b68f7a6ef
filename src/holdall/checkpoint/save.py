"""Save a snapshot: write its segments, blocks and state as records in blobs, and commit them with a manifest.

A closed segment or block that an earlier checkpoint wrote is not written again: the manifest names its record. Parts
and blocks are recognised by their serial numbers, so that nothing large is kept alive for the comparison. Closed
segments are written to lasting files. The last segment (mostly still open), the dictionaries, the state and attached
files are written to files that the next checkpoint replaces. Every checkpoint has its own copy of a dictionary, because
thousands of blocks need it: damage to a copy affects one checkpoint and not all.

Blocks that the memory holds uncompressed are compressed here, on the thread of the caller. The memory takes over the
compressed forms of those blocks that its budget wants compressed.

Guarantee: one blob at a time is held in memory, besides the snapshot. Segments are written oldest first and released
one by one, because the oldest are evicted next. If anything fails, the earlier checkpoints are as they were.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from holdall._native import FLAG_INVALID, Block, Coded, Dictionary, Segment
from holdall.checkpoint.attached import pack_file, read_pieces
from holdall.checkpoint.blobs import BlobStore
from holdall.checkpoint.manifest import BlockEntry, Manifest, Ref, SegmentEntry
from holdall.checkpoint.reader import SEGMENTS, CheckpointReader
from holdall.codec.choice import FieldCodec, encode_whole
from holdall.codec.codec import Codec
from holdall.errors import CheckpointError
from holdall.schema import Leaf, Schema
from holdall.schema_json import dtype_to_json, schema_from_json
from holdall.store.format import (
    code_form,
    list_blocks,
    name_dictionary,
    pack_block,
    pack_dictionary,
    pack_parts,
)
from holdall.store.layouts import SlicedLayout, find_sliced_layout
from holdall.store.records import Buffer
from holdall.store.snapshot import StoreState
from holdall.store.states import pack_state
from holdall.store.tuning import Tuning
from holdall.store.windows import Window

_BLOB_BYTES = 8 * 2**20
"""Bytes after which a blob is created. The blob is larger than this by less than one record."""
_CORE_SHARE = 1 / 3
"""Share of one core that compression takes while nobody waits for the save. On a machine with two cores, half of a core
costs training more than a tenth of its speed."""

OnWrite = Callable[[str, int, int], None]
"""Called with the phase, the bytes written so far, and the approximate total of bytes. Raises to end the save."""


class Snapshot(Protocol):
    """The content of a checkpoint: a memory, or the checkpoints of its shards."""

    schema: dict[str, Any]
    capacity_ticks: int
    attach: Mapping[str, Path | bytes]

    def write(self, writer: SnapshotWriter) -> Content:
        """Write everything but the attached files and the state."""


@dataclass(slots=True)
class Content:
    """The parts of a manifest that depend on the kind of snapshot."""

    state: dict[str, Any]
    fields: dict[str, Any]  # Fields of the manifest.


class BlockSource(Protocol):
    """The part of a store that compressing its blocks needs. Thread-safe."""

    prefer: str

    def find_chosen_codec(self, leaf: int, layout: SlicedLayout, /) -> Codec | None:
        """Return the codec of an observation leaf, or None if none was chosen yet."""

    def offer_form(self, block: Block, coded: Coded, /) -> None:
        """Take over the compressed form of a block, if the budget wants the block compressed."""


@dataclass(slots=True)
class MemorySnapshot:
    """The content of a checkpoint of one memory."""

    store: StoreState | None  # None once it is being written, so that segments can be released one by one.
    schema: dict[str, Any]  # Result of `schema_words`.
    capacity_ticks: int
    state: dict[str, Any]  # State of sampler and generator, and further values of the owner.
    source: BlockSource | None = None  # None: a store that compresses no blocks.
    coded_forms: Mapping[int, Coded] = field(default_factory=dict)
    """Compressed forms of uncompressed blocks that were compressed before, by serial number of the block."""
    attach: Mapping[str, Path | bytes] = field(default_factory=dict)

    def write(self, writer: SnapshotWriter) -> Content:
        """Write the content of the memory. May be called once."""
        state = self.store
        if state is None:
            raise CheckpointError("A snapshot was saved twice. Please report this.")
        self.store = None
        return writer.write_store(state, schema_from_json(self.schema), self.state, self.source, self.coded_forms)


def _count_transitions(state: StoreState, lanes: int) -> int:
    entries = (state.next_tick - state.first_tick) * lanes
    return entries - sum(_count_invalid(segment, state.first_tick) for segment in state.segments)


def _count_invalid(segment: Segment, first_tick: int) -> int:
    """Return the number of entries from `first_tick` on that are not transitions. Earlier entries were evicted."""
    if segment.invalid_count == 0 or segment.first_tick >= first_tick:
        return segment.invalid_count
    flags = segment.parts[-1].arrays()["rows"]
    held_flags = flags[(first_tick - segment.first_tick) * segment.lanes :]
    return int(np.count_nonzero(held_flags & FLAG_INVALID))


class BlobWriter:
    """Collects records, and creates a blob when they are large enough."""

    def __init__(self, blobs: BlobStore, names: Iterator[str], count_written: Callable[[int], None]) -> None:
        self.files: dict[str, int] = {}  # Bytes of the created files by name.
        self._blobs = blobs
        self._names = names
        self._count_written = count_written  # Called with the bytes of every blob.
        self._name = ""
        self._content = bytearray()

    def append(self, record: Sequence[Buffer]) -> Ref:
        """Add a record. It is durable once `finish` has returned."""
        if not self._content:
            self._name = next(self._names)
        start = len(self._content)
        for buffer in record:
            self._content += buffer
        digest = hashlib.sha256(bytes(record[0]) + bytes(record[1])).hexdigest()[:32]
        ref = Ref(self._name, start, len(self._content) - start, digest)
        if len(self._content) >= _BLOB_BYTES:
            self.finish()
        return ref

    def finish(self) -> None:
        """Create a blob of the records that were added since the last blob was created."""
        if not self._content:
            return
        nbytes = len(self._content)
        # A request that was cancelled may still read the content, so the bytearray is replaced and never cleared.
        if not self._blobs.create(SEGMENTS + self._name, memoryview(self._content)):
            raise CheckpointError(f"{self._blobs.url}/{SEGMENTS}{self._name} already exists. Save again.")
        self.files[self._name] = nbytes
        self._content = bytearray()
        self._count_written(nbytes)


@dataclass(frozen=True, slots=True)
class SavedSegment:
    """The record of a closed segment."""

    ticks: int
    serials: tuple[int, ...]  # Serial numbers of the parts.
    ref: Ref


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """The record of a closed block."""

    entry: BlockEntry
    dictionary: Dictionary | None  # The dictionary that the record refers to.


@dataclass(slots=True)
class SavedRecords:
    """The records of a memory that a place has already. A new object replaces it after every commit."""

    files: dict[str, int] = field(default_factory=dict)  # Bytes by name.
    segments: dict[int, SavedSegment] = field(default_factory=dict)  # By first tick.
    blocks: dict[int, SavedBlock] = field(default_factory=dict)  # Closed blocks, by serial number.

    def keep_only(self, sizes: Mapping[str, int]) -> SavedRecords:
        """Return the records whose files are among `sizes`, with all their bytes."""
        files = {name: nbytes for name, nbytes in self.files.items() if sizes.get(name) == nbytes}
        if len(files) == len(self.files):
            return self
        return SavedRecords(
            files=files,
            segments={tick: segment for tick, segment in self.segments.items() if segment.ref.file in files},
            blocks={serial: block for serial, block in self.blocks.items() if block.entry.ref.file in files},
        )


class BlockEncoder:
    """Compresses blocks that the memory holds uncompressed. Not thread-safe: used by one saver's thread.

    A block gets the codec that the memory chose for the field. If the memory has chosen none yet, the encoder chooses
    one in the same way.
    """

    def __init__(self) -> None:
        self._chosen: dict[tuple[int, SlicedLayout], FieldCodec] = {}  # By column and layout.

    def encode(self, source: BlockSource | None, leaf: Leaf, layout: SlicedLayout, column: int, block: Block) -> Coded:
        """Return the slices of an uncompressed block of a leaf, compressed. Releases the GIL."""
        codec = None if source is None else source.find_chosen_codec(column, layout)
        if codec is not None:
            return encode_whole(block, codec)
        key = (column, layout)
        if key not in self._chosen:
            prefer = "balanced" if source is None else source.prefer
            self._chosen[key] = FieldCodec(leaf, Window.from_layout(leaf, layout), prefer, Tuning())
        return self._chosen[key].encode(block, False)


class SnapshotWriter:
    """One checkpoint that is being written.

    Args:
        names: Names of new files.
        saved: Records that the place has already.
        pause: Called with the seconds that compression should pause. It returns at once if somebody waits for the save.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        names: Iterator[str],
        saved: SavedRecords,
        encoder: BlockEncoder,
        on_write: OnWrite,
        pause: Callable[[float], None],
    ) -> None:
        self.reader = reader
        self.phase = "segments"
        self.bytes_written = 0
        self.saved = SavedRecords()  # Records that the next checkpoint can name, once this one is committed.
        self._existing = saved.keep_only(reader.file_sizes())  # Records that are not written again.
        self._encoder = encoder
        self._on_write = on_write
        self._pause = pause
        self._dictionaries: set[Dictionary] = set()  # Those that blocks of this checkpoint need.
        self._bytes_left = 0  # Approximate number of bytes that remain to be written.
        self._coded_forms: Mapping[int, Coded] = {}  # See `MemorySnapshot`.
        # A file is deleted as a whole. So records that later checkpoints use, too, and records that the next checkpoint
        # replaces are in separate files.
        self._lasting = BlobWriter(reader.blobs, names, self.count_written)
        self._replaced = BlobWriter(reader.blobs, names, self.count_written)

    def write(self, snapshot: Snapshot, number: int, writer_id: str) -> Manifest:
        """Write everything but the manifest. Return the manifest, which commits the checkpoint."""
        self._bytes_left = sum(_count_bytes(content) for content in snapshot.attach.values())
        content = snapshot.write(self)
        self.phase = "files"
        attached = {
            name: tuple(self._replaced.append(pack_file(piece)) for piece in read_pieces(file))
            for name, file in snapshot.attach.items()
        }
        state_ref = self._replaced.append(pack_state(content.state))
        self._lasting.finish()
        self._replaced.finish()
        manifest = Manifest(
            number=number,
            commit=secrets.token_hex(16),
            writer_id=writer_id,
            time=time.time(),
            capacity_ticks=snapshot.capacity_ticks,
            schema=snapshot.schema,
            files={},
            state=state_ref,
            attached=attached,
            **content.fields,
        )
        sizes = self._existing.files | self._lasting.files | self._replaced.files
        names = dict.fromkeys(ref.file for ref in manifest.refs)
        self.saved.files = {name: sizes[name] for name in names}
        self._on_write("commit", self.bytes_written, self.bytes_written)
        return replace(manifest, files=dict(self.saved.files))

    def write_store(
        self,
        state: StoreState,
        schema: Schema,
        owner_state: dict[str, Any],
        source: BlockSource | None,
        coded_forms: Mapping[int, Coded],
    ) -> Content:
        """Write the content of a memory. `owner_state` is the state of its sampler and generator."""
        self._coded_forms = coded_forms
        leaves = schema.observation.leaves
        self._bytes_left += self._count_new_bytes(state.segments)
        description = _describe_store(state)
        first_tick = state.first_tick
        next_tick = state.next_tick
        transitions = _count_transitions(state, schema.num_envs)
        segments = deque(state.segments)
        del state  # The caller dropped the snapshot, too, so every segment is freed when it is written.
        entries: list[SegmentEntry] = []
        blocks: list[BlockEntry] = []
        numbers: dict[int, int] = {}  # By serial number of a block: its position in `blocks`.
        while segments:
            segment = segments.popleft()
            for block in list_blocks(segment):
                if block.serial not in numbers:
                    numbers[block.serial] = len(blocks)
                    blocks.append(self._write_block(segment, block, leaves, source))
            ref = self._write_parts(segment, is_last=not segments)
            positions = tuple(numbers[block.serial] for block in list_blocks(segment))
            entries.append(SegmentEntry(segment.first_tick, segment.ticks, ref, positions))
            self._on_write(self.phase, self.bytes_written, self.bytes_written + self._bytes_left)
        return Content(
            state={"store": description, **owner_state},
            fields={
                "first_tick": first_tick,
                "next_tick": next_tick,
                "transitions": transitions,
                "segments": tuple(entries),
                "blocks": tuple(blocks),
                "dictionaries": self._write_dictionaries(),
            },
        )

    def count_written(self, nbytes: int) -> None:
        """Count bytes that were written, and report them."""
        self.bytes_written += nbytes
        self._bytes_left = max(0, self._bytes_left - nbytes)
        self._on_write(self.phase, self.bytes_written, self.bytes_written + self._bytes_left)

    def _write_block(
        self, segment: Segment, block: Block, leaves: Sequence[Leaf], source: BlockSource | None
    ) -> BlockEntry:
        """Write a block, unless an earlier checkpoint wrote it. Record the dictionary that it needs."""
        known = self._existing.blocks.get(block.serial)
        if known is not None:
            self.saved.blocks[block.serial] = known
            self._require_dictionary(known.dictionary)
            return known.entry
        # An open block grows, so the next checkpoint writes it again. `is_open` is read before the slices, because a
        # block that is closed at this moment has all of its slices.
        is_open = block.is_open
        column = next(column for column, part in enumerate(segment.parts) if part.block is block)
        layout = find_sliced_layout(segment.parts[column])
        encode_raw = functools.partial(self._encode, source, leaves[column], layout)
        coded = code_form(column, block, encode_raw)
        if source is not None and not is_open:
            source.offer_form(block, coded)
        self._require_dictionary(coded.codec.dictionary)
        record = pack_block(coded)
        ref = (self._replaced if is_open else self._lasting).append(record)
        entry = BlockEntry(ref, ref.nbytes - memoryview(record[-1]).nbytes)
        if not is_open:
            self.saved.blocks[block.serial] = SavedBlock(entry, coded.codec.dictionary)
        return entry

    def _encode(self, source: BlockSource | None, leaf: Leaf, layout: SlicedLayout, column: int, block: Block) -> Coded:
        """Return the compressed form of a block. After compressing it, pause so that training has its cores."""
        known = self._coded_forms.get(block.serial)
        if known is not None:
            return known
        began = time.perf_counter()
        coded = self._encoder.encode(source, leaf, layout, column, block)
        self._pause((time.perf_counter() - began) * (1 / _CORE_SHARE - 1))
        return coded

    def _require_dictionary(self, dictionary: Dictionary | None) -> None:
        """Record that a block of this checkpoint needs a dictionary."""
        if dictionary is not None:
            self._dictionaries.add(dictionary)

    def _write_dictionaries(self) -> dict[str, Ref]:
        """Write the dictionaries that blocks of this checkpoint need. Return their records by name."""
        by_name = {name_dictionary(dictionary): dictionary for dictionary in self._dictionaries}
        return {name: self._replaced.append(pack_dictionary(by_name[name])) for name in sorted(by_name)}

    def _write_parts(self, segment: Segment, *, is_last: bool) -> Ref:
        """Write the parts of a segment, unless an earlier checkpoint wrote them. Return their record."""
        serials = tuple(part.serial for part in segment.parts)
        saved = self._existing.segments.get(segment.first_tick)
        if saved is None or saved.ticks != segment.ticks or saved.serials != serials:
            if is_last:
                return self._replaced.append(pack_parts(segment))
            saved = SavedSegment(segment.ticks, serials, self._lasting.append(pack_parts(segment)))
        self.saved.segments[segment.first_tick] = saved
        return saved.ref

    def _count_new_bytes(self, segments: Sequence[Segment]) -> int:
        """Return the bytes in memory of the parts and blocks that are not written yet. Approximate."""
        nbytes = 0
        block_bytes: dict[int, int] = {}  # By serial number.
        for segment in segments:
            if segment.first_tick not in self._existing.segments:
                nbytes += sum(part.nbytes for part in segment.parts)
            for block in list_blocks(segment):
                if block.serial not in self._existing.blocks:
                    form = block.form
                    is_coded = isinstance(form, Coded)
                    block_bytes[block.serial] = form.nbytes if is_coded else block.slice_count * block.slice_bytes
        return nbytes + sum(block_bytes.values())


def _count_bytes(content: Path | bytes) -> int:
    """Return the size of an attached file, or 0 if it is gone. Reading it later raises the error."""
    if isinstance(content, bytes):
        return len(content)
    try:
        return content.stat().st_size
    except OSError:
        return 0


def _describe_store(state: StoreState) -> dict[str, Any]:
    """Return the layouts, windows and reward dtype of a store as plain values."""
    return {
        "layouts": [list(layout) for layout in state.layouts],
        "windows": [window.to_json() for window in state.windows],
        "reward_dtype": None if state.reward_dtype is None else dtype_to_json(state.reward_dtype),
    }

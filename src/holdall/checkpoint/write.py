"""Writing: a snapshot becomes records, and the records a checkpoint.

In:  a snapshot, and what lies there already.  Out: the manifest, committed.
Invariant: what is held in memory beyond the snapshot's own references is one record at a time. Whatever fails, the
saved names nothing that is not there, and the checkpoints before are as they were.

Rows come first, since the memory goes on writing over them; then the blocks that are still being filled, since they
pin their arenas; then full blocks, oldest first, since they are the next to be evicted.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdall.checkpoint.file_system import CheckpointWriter
from holdall.checkpoint.manifest import BlockEntry, Chunk, Manifest, Ref, SegmentEntry, ShardEntry, shard_folder
from holdall.checkpoint.saved_records import PartialBlock, RecordWriter, SavedRecords, adoptable, compacted, ref_of
from holdall.errors import CheckpointError, DamageError
from holdall.sampling import pack_state
from holdall.schema import Bytes, dtype_name
from holdall.storage import (
    PIECE_BYTES,
    Buffer,
    Codec,
    Coded,
    Coder,
    Extent,
    FrozenRows,
    FrozenStore,
    FullBlock,
    OpenSlices,
    RowChunk,
    SliceBlock,
    is_settled,
    pack_dictionary,
    pack_file,
    pack_logs,
    pack_piece,
    pack_rows,
    pack_slices,
    stored,
)

if TYPE_CHECKING:
    from holdall.checkpoint.save import Checkpoint

_MOST_PIECES = 16
"""Pieces of a block being filled, after which it is written again as one."""
_MOST_SPLIT = 8
"""Full blocks that may stay in the pieces in which they were saved."""
_FILE_PIECE_BYTES = 16 * 2**20

Report = Callable[[str, int, int], None]
"""Gets what is written now, the bytes written so far, and the bytes in all, as far as they are known."""


@dataclass(slots=True)
class Snapshot:
    """All that a checkpoint holds, at the moment of `save`."""

    store: FrozenStore | None  # None once its parts are being written, so that they can be freed one by one
    schema: dict[str, Any]
    capacity_ticks: int
    state: dict[str, Any]  # of sampler and generator, and what else the owner wants back
    attach: Mapping[str, Path | bytes]
    lock: threading.Lock  # of the memory: rows are read under it
    release: Callable[[FrozenRows], None]
    take_again: Callable[[FrozenRows, int, int], RowChunk | None] = lambda _rows, _number, _version: None
    """Returns a chunk of rows that was thought to be saved, in a version; None if it was written over since."""


@dataclass(slots=True)
class ShardsSnapshot:
    """What a checkpoint of a memory over shards holds besides the shards' own checkpoints."""

    schema: dict[str, Any]
    capacity_ticks: int
    state: dict[str, Any]
    attach: Mapping[str, Path | bytes]
    wait: Callable[[], Mapping[int, Checkpoint]]
    """Waits for the saves of all shards that were begun with this one, each to `shard_url`; returns them by number."""


class _Pending(NamedTuple):
    """A full block that may have to be written."""

    number: int  # in the manifest
    full: FullBlock


class SnapshotWriter:
    """One checkpoint that is being written; it may begin before the snapshot is taken."""

    def __init__(self, target: CheckpointWriter, saved: SavedRecords, coder: Coder) -> None:
        self._target = target
        self._owner = self._records = saved
        self._fresh = SavedRecords()
        self._coder = coder
        self._report: Report = lambda _phase, _bytes, _total: None
        self._phase = "blocks"
        self.bytes_written = self._bytes_left = 0  # left: of what the snapshot holds that is new, about
        # What stays for long, and what the next checkpoint replaces, lie in files of their own: a file goes as a whole.
        self._lasting = RecordWriter(target, self._wrote)
        self._pieces = RecordWriter(target, self._wrote)
        self._brief = RecordWriter(target, self._wrote)

    @property
    def _writers(self) -> tuple[RecordWriter, ...]:
        return self._lasting, self._pieces, self._brief

    def knows(self, block: SliceBlock) -> bool:
        """Whether a block was written, now or before."""
        return block in self._records.blocks or block in self._fresh.blocks

    def write_ahead(self, blocks: Iterable[FullBlock]) -> None:
        """Write blocks that are full, for a snapshot to come."""
        try:
            for full in blocks:
                self._write_block(full)
            self._lasting.settle()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Throw away what was written."""
        for writer in self._writers:
            writer.abandon()

    def run(self, snapshot: Snapshot | ShardsSnapshot, number: int, report: Report) -> Manifest:
        """Write everything and commit it."""
        self._report = report
        try:
            self._forget_missing()
            if isinstance(snapshot, ShardsSnapshot):
                manifest = self._write_shards(snapshot, number)
            else:
                manifest = self._write(snapshot, number)
            self._report("commit", self.bytes_written, self.bytes_written)
            self._target.commit(manifest)
        except BaseException:
            self.abandon()
            raise
        self._owner.take_over(self._records)
        self._records = self._owner
        self._records.merge(self._fresh)
        self._records.forget_before(manifest.first_tick)
        self._records.keep_only(manifest.files)  # others may collect what no manifest names
        return manifest

    def _forget_missing(self) -> None:
        """Look what is there: what others removed since it was written is written again."""
        sizes = self._target.reader.file_sizes()
        for writer in self._writers:
            self._fresh.files |= writer.files
        for records in (self._owner, self._fresh):
            records.keep_only(sizes)

    def _write(self, snapshot: Snapshot, number: int) -> Manifest:
        store = snapshot.store
        if store is None:
            raise CheckpointError("a snapshot was saved twice; report this")
        state = {"store": store_words(store), **snapshot.state}
        self._bytes_left = self._new_bytes(store, snapshot.attach)
        snapshot.store = None
        unsettled = self._write_rows(store, snapshot)
        self._records.forget_before(store.first_tick)
        self._records = compacted(self._records, self._target.reader, self._lasting)
        blocks: list[BlockEntry] = []
        segments, pending = self._write_logs(store, blocks)
        store = replace(store, segments=[], filling=[])  # each block is freed once it is written
        self._write_blocks(pending, blocks)
        attached = self._write_files(snapshot.attach)
        state_ref = self._brief.append(pack_state(state))
        for writer in self._writers:
            writer.finish()
            self._fresh.files |= writer.files
        manifest = Manifest(
            number=number,
            commit=secrets.token_hex(16),
            writer_id=self._target.writer_id,
            time=time.time(),
            first_tick=store.first_tick,
            next_tick=store.next_tick,
            capacity_ticks=snapshot.capacity_ticks,
            schema=snapshot.schema,
            files={},
            state=state_ref,
            rows=self._chunks(store, unsettled),
            segments=tuple(segments),
            blocks=tuple(blocks),
            dictionaries=self._records.dictionaries | self._fresh.dictionaries,
            attached=attached,
        )
        known = self._records.files | self._fresh.files
        names = dict.fromkeys(ref.file for ref in manifest.refs)
        return replace(manifest, files={name: known[name] for name in names})

    def _write_shards(self, snapshot: ShardsSnapshot, number: int) -> Manifest:
        """Name the checkpoints of all shards, which are complete by then."""
        self._phase = "shards"
        shards = []
        for shard, saved in sorted(snapshot.wait().items()):
            self._wrote(saved.bytes_written)
            folder = shard_folder(shard)
            commit = self._target.reader.below(folder).manifest(saved.number).commit
            shards.append(ShardEntry(folder, saved.number, commit, saved.transitions, saved.bytes_total))
        attached = self._write_files(snapshot.attach)
        state = self._brief.append(pack_state(snapshot.state))
        self._brief.finish()
        return Manifest(
            number=number,
            commit=secrets.token_hex(16),
            writer_id=self._target.writer_id,
            time=time.time(),
            first_tick=0,
            next_tick=0,
            capacity_ticks=snapshot.capacity_ticks,
            schema=snapshot.schema,
            files=dict(self._brief.files),
            state=state,
            attached=attached,
            shards=tuple(shards),
        )

    def _write_rows(self, store: FrozenStore, snapshot: Snapshot) -> dict[int, Chunk]:
        """Write the rows that are new; return those that will have to be written again."""
        self._phase = "rows"
        rows, wanted = store.rows, set(store.rows.wanted)
        unsettled: dict[int, Chunk] = {}
        try:
            for number in _chunk_numbers(store):
                if number in wanted:
                    with snapshot.lock:
                        chunk = rows.take(number)
                elif number in self._records.rows:
                    continue
                else:
                    chunk = self._row_chunk_again(store, number, snapshot)
                if is_settled(number, rows.chunk_ticks, store.next_tick):
                    key = (store.versions.get(number, 0), tuple(chunk.columns))
                    ref = self._lasting.append(pack_rows(chunk))
                    self._fresh.rows[number] = (key, Chunk(chunk.first_tick, chunk.ticks, ref))
                else:
                    ref = self._brief.append(pack_rows(chunk))
                    unsettled[number] = Chunk(chunk.first_tick, chunk.ticks, ref)
        finally:
            with snapshot.lock:
                snapshot.release(rows)
        return unsettled

    def _row_chunk_again(self, store: FrozenStore, number: int, snapshot: Snapshot) -> RowChunk:
        """Return rows that were saved, and are gone from the store: they stand in the memory, most likely."""
        with snapshot.lock:
            chunk = snapshot.take_again(store.rows, number, store.versions.get(number, 0))
        if chunk is None:
            raise CheckpointError(
                f"{self._target.url} lost files of earlier checkpoints, and what they held was overwritten since then; "
                "save again: everything is written then"
            )
        return chunk

    def _chunks(self, store: FrozenStore, unsettled: dict[int, Chunk]) -> tuple[Chunk, ...]:
        """Name the chunks of all rows, written now or before."""
        known = self._records.rows | self._fresh.rows
        return tuple(unsettled[n] if n in unsettled else known[n][1] for n in _chunk_numbers(store))

    def _new_bytes(self, store: FrozenStore, attach: Mapping[str, Path | bytes]) -> int:
        """Return the bytes that are about to be written, without heads, logs and sampler."""
        nbytes = sum(len(each) if isinstance(each, bytes) else each.stat().st_size for each in attach.values())
        nbytes += store.rows.wanted_bytes
        blocks = {id(part.block): part.block for segment in store.segments for part in segment.parts}
        for filling in store.filling:
            nbytes += filling.slices.nbytes
            blocks.pop(id(filling.block), None)
        for block in blocks.values():
            raw, sealed = block.used * block.slice_bytes, block.sealed
            nbytes += 0 if self.knows(block) else raw if sealed is None else sealed.nbytes
        return nbytes

    def _write_logs(self, store: FrozenStore, blocks: list[BlockEntry]) -> tuple[list[SegmentEntry], deque[_Pending]]:
        """Write logs, and the blocks that are still being filled; return the blocks that are full, oldest first."""
        self._phase = "logs"
        filling = {id(each.block): each for each in store.filling}
        numbers: dict[int, int] = {}
        pending: deque[_Pending] = deque()
        entries = []
        for segment in store.segments:
            for part in segment.parts:
                block = part.block
                if id(block) in numbers:
                    continue
                numbers[id(block)] = len(blocks)
                if id(block) in filling:
                    blocks.append(self._write_filling(filling[id(block)]))
                else:
                    pending.append(_Pending(len(blocks), FullBlock(block, part.log is None)))
                    blocks.append(BlockEntry(block.slice_bytes, block.used, ()))
            if segment.first_tick == store.open_tick:
                ref = self._brief.append(pack_logs(segment.parts))
            else:
                known = self._records.logs.get(segment.first_tick)
                ref = self._lasting.append(pack_logs(segment.parts)) if known is None else known
                self._fresh.logs[segment.first_tick] = ref
            named = tuple(numbers[id(part.block)] for part in segment.parts)
            entries.append(SegmentEntry(segment.first_tick, segment.ticks, ref, named))
        return entries, pending

    def _write_filling(self, filling: OpenSlices) -> BlockEntry:
        """Write what is new in a block that is still being filled."""
        count = filling.slices.size // filling.slice_bytes
        done = self._records.filling.get(filling.key, PartialBlock())
        if len(done.refs) >= _MOST_PIECES or done.slices > count:
            done = PartialBlock()
        settled = filling.slices[: filling.settled * filling.slice_bytes]
        refs = done.refs + tuple(self._write_pieces(self._pieces, settled, filling.slice_bytes, done.slices))
        self._fresh.filling[filling.key] = PartialBlock(refs, filling.settled)
        rest = self._write_pieces(self._brief, filling.slices, filling.slice_bytes, filling.settled)
        return BlockEntry(filling.slice_bytes, count, refs + tuple(rest))

    @staticmethod
    def _write_pieces(writer: RecordWriter, slices: Bytes, slice_bytes: int, first: int) -> list[Ref]:
        """Write slices from a number on, some at a time."""
        count = slices.size // slice_bytes
        at_once = max(1, PIECE_BYTES // slice_bytes)
        refs = []
        for start in range(first, count, at_once):
            end = min(start + at_once, count)
            refs.append(writer.append(pack_piece(slices[start * slice_bytes : end * slice_bytes], slice_bytes, start)))
        return refs

    def _write_blocks(self, pending: deque[_Pending], blocks: list[BlockEntry]) -> None:
        self._phase = "blocks"
        self._adopt_files(pending)
        while pending:
            number, full = pending.popleft()
            blocks[number] = replace(blocks[number], refs=self._write_block(full))

    def _write_block(self, full: FullBlock) -> tuple[Ref, ...]:
        """Write a full block, unless it is there; say where it is."""
        block, is_direct = full
        refs = self._records.blocks.get(block) or self._fresh.blocks.get(block)
        if refs is None and is_direct:
            slices = block.arena[: block.used * block.slice_bytes]
            refs = tuple(self._write_pieces(self._lasting, slices, block.slice_bytes, 0))
        elif refs is None:
            refs = self._write_rest(block) or (self._lasting.append(self._packed(block)),)
        self._fresh.blocks[block] = refs
        return refs

    def _adopt_files(self, pending: Iterable[_Pending]) -> None:
        """Take over files of this disk in which full blocks lie, most of them spilled."""
        for file, blocks in adoptable(full.block for _, full in pending if not self.knows(full.block)):
            adopted = self._target.adopt(file)
            if adopted is None:
                continue
            name, nbytes = adopted
            self._fresh.files[name] = nbytes
            for block, extent in blocks:
                self._fresh.blocks[block] = (ref_of(extent, name, nbytes),)
                if block.sealed is not None:
                    self._write_dictionary(block.sealed.codec)

    def _write_dictionary(self, codec: Codec) -> None:
        """Write the dictionary of a codec, unless it is there."""
        dictionary = codec.dictionary
        if dictionary is not None:
            name = dictionary.name
            if name not in self._records.dictionaries and name not in self._fresh.dictionaries:
                self._fresh.dictionaries[name] = self._lasting.append(pack_dictionary(dictionary))

    def _write_rest(self, block: SliceBlock) -> tuple[Ref, ...]:
        """Write what is new in a block that was saved while it was filled; nothing if it is better written whole.

        Such a block has to be read whole when it is loaded, so there may be only a few.
        """
        arena, done = block.arena, self._records.filling.get(block)
        if done is None or not arena.size or len(self._records.split) + len(self._fresh.split) >= _MOST_SPLIT:
            return ()
        self._fresh.split.add(block)
        slices = arena[: block.used * block.slice_bytes]
        return done.refs + tuple(self._write_pieces(self._pieces, slices, block.slice_bytes, done.slices))

    def _packed(self, block: SliceBlock) -> list[Buffer]:
        """Return a full block as a record, in the form that it has now."""
        arena, sealed = block.arena, block.sealed  # in this order: once the arena is empty, the sealed form is there
        if sealed is None:
            nbytes = block.used * block.slice_bytes
            offsets = (np.arange(block.used + 1, dtype=np.uint64) * block.slice_bytes).astype(np.uint32)
            coded = Coded(stored(block.slice_bytes), block.used, offsets, np.empty(0, np.uint8), arena[:nbytes])
        else:
            coded = sealed.coded
        extent = coded.data
        if isinstance(extent, Extent):
            data = np.frombuffer(extent.read(0, extent.nbytes), np.uint8)
            coded = replace(coded, data=data)
            checks = self._coder.checksums(data, coded.offsets)
            if not np.array_equal(checks, extent.checks):
                raise DamageError(f"{extent.file.path} was damaged since it was written, so the memory cannot be saved")
        else:
            checks = self._coder.checksums(extent, coded.offsets)
        self._write_dictionary(coded.codec)
        return pack_slices(coded, checks)

    def _write_files(self, attach: Mapping[str, Path | bytes]) -> dict[str, tuple[Ref, ...]]:
        self._phase = "files"
        return {name: tuple(self._write_file(content)) for name, content in attach.items()}

    def _write_file(self, content: Path | bytes) -> list[Ref]:
        if isinstance(content, bytes):
            starts = range(0, max(len(content), 1), _FILE_PIECE_BYTES)
            return [self._brief.append(pack_file(content[start : start + _FILE_PIECE_BYTES])) for start in starts]
        refs: list[Ref] = []
        with content.open("rb") as file:
            for number in itertools.count():
                piece = file.read(_FILE_PIECE_BYTES)
                if not piece and number:
                    return refs
                refs.append(self._brief.append(pack_file(piece)))
        return refs

    def _wrote(self, nbytes: int) -> None:
        self.bytes_written += nbytes
        self._bytes_left = max(0, self._bytes_left - nbytes)
        self._report(self._phase, self.bytes_written, self.bytes_written + self._bytes_left)


def _chunk_numbers(store: FrozenStore) -> range:
    ticks = store.rows.chunk_ticks
    return range(store.first_tick // ticks, -(-store.next_tick // ticks))


def store_words(frozen: FrozenStore) -> dict[str, Any]:
    """Describe what of a store is neither rows nor segments."""
    return {
        "large": frozen.large,
        "paired": frozen.paired,
        "newest": {str(i): rows for i, rows in frozen.newest.items()},
        "scouts": frozen.scouts,
        "windows": [window.words() for window in frozen.windows],
        "searches": frozen.searches if frozen.large else None,
        "reward_dtype": None if frozen.reward_dtype is None else dtype_name(frozen.reward_dtype),
        "has_invalid": frozen.has_invalid,
    }

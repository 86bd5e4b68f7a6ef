"""Writing: a snapshot becomes records, and the records a checkpoint.

In:  a snapshot, and what lies there already.  Out: the manifest, committed.
Invariant: what is held in memory beyond the snapshot's own references is one record at a time. `SavedRecords` names
only what lies in files that are complete. Whatever fails, the checkpoints before are as they were.

Rows come first, since the memory goes on writing over them; then the blocks that are still being filled, since they
pin their arenas; then full blocks, oldest first, since they are the next to be evicted.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from holdall.checkpoint.attached import file_pieces, pack_file
from holdall.checkpoint.files import CheckpointWriter, NewFile, adopt, compact
from holdall.checkpoint.manifest import BlockEntry, Chunk, Manifest, Ref, SegmentEntry
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
    FrozenStore,
    FullBlock,
    OpenSlices,
    RowChunk,
    SliceBlock,
    chunk_numbers,
    is_settled,
    pack_dictionary,
    pack_logs,
    pack_piece,
    pack_rows,
    pack_slices,
    stored,
)

if TYPE_CHECKING:
    from holdall.checkpoint.save import Snapshot
    from holdall.checkpoint.streams import ShardsSnapshot

_MOST_PIECES = 16
"""Pieces of a block being filled, after which it is written again as one."""
_MOST_SPLIT = 8
"""Full blocks that may stay in the pieces in which they were saved."""
MOST_FILES = 192
"""Files that a checkpoint may name; beyond that, records of the smallest are copied to one."""
FILE_BYTES = 64 * 2**20
_FILES = 64
"""A file takes FILE_BYTES, or this share of what was written if that is more, so that a reader can open them all."""

_K = TypeVar("_K")
_V = TypeVar("_V")
Report = Callable[[str, int, int], None]
"""Gets what is written now, the bytes written so far, and the bytes in all, as far as they are known."""


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


class PartialBlock(NamedTuple):
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

    def merge(self, fresh: SavedRecords) -> None:
        """Take over what was written since, now that its files are finished."""
        # New dicts: the training thread may be looking at the old ones.
        self.files = self.files | fresh.files
        self.rows = self.rows | fresh.rows
        self.logs = self.logs | fresh.logs
        self.dictionaries = self.dictionaries | fresh.dictionaries
        self.blocks.update(fresh.blocks)
        self.filling = fresh.filling
        self.split.update(fresh.split)

    def forget_before(self, tick: int) -> None:
        """Forget what ended before a tick; blocks are forgotten with the memory's own."""
        self.rows = {n: entry for n, entry in self.rows.items() if entry[1].first_tick + entry[1].ticks > tick}
        for first, following in itertools.pairwise(sorted(self.logs)):
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


class SnapshotWriter:
    """One checkpoint that is being written; it may begin before the snapshot is taken."""

    def __init__(self, target: CheckpointWriter, saved: SavedRecords, coder: Coder) -> None:
        self.target = target
        self._records = saved
        self._fresh = SavedRecords()  # what is written now; it goes before what was
        self._coder = coder
        self._report: Report = lambda _phase, _bytes, _total: None
        self.phase = "blocks"
        self.bytes_written = self._bytes_left = 0  # left: of what the snapshot holds that is new, about
        # What stays for long, and what the next checkpoint replaces, lie in files of their own: a file goes as a whole.
        self._writers = tuple(RecordWriter(target, self.wrote) for _ in range(3))
        self._lasting, self._pieces, self._brief = self._writers

    def knows(self, block: SliceBlock) -> bool:
        """Whether a block was written, now or before."""
        return _known(block, self._fresh.blocks, self._records.blocks) is not None

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
            manifest = self._finished(snapshot, number, *snapshot.write(self))
            self._report("commit", self.bytes_written, self.bytes_written)
            self.target.commit(manifest)
        except BaseException:
            self.abandon()
            raise
        self._records.merge(self._fresh)
        self._records.forget_before(manifest.first_tick)
        self._records.keep_only(manifest.files)  # others may collect what no manifest names
        return manifest

    def _forget_missing(self) -> None:
        """Look what is there: what others removed since it was written is written again."""
        sizes = self.target.reader.file_sizes()
        for writer in self._writers:
            self._fresh.files |= writer.files
        for records in (self._records, self._fresh):
            records.keep_only(sizes)

    def write_store(self, snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write what a memory holds; return its state, and what the manifest says of the rest."""
        store = snapshot.store
        if store is None:
            raise CheckpointError("a snapshot was saved twice; report this")
        state = {"store": store_words(store), **snapshot.state}
        self._bytes_left = self._new_bytes(store, snapshot.attach)
        snapshot.store = None
        unsettled = self._write_rows(store, snapshot)
        self._records.forget_before(store.first_tick)
        if len({ref.file for ref in self._records.refs()}) > MOST_FILES:
            compact(self._records, self._fresh, self.target.reader, self._lasting)
        blocks: list[BlockEntry] = []
        segments, pending = self._write_logs(store, blocks)
        store = replace(store, segments=[], filling=[])  # each block is freed once it is written
        self._write_blocks(pending, blocks)
        known = self._records.rows | self._fresh.rows
        rows = tuple(unsettled[n] if n in unsettled else known[n][1] for n in _chunk_numbers(store))
        ticks = {"first_tick": store.first_tick, "next_tick": store.next_tick}
        return state, {**ticks, "rows": rows, "segments": tuple(segments), "blocks": tuple(blocks)}

    def _finished(
        self, snapshot: Snapshot | ShardsSnapshot, number: int, state: dict[str, Any], content: dict[str, Any]
    ) -> Manifest:
        """Write what every checkpoint has, finish all files, and name them."""
        self.phase = "files"
        pieces = {name: file_pieces(given) for name, given in snapshot.attach.items()}
        attached = {name: tuple(self._brief.append(pack_file(piece)) for piece in of) for name, of in pieces.items()}
        state_ref = self._brief.append(pack_state(state))
        for writer in self._writers:
            writer.finish()
            self._fresh.files |= writer.files
        manifest = Manifest(
            number=number,
            commit=secrets.token_hex(16),
            writer_id=self.target.writer_id,
            time=time.time(),
            capacity_ticks=snapshot.capacity_ticks,
            schema=snapshot.schema,
            files={},
            state=state_ref,
            dictionaries=self._records.dictionaries | self._fresh.dictionaries,
            attached=attached,
            **content,
        )
        known = self._records.files | self._fresh.files
        names = dict.fromkeys(ref.file for ref in manifest.refs)
        return replace(manifest, files={name: known[name] for name in names})

    def _write_rows(self, store: FrozenStore, snapshot: Snapshot) -> dict[int, Chunk]:
        """Write the rows that are new; return those that will have to be written again."""
        self.phase = "rows"
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
                    chunk = self._rows_again(store, number, snapshot)
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

    def _rows_again(self, store: FrozenStore, number: int, snapshot: Snapshot) -> RowChunk:
        """Return rows that were saved, and are gone from the store: they stand in the memory, most likely."""
        with snapshot.lock:
            chunk = snapshot.take_again(store.rows, number, store.versions.get(number, 0))
        if chunk is None:
            raise CheckpointError(
                f"{self.target.url} lost files of earlier checkpoints, and what they held was overwritten since then; "
                "save again: everything is written then"
            )
        return chunk

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

    def _write_logs(
        self, store: FrozenStore, blocks: list[BlockEntry]
    ) -> tuple[list[SegmentEntry], deque[tuple[int, FullBlock]]]:
        """Write logs, and the blocks that are still being filled; return the blocks that are full, oldest first."""
        self.phase = "logs"
        filling = {id(each.block): each for each in store.filling}
        numbers: dict[int, int] = {}
        pending: deque[tuple[int, FullBlock]] = deque()
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
                    pending.append((len(blocks), FullBlock(block, part.log is None)))
                    blocks.append(BlockEntry(block.slice_bytes, block.used, ()))
            if segment.first_tick == store.open_tick:
                ref = self._brief.append(pack_logs(segment.parts))
            else:
                known = _known(segment.first_tick, self._fresh.logs, self._records.logs)
                ref = self._fresh.logs[segment.first_tick] = known or self._lasting.append(pack_logs(segment.parts))
            named = tuple(numbers[id(part.block)] for part in segment.parts)
            entries.append(SegmentEntry(segment.first_tick, segment.ticks, ref, named))
        return entries, pending

    def _write_filling(self, filling: OpenSlices) -> BlockEntry:
        """Write what is new in a block that is still being filled."""
        count = filling.slices.size // filling.slice_bytes
        done = _known(filling.key, self._fresh.filling, self._records.filling) or PartialBlock()
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

    def _write_blocks(self, pending: deque[tuple[int, FullBlock]], blocks: list[BlockEntry]) -> None:
        self.phase = "blocks"
        spilled = [full.block for _, full in pending if full.block.extent is not None and not self.knows(full.block)]
        for codec in adopt(spilled, self.target, self._fresh) if spilled else ():
            self._write_dictionary(codec)
        del spilled
        while pending:
            number, full = pending.popleft()
            blocks[number] = replace(blocks[number], refs=self._write_block(full))

    def _write_block(self, full: FullBlock) -> tuple[Ref, ...]:
        """Write a full block, unless it is there; say where it is."""
        block, is_direct = full
        refs = _known(block, self._fresh.blocks, self._records.blocks)
        if refs is None and is_direct:
            slices = block.arena[: block.used * block.slice_bytes]
            refs = tuple(self._write_pieces(self._lasting, slices, block.slice_bytes, 0))
        elif refs is None:
            refs = self._write_rest(block) or (self._lasting.append(self._packed(block)),)
        self._fresh.blocks[block] = refs
        return refs

    def _write_dictionary(self, codec: Codec) -> None:
        """Write the dictionary of a codec, unless it is there."""
        dictionary = codec.dictionary
        if dictionary is not None:
            known = _known(dictionary.name, self._fresh.dictionaries, self._records.dictionaries)
            self._fresh.dictionaries[dictionary.name] = known or self._lasting.append(pack_dictionary(dictionary))

    def _write_rest(self, block: SliceBlock) -> tuple[Ref, ...]:
        """Write what is new in a block that was saved while it was filled; nothing if it is better written whole.

        Such a block has to be read whole when it is loaded, so there may be only a few.
        """
        arena, done = block.arena, _known(block, self._fresh.filling, self._records.filling)
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

    def wrote(self, nbytes: int) -> None:
        """Count what was written, and report it."""
        self.bytes_written += nbytes
        self._bytes_left = max(0, self._bytes_left - nbytes)
        self._report(self.phase, self.bytes_written, self.bytes_written + self._bytes_left)


def _known(key: _K, now: Mapping[_K, _V], before: Mapping[_K, _V]) -> _V | None:
    """Return where something lies, if it was written now or before."""
    found = now.get(key)
    return before.get(key) if found is None else found


def _chunk_numbers(store: FrozenStore) -> range:
    return chunk_numbers(store.first_tick, store.next_tick, store.rows.chunk_ticks)


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

"""Restoring: a checkpoint becomes a memory's content again.

In:  a manifest and the files that it names.  Out: what a store takes over, and rows chunk by chunk.
Invariant: everything is checked before it is used. Full blocks stay where they are and are read when they are sampled
from, slice by slice, each against its own checksum; all the rest is read and checked now.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdall.checkpoint.ledger import Ledger, RecordFiles
from holdall.checkpoint.manifest import (
    BlockEntry,
    CheckpointReader,
    Chunk,
    Manifest,
    Ref,
    SegmentEntry,
)
from holdall.checkpoint.recover import LostTicks, blank_parts, blank_rows
from holdall.errors import CheckpointError, DamageError, HoldallError
from holdall.json_state import dtype_of, schema_of
from holdall.schema import Leaf, Schema
from holdall.storage.blocks import CarriedSlices, Extent, KeptBlock, SegmentFile, reserve
from holdall.storage.codec import Dictionary
from holdall.storage.records import (
    Like,
    Read,
    Record,
    unpack_dictionary,
    unpack_file,
    unpack_logs,
    unpack_piece,
    unpack_rows,
    unpack_slices,
    unpack_state,
    window_of,
)
from holdall.storage.segment import Segment
from holdall.storage.slices import ClosedPart
from holdall.storage.snapshot import RowChunk, StoreContent
from holdall.storage.store import Store

_HEAD_BYTES = 2**11
_MOST_BLOCK_BYTES = 2**34


@dataclass(slots=True)
class Restored:
    """What a memory is made of again."""

    url: str
    manifest: Manifest
    schema: Schema
    content: StoreContent | None  # None: the transitions were added to the memory already
    state: dict[str, Any]
    attached: Attached
    ledger: Ledger | None = None  # None: the next save begins from nothing
    rows: Callable[[Like], Iterator[RowChunk]] = lambda _like: iter(())
    blocks: list[Extent] = field(default_factory=list)  # of full blocks, newest first
    interrupt: Callable[[], None] = lambda: None  # ends all waiting for an object store

    def fill(self, store: Store) -> None:
        """Put the content into a store as it was made."""
        if self.content is None:
            return
        store.thaw(self.content)
        for chunk in self.rows(store.columns_like()):
            store.take_rows(chunk)
        if self.ledger is not None:
            self.ledger.adopt_rows(self.manifest.rows, *store.row_layout, self.manifest.next_tick)


@dataclass(slots=True)
class _LoadedBlocks:
    """Blocks as they are read, each once."""

    shelf: RecordFiles
    manifest: Manifest
    dictionaries: dict[str, Dictionary] = field(default_factory=dict)
    found: dict[int, KeptBlock] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)

    def block(self, number: int) -> KeptBlock:
        """Return a block; full ones stay in their file."""
        if number not in self.found:
            entry = self.manifest.blocks[number]
            record, file = self.shelf.record(entry.refs[0], _index_bytes(entry))
            if record.kind == "piece":
                self.found[number] = self._filled(entry)
            else:
                self.found[number] = self._full(entry, record, file.file, file.read)
        return self.found[number]

    def require_units(self, number: int) -> None:
        """Read a block whole and hold every unit against its sum."""
        block = self.found[number]
        if number not in self.checked and block.sealed is not None and block.extent is not None:
            block.extent.bring()
            for unit in range(len(block.sealed.coded.offsets) - 1):
                block.sealed.coded.unit(unit)
        self.checked.add(number)

    def _filled(self, entry: BlockEntry) -> KeptBlock:
        if entry.slices * entry.slice_bytes > _MOST_BLOCK_BYTES:
            raise DamageError(f"a block claims {entry.slices} slices of {entry.slice_bytes} bytes")
        arena = reserve(entry.slices * entry.slice_bytes)
        done = 0
        for ref in entry.refs:
            record, file = self.shelf.record(ref)
            slices = unpack_piece(record, file.read, entry.slice_bytes, done, entry.slices - done)
            arena[done * entry.slice_bytes :][: slices.size] = slices
            done += slices.size // entry.slice_bytes
        if done != entry.slices:
            raise DamageError(f"a block of {entry.slices} slices has {done}")
        return KeptBlock(entry.slice_bytes, entry.slices, arena)

    def _full(self, entry: BlockEntry, record: Record, file: SegmentFile, read: Read) -> KeptBlock:
        coded = unpack_slices(record, file, self.dictionaries, read)
        if (
            coded.count != entry.slices
            or coded.codec.transform.slice_bytes != entry.slice_bytes
            or len(entry.refs) != 1
        ):
            raise DamageError(f"the block at byte {record.start} of {file.path} is another than the manifest says")
        return KeptBlock(entry.slice_bytes, entry.slices, CarriedSlices(coded))


class Attached(Mapping[str, bytes]):
    """A trainer's own files, as they were saved with the memory; read when they are asked for."""

    def __init__(self, shelf: RecordFiles | None = None, refs: Mapping[str, tuple[Ref, ...]] | None = None) -> None:
        self._shelf = shelf
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


@contextlib.contextmanager
def sensible(what: str) -> Iterator[None]:
    """Turn what goes wrong with words that make no sense into an error that says so."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, HoldallError):
            raise
        raise DamageError(f"{what} makes no sense ({type(error).__name__}: {error})") from error


def restored(
    manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None, losses: LostTicks | None = None
) -> Restored:
    """Read a checkpoint: all but its rows, which follow, and its full blocks, which stay.

    Args:
        reader: Where its files lie.
        capacity_ticks: Ticks that the memory shall hold; None as saved. The oldest are passed over.
        losses: Takes down what is damaged, instead of refusing the checkpoint; blocks are then read whole, to know.
    """
    with sensible(f"checkpoint {manifest.number} of {reader.url}"):
        schema = schema_of(manifest.schema)
        shelf = RecordFiles(reader)
        held = capacity_ticks or manifest.capacity_ticks
        first_tick = max(manifest.first_tick, manifest.next_tick - held)
        _expect(manifest, shelf, first_tick)
        record, file = shelf.record(manifest.state)
        state = unpack_state(record, file.read)
        dictionaries = {}
        for name, ref in manifest.dictionaries.items():
            record, file = shelf.record(ref)
            dictionaries[name] = unpack_dictionary(record, file.file)
        blocks = _LoadedBlocks(shelf, manifest, dictionaries)
        content = _content(manifest, schema, state["store"], blocks, first_tick, losses)
        return Restored(
            url=reader.url,
            manifest=manifest,
            schema=schema,
            content=content,
            state=state,
            attached=Attached(RecordFiles(reader.reopened()), manifest.attached),
            ledger=None if losses is not None else _ledger(manifest, blocks, first_tick),
            rows=lambda like: _rows(manifest, shelf, first_tick, like, losses),
            blocks=_extents(content.segments),
            interrupt=reader.interrupt,
        )


def restored_state(manifest: Manifest, reader: CheckpointReader) -> dict[str, Any]:
    """Read only what was saved besides the transitions."""
    with sensible(f"checkpoint {manifest.number} of {reader.url}"):
        record, file = RecordFiles(reader).record(manifest.state)
        return unpack_state(record, file.read)


def _expect(manifest: Manifest, shelf: RecordFiles, first_tick: int) -> None:
    """Have everything fetched that loading reads."""
    rows = [chunk.ref for chunk in manifest.rows if chunk.first_tick + chunk.ticks > first_tick]
    segments = [entry for entry in manifest.segments if entry.first_tick + entry.ticks > first_tick]
    blocks = [manifest.blocks[number] for number in sorted({n for entry in segments for n in entry.blocks})]
    in_pieces = [ref for block in blocks if len(block.refs) > 1 for ref in block.refs]
    whole = [manifest.state, *manifest.dictionaries.values(), *rows, *(entry.ref for entry in segments), *in_pieces]
    indexes = [(block.refs[0], _index_bytes(block)) for block in blocks if len(block.refs) == 1]
    shelf.expect([*((ref, ref.nbytes) for ref in whole), *indexes])


def _index_bytes(block: BlockEntry) -> int:
    """Return what a block's head and the tables of its units take at most, mostly."""
    return _HEAD_BYTES + 8 * block.slices


def _content(
    manifest: Manifest, schema: Schema, words: Any, blocks: _LoadedBlocks, first_tick: int, losses: LostTicks | None
) -> StoreContent:
    observed = schema.observation.leaves
    large = [int(i) for i in words["large"]]
    if sorted(set(large)) != sorted(large) or not set(large) <= set(range(len(observed))):
        raise DamageError(f"the large fields {large} are not those of {len(observed)} leaves")
    leaves = [observed[i] for i in large]
    segments = _segments(manifest, blocks, leaves, schema.num_envs, first_tick, losses)
    newest = _newest(words["newest"], observed, schema.num_envs)
    paired = [int(i) for i in words["paired"]]
    small = set(range(len(observed))) - set(large)
    if manifest.next_tick and (set(newest) | set(paired) != small or set(newest) & set(paired)):
        raise DamageError("the small fields are not those of the schema")
    return StoreContent(
        first_tick=first_tick,
        next_tick=manifest.next_tick,
        large=large,
        windows=[window_of(window, leaf) for window, leaf in zip(words["windows"], leaves, strict=True)],
        segments=segments,
        searches=words["searches"] or {"scouts": {}, "in_vain": {}, "rest": {}},
        newest=newest,
        paired=paired,
        scouts=dict(words["scouts"]),
        reward_dtype=None if words["reward_dtype"] is None else dtype_of(words["reward_dtype"]),
        has_invalid=bool(words["has_invalid"]) or losses is not None,
    )


def _segments(
    manifest: Manifest, blocks: _LoadedBlocks, leaves: list[Leaf], lanes: int, first_tick: int, losses: LostTicks | None
) -> list[Segment[ClosedPart]]:
    segments = []
    for entry in manifest.segments:
        if entry.first_tick + entry.ticks <= first_tick:
            continue
        try:
            parts = _parts(entry, blocks, lanes, leaves, is_thorough=losses is not None)
        except (DamageError, CheckpointError) as error:
            if losses is None:
                raise
            losses.lose(entry.first_tick, entry.ticks, str(error))
            parts = blank_parts(leaves, lanes)
        segments.append(Segment(entry.first_tick, entry.ticks, parts))
    if leaves and manifest.next_tick:
        ends = segments[-1].first_tick + segments[-1].ticks if segments else -1
        if ends != manifest.next_tick or segments[0].first_tick > first_tick:
            raise DamageError(f"the segments end at tick {ends}, not at {manifest.next_tick}, or begin too late")
    return segments


def _newest(saved: Any, observed: Sequence[Leaf], lanes: int) -> dict[int, Any]:
    newest = {}
    for i, leaf in enumerate(observed):
        rows = saved.get(str(i))
        if rows is not None:
            if rows.shape != (lanes, *leaf.shape) or rows.dtype != leaf.dtype.newbyteorder("<"):
                raise DamageError(f"the newest rows of leaf {i} are of {rows.dtype} and {rows.shape}")
            newest[i] = rows
    return newest


def _parts(
    entry: SegmentEntry, blocks: _LoadedBlocks, lanes: int, leaves: list[Leaf], *, is_thorough: bool
) -> list[ClosedPart]:
    with sensible(f"the segment of tick {entry.first_tick}"):
        record, file = blocks.shelf.record(entry.ref)
        named = [blocks.block(number) for number in entry.blocks]
        if is_thorough:
            for number in entry.blocks:
                blocks.require_units(number)
        return unpack_logs(record, file.read, lanes, leaves, named)


def _rows(
    manifest: Manifest, shelf: RecordFiles, first_tick: int, like: Like, losses: LostTicks | None
) -> Iterator[RowChunk]:
    done = first_tick
    for chunk in manifest.rows:
        if chunk.first_tick + chunk.ticks <= first_tick:
            continue
        if chunk.first_tick > done:
            raise DamageError(f"the rows of ticks {done} to {chunk.first_tick} are missing")
        if losses is None:
            yield _chunk(shelf, chunk, like)
        done = chunk.first_tick + chunk.ticks
    if done != manifest.next_tick:
        raise DamageError(f"the rows end at tick {done}, not at {manifest.next_tick}")
    if losses is not None:
        yield from _rows_left(manifest, shelf, first_tick, like, losses)


def _chunk(shelf: RecordFiles, chunk: Chunk, like: Like) -> RowChunk:
    with sensible(f"the rows of tick {chunk.first_tick}"):
        record, file = shelf.record(chunk.ref)
        saved = {entry[0] for entry in record.head["columns"]}
        present = {name: kind for name, kind in like.items() if name in saved or name != "invalid.0"}
        return unpack_rows(record, file.read, chunk.first_tick, chunk.ticks, present)


def _rows_left(
    manifest: Manifest, shelf: RecordFiles, first_tick: int, like: Like, losses: LostTicks
) -> Iterator[RowChunk]:
    """Read rows; where they are damaged, the ticks are lost, and so is the one before: its next observations."""
    entries = [chunk for chunk in manifest.rows if chunk.first_tick + chunk.ticks > first_tick]
    found: dict[int, RowChunk | None] = {}
    for chunk in entries:  # once to know what is lost, since a chunk may be lost to the one before it
        try:
            _chunk(shelf, chunk, like)
        except (DamageError, CheckpointError) as error:
            losses.lose(chunk.first_tick - 1, chunk.ticks + 1, str(error))
            found[chunk.first_tick] = None
    lanes = int(manifest.schema["num_envs"])
    for chunk in entries:
        is_lost = chunk.first_tick in found
        rows = blank_rows(chunk.first_tick, chunk.ticks, like) if is_lost else _chunk(shelf, chunk, like)
        yield losses.marked(rows, lanes)


def _extents(segments: list[Segment[ClosedPart]]) -> list[Extent]:
    blocks = {id(part.block): part.block for segment in reversed(segments) for part in segment.parts}
    return [extent for block in blocks.values() if (extent := block.extent) is not None]


def _ledger(manifest: Manifest, blocks: _LoadedBlocks, first_tick: int) -> Ledger:
    """Say what the place holds of the memory, so that the next save writes only what is new."""
    ledger = Ledger(files=dict(manifest.files), dictionaries=dict(manifest.dictionaries))
    for number, block in blocks.found.items():
        ledger.blocks[block] = manifest.blocks[number].refs
        if block.sealed is None:
            ledger.split.add(block)
    ledger.logs = {
        entry.first_tick: entry.ref for entry in manifest.segments if entry.first_tick + entry.ticks > first_tick
    }
    return ledger

"""Restoring: a checkpoint becomes a memory's content again.

In:  a manifest and the files that it names.  Out: what a store takes over, and rows chunk by chunk.
Invariant: everything is checked before it is used. Full blocks stay where they are and are read when they are sampled
from, slice by slice, each against its own checksum; all the rest is read and checked now.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from holdall.checkpoint.directory import open_reader
from holdall.checkpoint.file_system import CheckpointReader, disk_errors_explained
from holdall.checkpoint.manifest import BlockEntry, Chunk, Manifest, SegmentEntry, is_lost, require_whole
from holdall.checkpoint.saved_records import Attached, LostTicks, RecordFiles, SavedRecords, blank_parts, blank_rows
from holdall.errors import CheckpointError, DamageError
from holdall.machine import memory_limits
from holdall.sampling import Sampler, Uniform, unpack_state
from holdall.schema import Leaf, Schema, dtype_of, schema_of
from holdall.storage import (
    CarriedSlices,
    ClosedPart,
    Dictionary,
    Extent,
    KeptBlock,
    Like,
    Read,
    Record,
    RowChunk,
    Segment,
    SegmentFile,
    Store,
    StoreContent,
    Window,
    reserve,
    unpack_dictionary,
    unpack_logs,
    unpack_piece,
    unpack_rows,
    unpack_slices,
)
from holdall.units import malformed_refused, require_count, require_flag, require_number

if TYPE_CHECKING:
    from holdall.checkpoint.autosave import BackgroundFetch
    from holdall.checkpoint.streams import LoadedMemory

_LOG = logging.getLogger("holdall")
_HEAD_BYTES, _FREE_BYTES = 2**11, 2**30

_T = TypeVar("_T")
_M = TypeVar("_M", bound="LoadedMemory")


@dataclass(slots=True)
class Restored:
    """What a memory is made of again."""

    url: str
    manifest: Manifest
    schema: Schema
    content: StoreContent | None  # None: the transitions were added to the memory already
    state: dict[str, Any]
    attached: Attached
    saved: SavedRecords | None = None  # None: the next save begins from nothing
    rows: Callable[[Like], Iterator[RowChunk]] = lambda _like: iter(())
    blocks: list[Extent] = field(default_factory=list)  # of full blocks, newest first
    interrupt: Callable[[], None] = lambda: None  # ends all waiting for an object store

    def fill(self, store: Store) -> None:
        """Put the content into a store as it was made."""
        if self.content is None:
            return
        store.thaw(self.content)
        columns = store.columns_like()
        for chunk in self.rows(columns):
            store.take_rows(chunk)
        if self.saved is not None:
            self.saved.adopt_rows(self.manifest.rows, store.chunk_ticks, tuple(columns), self.manifest.next_tick)

    def fetch_the_rest(self) -> BackgroundFetch | None:
        """Begin to fetch the blocks that lie in an object store; None if there are none."""
        if not any(extent.file.is_awaited for extent in self.blocks):
            return None
        from holdall.checkpoint.autosave import BackgroundFetch  # noqa: PLC0415  for object stores only

        return BackgroundFetch(self.blocks, self.interrupt)


@dataclass(slots=True)
class _LoadedBlocks:
    """Blocks as they are read, each once."""

    files: RecordFiles
    manifest: Manifest
    dictionaries: dict[str, Dictionary] = field(default_factory=dict)
    found: dict[int, KeptBlock] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)
    raw_bytes: int = 0  # of blocks that are read whole

    def block(self, number: int) -> KeptBlock:
        """Return a block; full ones stay in their file."""
        if number not in self.found:
            entry = self.manifest.blocks[number]
            record, file = self.files.record(entry.refs[0], _index_bytes(entry))
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
        self.raw_bytes += entry.slices * entry.slice_bytes
        if self.raw_bytes > _FREE_BYTES and self.raw_bytes > min(limit.total_bytes for limit in memory_limits()):
            raise CheckpointError(errno.ENOMEM, f"{self.raw_bytes} bytes of raw slices do not fit; lower capacity")
        arena = reserve(entry.slices * entry.slice_bytes)
        done = 0
        for ref in entry.refs:
            record, file = self.files.record(ref)
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


def restored(
    manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None, losses: LostTicks | None = None
) -> Restored:
    """Read a checkpoint: all but its rows, which follow, and its full blocks, which stay.

    Args:
        capacity_ticks: Ticks that the memory holds; None: as many as before. The oldest are passed over.
        losses: Takes down what is damaged, instead of refusing the checkpoint; blocks are then read whole, to know.
    """
    with malformed_refused(f"checkpoint {manifest.number} of {reader.url}"):
        schema = schema_of(manifest.schema)
        files = RecordFiles(reader)
        held = capacity_ticks or manifest.capacity_ticks
        first_tick = max(manifest.first_tick, manifest.next_tick - held)
        _expect(manifest, files, first_tick)
        record, file = files.record(manifest.state)
        state = unpack_state(record, file.read)
        blocks = _LoadedBlocks(files, manifest, _dictionaries(manifest, files, losses))
        content = _content(manifest, schema, state["store"], blocks, first_tick, losses)
        return Restored(
            url=reader.url,
            manifest=manifest,
            schema=schema,
            content=content,
            state=state,
            attached=Attached(RecordFiles(reader.reopened()), manifest.attached),
            saved=None if losses is not None else _saved(manifest, blocks, first_tick),
            rows=lambda like: _rows(manifest, files, first_tick, like, losses),
            blocks=_extents(content.segments),
            interrupt=reader.interrupt,
        )


def _dictionaries(manifest: Manifest, files: RecordFiles, losses: LostTicks | None) -> dict[str, Dictionary]:
    """Read the dictionaries; blocks that name one that is lost are lost."""
    found = {}
    for name, ref in manifest.dictionaries.items():
        try:
            record, file = files.record(ref)
            found[name] = unpack_dictionary(record, file.file)
        except (DamageError, CheckpointError) as error:
            if losses is None or not is_lost(error):
                raise
    return found


def restored_state(manifest: Manifest, reader: CheckpointReader) -> dict[str, Any]:
    """Read only what was saved besides the transitions."""
    with malformed_refused(f"checkpoint {manifest.number} of {reader.url}"):
        record, file = RecordFiles(reader).record(manifest.state)
        return unpack_state(record, file.read)


def _expect(manifest: Manifest, files: RecordFiles, first_tick: int) -> None:
    """Have everything fetched that loading reads."""
    rows = [chunk.ref for chunk in manifest.rows if chunk.first_tick + chunk.ticks > first_tick]
    segments = [entry for entry in manifest.segments if entry.first_tick + entry.ticks > first_tick]
    blocks = [manifest.blocks[number] for number in sorted({n for entry in segments for n in entry.blocks})]
    in_pieces = [ref for block in blocks if len(block.refs) > 1 for ref in block.refs]
    whole = [manifest.state, *manifest.dictionaries.values(), *rows, *(entry.ref for entry in segments), *in_pieces]
    indexes = [(block.refs[0], _index_bytes(block)) for block in blocks if len(block.refs) == 1]
    files.expect([*((ref, ref.nbytes) for ref in whole), *indexes])


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
        windows=[Window.of_words(window, leaf) for window, leaf in zip(words["windows"], leaves, strict=True)],
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
            if losses is None or not is_lost(error):
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
    with malformed_refused(f"the segment of tick {entry.first_tick}"):
        record, file = blocks.files.record(entry.ref)
        named = [blocks.block(number) for number in entry.blocks]
        if is_thorough:
            for number in entry.blocks:
                blocks.require_units(number)
        return unpack_logs(record, file.read, lanes, leaves, named)


def _rows(
    manifest: Manifest, files: RecordFiles, first_tick: int, like: Like, losses: LostTicks | None
) -> Iterator[RowChunk]:
    done = first_tick
    for chunk in manifest.rows:
        if chunk.first_tick + chunk.ticks <= first_tick:
            continue
        if chunk.first_tick > done:
            raise DamageError(f"the rows of ticks {done} to {chunk.first_tick} are missing")
        if losses is None:
            yield _chunk(files, chunk, like)
        done = chunk.first_tick + chunk.ticks
    if done != manifest.next_tick:
        raise DamageError(f"the rows end at tick {done}, not at {manifest.next_tick}")
    if losses is not None:
        yield from _rows_left(manifest, files, first_tick, like, losses)


def _chunk(files: RecordFiles, chunk: Chunk, like: Like) -> RowChunk:
    with malformed_refused(f"the rows of tick {chunk.first_tick}"):
        record, file = files.record(chunk.ref)
        saved = {entry[0] for entry in record.head["columns"]}
        present = {name: kind for name, kind in like.items() if name in saved or name != "invalid.0"}
        return unpack_rows(record, file.read, chunk.first_tick, chunk.ticks, present)


def _rows_left(
    manifest: Manifest, files: RecordFiles, first_tick: int, like: Like, losses: LostTicks
) -> Iterator[RowChunk]:
    """Read rows; where they are damaged, the ticks are lost, and so is the one before: its next observations."""
    entries = [chunk for chunk in manifest.rows if chunk.first_tick + chunk.ticks > first_tick]
    found: set[int] = set()
    for chunk in entries:  # once to know what is lost, since a chunk may be lost to the one before it
        try:
            _chunk(files, chunk, like)
        except (DamageError, CheckpointError) as error:
            if not is_lost(error):
                raise
            losses.lose(chunk.first_tick - 1, chunk.ticks + 1, str(error))
            found.add(chunk.first_tick)
    for chunk in entries:
        is_blank = chunk.first_tick in found
        rows = blank_rows(chunk.first_tick, chunk.ticks, like) if is_blank else _chunk(files, chunk, like)
        yield losses.marked(rows, int(manifest.schema["num_envs"]))


def _extents(segments: list[Segment[ClosedPart]]) -> list[Extent]:
    blocks = {id(part.block): part.block for segment in reversed(segments) for part in segment.parts}
    return [extent for block in blocks.values() if (extent := block.extent) is not None]


def _saved(manifest: Manifest, blocks: _LoadedBlocks, first_tick: int) -> SavedRecords:
    """Say what lies there of the memory, so that the next save writes only what is new."""
    saved = SavedRecords(files=dict(manifest.files), dictionaries=dict(manifest.dictionaries))
    for number, block in blocks.found.items():
        saved.blocks[block] = manifest.blocks[number].refs
        if block.sealed is None:
            saved.split.add(block)
    saved.logs = {
        entry.first_tick: entry.ref for entry in manifest.segments if entry.first_tick + entry.ticks > first_tick
    }
    return saved


def attached_files(url: str | os.PathLike[str]) -> Attached:
    """Return the files that were saved with the newest memory, without loading it."""
    reader = open_reader(url)
    return newest(reader, lambda manifest: Attached(RecordFiles(reader), manifest.attached))


def newest(reader: CheckpointReader, build: Callable[[Manifest], _T], *, may_miss: bool = False) -> _T:
    """Build something of the newest checkpoint that is whole; those before it are said to be passed over.

    Args:
        build: May refuse a checkpoint as damaged; then the one before it is tried.
        may_miss: Whether to build also of one whose files are not all there.
    """
    with disk_errors_explained(reader.url, "read"):
        reader.require()
        sizes, numbers = reader.file_sizes(), reader.numbers()
    refused: list[str] = []
    first: Exception | None = None
    for number in numbers:
        try:
            manifest = reader.manifest(number)
            if not may_miss:
                require_whole(manifest, reader, sizes)
            built = build(manifest)
        except (DamageError, CheckpointError) as error:
            if not is_lost(error):
                raise
            refused.append(f"checkpoint {number}: {error}")
            first = first or error
            continue
        for reason in refused:
            _LOG.warning("%s: a newer checkpoint is not whole, so %d was loaded (%s)", reader.url, number, reason)
        return built
    why = ": " * bool(refused) + "; ".join(refused)
    raise CheckpointError(f"{reader.url} holds no checkpoint that is whole{why}; check the path") from first


@dataclass(frozen=True)
class Loading(Generic[_M]):
    """How a checkpoint becomes a memory again.

    Args:
        kind: The memory's class.
        settings: Its arguments beside schema and capacity.
        sampler: The one that it draws with from now on; None: the saved one.
        capacity, num_envs: Transitions to hold, and lanes; None: as many as before.
        recover: Whether to load what is left of a damaged checkpoint.
    """

    kind: Callable[..., _M]
    settings: dict[str, Any]
    sampler: Sampler | None = None
    capacity: int | None = None
    num_envs: int | None = None
    recover: bool = False

    def make(self, schema: Schema, ticks: int, *, is_final: bool) -> _M:
        """Make an empty memory of so many ticks; of one that is only read, batches are of NumPy arrays."""
        settings = self.settings if is_final else {"budget": None, "prefer": self.settings["prefer"]}
        return self.kind(schema, None, ticks * schema.num_envs, **settings)

    def load(self, url: str | os.PathLike[str], timeout: float) -> _M:
        """Load a checkpoint; an object store that does not answer for so many seconds is given up."""
        require_number("timeout", timeout, 0)
        if self.num_envs is not None:
            require_count("num_envs", self.num_envs, 1)
        require_flag("recover", self.recover)
        reader = open_reader(url, self.settings["spill_dir"], timeout)
        memory = self._newest(reader)
        reader.wait_on()
        return memory

    def _newest(self, reader: CheckpointReader) -> _M:
        """Load the newest checkpoint that is whole; or of which something is left, if there is such a one."""
        if not self.recover:
            return newest(reader, lambda manifest: self._loaded(manifest, reader))
        try:
            return newest(reader, lambda manifest: self._loaded(manifest, reader, may_be_empty=False), may_miss=True)
        except CheckpointError as error:
            if not is_lost(error):
                raise
        return newest(reader, lambda manifest: self._loaded(manifest, reader), may_miss=True)

    def _loaded(self, manifest: Manifest, reader: CheckpointReader, *, may_be_empty: bool = True) -> _M:
        with malformed_refused(f"checkpoint {manifest.number} of {reader.url}"):
            schema = schema_of(manifest.schema)
        lanes = schema.num_envs if self.num_envs is None else self.num_envs
        if self.capacity is not None:
            require_count("capacity", self.capacity, lanes, " (num_envs: it counts transitions over all lanes)")
        if lanes == schema.num_envs and not manifest.shards:
            memory = self.as_saved(manifest, reader, self.capacity, is_final=True)
        else:
            from holdall.checkpoint.streams import converted  # noqa: PLC0415  for other lanes and shards only

            memory = converted(self, manifest, reader, schema, lanes)
        held = manifest.next_tick - manifest.first_tick + sum(shard.transitions for shard in manifest.shards)
        if may_be_empty or not held or memory.are_valid(np.arange(memory.first_id, memory.next_id)).any():
            return memory
        memory.close()
        raise DamageError(f"nothing is left of checkpoint {manifest.number} of {reader.url}")

    def as_saved(self, manifest: Manifest, reader: CheckpointReader, capacity: int | None, *, is_final: bool) -> _M:
        """Load a memory in the lanes in which it was saved; one that is not final is only read."""
        lost = LostTicks() if self.recover else None
        ticks = None if capacity is None else int(capacity) // int(manifest.schema["num_envs"])
        found = restored(manifest, reader, ticks, lost)
        if not is_final:
            found.saved = None
        memory = self.make(found.schema, ticks or manifest.capacity_ticks, is_final=is_final)
        self.restore_into(memory, found, self.sampler if is_final else Uniform())
        if lost is not None:
            lost.report(reader.url, manifest.number)
        return memory

    def restore_into(self, memory: _M, found: Restored, sampler: Sampler | None) -> None:
        """Have a memory take over what was saved; if that fails, it is closed."""
        try:
            with malformed_refused(f"checkpoint {found.manifest.number} of {found.url}"):
                memory.take_over(found, sampler)
        except BaseException:
            memory.close()
            raise

"""Loading: a checkpoint becomes a memory's content again.

In:  a manifest and the files that it names.  Out: what a store takes over, and rows chunk by chunk.
Invariant: everything is checked before it is used; a record is read only if it is the very one that the manifest names.
Full blocks stay where they are and are read when they are sampled from, slice by slice, each against its own checksum;
all the rest is read and checked now.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from holdall.checkpoint.attached import Attached
from holdall.checkpoint.directory import DirectoryReader, disk_errors_explained
from holdall.checkpoint.manifest import (
    LOAD_S,
    BlockEntry,
    CheckpointReader,
    Chunk,
    Losses,
    Manifest,
    Ref,
    SegmentEntry,
    Waiting,
    require_whole,
)
from holdall.checkpoint.write import SavedRecords
from holdall.errors import ArgumentError, CheckpointError, DamageError
from holdall.machine import memory_limits
from holdall.sampling import Sampler, Uniform, unpack_state
from holdall.schema import (
    Leaf,
    Schema,
    dtype_of,
    malformed_refused,
    require_count,
    require_flag,
    require_number,
    require_path,
    schema_of,
)
from holdall.storage import (
    CarriedSlices,
    ClosedPart,
    Demand,
    Dictionary,
    KeptBlock,
    Like,
    Record,
    RowChunk,
    Segment,
    SegmentFile,
    Store,
    StoreContent,
    Window,
    bring,
    reserve,
    unpack,
    unpack_dictionary,
    unpack_logs,
    unpack_piece,
    unpack_rows,
    unpack_slices,
)

if TYPE_CHECKING:
    from holdall.checkpoint.streams import LoadedMemory

_LOG = logging.getLogger("holdall")
_HEAD_BYTES, _READ_AHEAD_BYTES, _FREE_BYTES = 2**11, 2**15, 2**30

_T = TypeVar("_T")
_M = TypeVar("_M", bound="LoadedMemory")

SCHEMES = ("s3", "gs", "az")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://?(.*)", re.DOTALL)


def is_remote(url: str | os.PathLike[str]) -> bool:
    """Whether a url names a prefix of an object store."""
    found = _URL.fullmatch(os.fspath(url))
    return found is not None and "://" in os.fspath(url) and found[1].lower() in SCHEMES


def normalized_url(url: str | os.PathLike[str]) -> str:
    """Return the canonical form of a path or a URL. Raise ArgumentError for a URL that holdall does not support."""
    text = require_path("url", url)
    found = _URL.fullmatch(text)
    if found is None or (found[1].lower() not in SCHEMES and "://" not in text):
        return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  # links are not followed
    scheme = found[1].lower()
    if scheme not in SCHEMES:
        raise ArgumentError(
            f"url ({text!r}) has the unsupported scheme {found[1]!r}. Pass a directory, or a URL that starts with "
            "s3://, gs:// or az://."
        )
    bucket_and_prefix = found[2].strip("/")
    if "://" not in text:
        raise ArgumentError(
            f"url ({text!r}) has one slash after {found[1]!r}, as pathlib.Path writes it. Pass a str with two slashes: "
            f"'{scheme}://{bucket_and_prefix}'."
        )
    if not bucket_and_prefix:
        container = "container" if scheme == "az" else "bucket"
        raise ArgumentError(f"url ({text!r}) names no {container}. Pass a URL like {scheme}://{container}/run.")
    return f"{scheme}://{bucket_and_prefix}"


def open_reader(
    url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None, timeout: float = LOAD_S
) -> CheckpointReader:
    """Return the checkpoints at a url or path, to be read.

    Args:
        cache_dir: Where what is read of an object store lies meanwhile; None: where temporary files do.
        timeout: An object store that does not answer for so many seconds is given up.
    """
    location = normalized_url(url)
    if is_remote(location):
        from holdall.checkpoint.object_store import ObjectStoreReader  # noqa: PLC0415  not for a local path
        from holdall.checkpoint.objects import Objects  # noqa: PLC0415

        return ObjectStoreReader(Objects(location, Waiting(location, timeout)), cache_dir)
    return DirectoryReader(Path(location))


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
        self._reader = reader
        self._files: dict[str, tuple[SegmentFile, int]] = {}

    def open(self, name: str) -> tuple[SegmentFile, int]:
        """Return a file, and its bytes."""
        found = self._files.get(name)
        if found is None:
            found = self._files[name] = self._reader.open(name)
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

    def state(self, ref: Ref) -> dict[str, Any]:
        """Read what was saved besides the transitions."""
        record, file = self.record(ref)
        return unpack_state(record, file.read)


class Restored:
    """What a memory is made of again: all but its rows, which follow, and its full blocks, which stay.

    Args:
        capacity_ticks: Ticks that the memory holds; None: as many as before. The oldest are passed over.
    """

    keeps_all = True  # see `damage.Salvage`, which may lose ticks

    def __init__(self, manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None = None) -> None:
        self.url, self.manifest, self.files = reader.url, manifest, RecordFiles(reader)
        self.schema = schema_of(manifest.schema)
        held = capacity_ticks or manifest.capacity_ticks
        self.first_tick = first = max(manifest.first_tick, manifest.next_tick - held)
        self.segments = [entry for entry in manifest.segments if entry.first_tick + entry.ticks > first]
        self.chunks = [chunk for chunk in manifest.rows if chunk.first_tick + chunk.ticks > first]
        self.state: dict[str, Any] = {}
        self.attached = Attached(RecordFiles(reader.reopened()), manifest.attached)
        self.content: StoreContent | None = None  # None: it is not read, or is in the memory already
        self.saved: SavedRecords | None = None  # None: the next save begins from nothing
        self.blocks: dict[int, KeptBlock] = {}  # by number in the manifest, each read once
        self._dictionaries: dict[str, Dictionary] = {}
        self._raw_bytes = 0  # of blocks that are read whole
        self.waiting = reader.waiting

    def read(self) -> None:
        """Read state and content, and note what need not be saved again."""
        self._expect()
        self.state = self.files.state(self.manifest.state)
        for name, ref in self.manifest.dictionaries.items():
            self.read_dictionary(name, ref)
        self.content = self._content(self.state["store"])
        self.saved = self._saved() if self.keeps_all else None

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

    def _expect(self) -> None:
        """Have everything fetched that loading reads."""
        manifest = self.manifest
        blocks = [manifest.blocks[number] for number in sorted({n for entry in self.segments for n in entry.blocks})]
        whole = [manifest.state, *manifest.dictionaries.values()]
        whole += [chunk.ref for chunk in self.chunks] + [entry.ref for entry in self.segments]
        whole += [ref for block in blocks if len(block.refs) > 1 for ref in block.refs]
        indexes = [(block.refs[0], _index_bytes(block)) for block in blocks if len(block.refs) == 1]
        self.files.expect([*((ref, ref.nbytes) for ref in whole), *indexes])

    def read_dictionary(self, name: str, ref: Ref) -> None:
        """Read a dictionary that blocks name."""
        record, file = self.files.record(ref)
        self._dictionaries[name] = unpack_dictionary(record, file.file)

    def _content(self, words: Any) -> StoreContent:
        observed, lanes, next_tick = self.schema.observation.leaves, self.schema.num_envs, self.manifest.next_tick
        large, paired = [int(i) for i in words["large"]], [int(i) for i in words["paired"]]
        if sorted(set(large)) != sorted(large) or not set(large) <= set(range(len(observed))):
            raise DamageError(f"the large fields {large} are not those of {len(observed)} leaves")
        leaves = [observed[i] for i in large]
        segments = [Segment(entry.first_tick, entry.ticks, self.parts(entry, leaves)) for entry in self.segments]
        if leaves and next_tick > self.first_tick:
            ends = segments[-1].first_tick + segments[-1].ticks if segments else -1
            if ends != next_tick or segments[0].first_tick > self.first_tick:
                raise DamageError(f"the segments end at tick {ends}, not at {next_tick}, or begin too late")
        newest = {i: rows for i in range(len(observed)) if (rows := words["newest"].get(str(i))) is not None}
        for i, rows in newest.items():
            if rows.shape != (lanes, *observed[i].shape) or rows.dtype != observed[i].dtype.newbyteorder("<"):
                raise DamageError(f"the newest rows of leaf {i} are of {rows.dtype} and {rows.shape}")
        small = set(range(len(observed))) - set(large)
        if next_tick and (set(newest) | set(paired) != small or set(newest) & set(paired)):
            raise DamageError("the small fields are not those of the schema")
        return StoreContent(
            first_tick=self.first_tick,
            next_tick=next_tick,
            large=large,
            windows=[Window.of_words(window, leaf) for window, leaf in zip(words["windows"], leaves, strict=True)],
            segments=segments,
            searches=words["searches"] or {"scouts": {}, "in_vain": {}, "rest": {}},
            newest=newest,
            paired=paired,
            scouts=dict(words["scouts"]),
            reward_dtype=None if words["reward_dtype"] is None else dtype_of(words["reward_dtype"]),
            has_invalid=bool(words["has_invalid"]) or not self.keeps_all,
        )

    def parts(self, entry: SegmentEntry, leaves: list[Leaf]) -> list[ClosedPart]:
        """Read a segment's logs, and what is read now of the blocks that it names."""
        with malformed_refused(f"the segment of tick {entry.first_tick}"):
            record, file = self.files.record(entry.ref)
            named = [self._block(number) for number in entry.blocks]
            return unpack_logs(record, file.read, self.schema.num_envs, leaves, named)

    def _block(self, number: int) -> KeptBlock:
        """Return a block; full ones stay in their file."""
        if number not in self.blocks:
            entry = self.manifest.blocks[number]
            record, file = self.files.record(entry.refs[0], _index_bytes(entry))
            is_filled = record.kind == "piece"
            self.blocks[number] = self._filled(entry) if is_filled else self._full(entry, record, file)
        return self.blocks[number]

    def _filled(self, entry: BlockEntry) -> KeptBlock:
        """Read a block that was written in pieces."""
        self._raw_bytes += entry.slices * entry.slice_bytes
        if self._raw_bytes > _FREE_BYTES and self._raw_bytes > min(limit.total_bytes for limit in memory_limits()):
            raise CheckpointError(errno.ENOMEM, f"{self._raw_bytes} bytes of raw slices do not fit; lower capacity")
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

    def _full(self, entry: BlockEntry, record: Record, ahead: ReadAhead) -> KeptBlock:
        coded = unpack_slices(record, ahead.file, self._dictionaries, ahead.read)
        said = (entry.slices, entry.slice_bytes, 1)
        if said != (coded.count, coded.codec.transform.slice_bytes, len(entry.refs)):
            where = f"the block at byte {record.start} of {ahead.file.path}"
            raise DamageError(f"{where} is another than the manifest says")
        return KeptBlock(entry.slice_bytes, entry.slices, CarriedSlices(coded))

    def rows(self, like: Like) -> Iterator[RowChunk]:
        """Read the rows of all ticks."""
        self.require_rows()
        for chunk in self.chunks:
            yield self.chunk(chunk, like)

    def require_rows(self) -> None:
        """Refuse a checkpoint that does not have the rows of all ticks; chunks follow each other without a gap."""
        first = self.chunks[0].first_tick if self.chunks else self.first_tick
        if first > self.first_tick:
            raise DamageError(f"the rows of ticks {self.first_tick} to {first} are missing")
        end = self.chunks[-1].first_tick + self.chunks[-1].ticks if self.chunks else self.first_tick
        if end != self.manifest.next_tick:
            raise DamageError(f"the rows end at tick {end}, not at {self.manifest.next_tick}")

    def chunk(self, chunk: Chunk, like: Like) -> RowChunk:
        """Read one chunk of rows."""
        with malformed_refused(f"the rows of tick {chunk.first_tick}"):
            record, file = self.files.record(chunk.ref)
            saved = {entry[0] for entry in record.head["columns"]}
            present = {name: kind for name, kind in like.items() if name in saved or name != "invalid.0"}
            return unpack_rows(record, file.read, chunk.first_tick, chunk.ticks, present)

    def _saved(self) -> SavedRecords:
        """Say what lies there of the memory, so that the next save writes only what is new."""
        manifest = self.manifest
        saved = SavedRecords(files=dict(manifest.files), dictionaries=dict(manifest.dictionaries))
        saved.logs = {entry.first_tick: entry.ref for entry in self.segments}
        for number, block in self.blocks.items():
            saved.blocks[block] = manifest.blocks[number].refs
            if block.sealed is None:
                saved.split.add(block)
        return saved


def _index_bytes(block: BlockEntry) -> int:
    """Return what a block's head and the tables of its units take at most, mostly."""
    return _HEAD_BYTES + 8 * block.slices


def restored(
    manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None, kind: type[Restored] = Restored
) -> Restored:
    """Read a checkpoint: all but its rows, which follow, and its full blocks, which stay."""
    with malformed_refused(f"checkpoint {manifest.number} of {reader.url}"):
        found = kind(manifest, reader, capacity_ticks)
        found.read()
        return found


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
    first: OSError | None = None
    for number in numbers:
        with Losses() as lost:
            manifest = reader.manifest(number)
            if not may_miss:
                require_whole(manifest, reader, sizes)
            built = build(manifest)
            for reason in refused:
                _LOG.warning("%s: a newer checkpoint is not whole, so %d was loaded (%s)", reader.url, number, reason)
            return built
        refused.append(f"checkpoint {number}: {lost[0]}")
        first = first or lost[0]
    reasons = "".join(f" Damaged {reason}." for reason in refused)
    if not refused:
        remedy = "Check the path, or save first."
    elif may_miss:
        remedy = "Load a copy of the checkpoint from another place."
    else:
        remedy = "ReplayMemory.load(url, recover=True) loads the transitions that are still readable."
    raise CheckpointError(f"No complete checkpoint found in {reader.url}.{reasons} {remedy}") from first


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
        if reader.waiting is not None:
            reader.waiting.limit_s = math.inf  # what is sampled waits until the store answers, or is given up
        return memory

    def _newest(self, reader: CheckpointReader) -> _M:
        """Load the newest checkpoint that is whole; or of which something is left, if there is such a one."""
        if not self.recover:
            return newest(reader, lambda manifest: self._loaded(manifest, reader))
        with Losses():
            return newest(reader, lambda manifest: self._loaded(manifest, reader, may_be_empty=False), may_miss=True)
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
        kind: type[Restored] = Restored
        if self.recover:
            from holdall.checkpoint.damage import Salvage  # noqa: PLC0415  for damaged checkpoints only

            kind = Salvage
        ticks = None if capacity is None else int(capacity) // int(manifest.schema["num_envs"])
        found = restored(manifest, reader, ticks, kind)
        if not is_final:
            found.saved = None
        memory = self.make(found.schema, ticks or manifest.capacity_ticks, is_final=is_final)
        self.restore_into(memory, found, self.sampler if is_final else Uniform())
        return memory

    def restore_into(self, memory: _M, found: Restored, sampler: Sampler | None) -> None:
        """Have a memory take over what was saved; if that fails, it is closed."""
        try:
            with malformed_refused(f"checkpoint {found.manifest.number} of {found.url}"):
                memory.take_over(found, sampler)
        except BaseException:
            memory.close()
            raise

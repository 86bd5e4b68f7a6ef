"""Load a checkpoint: build a memory from a manifest and the records that it names.

Blocks stay in their files and are read when they are sampled, each unit with its own checksum. Everything else is read
and checked while loading. If a checkpoint is not complete, a warning is logged and the one before it is loaded.

Guarantee: a record is used only if it is the one that the manifest names. Nothing that is loaded runs code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from holdall._native import Block, Coded, Dictionary, Segment
from holdall.checkpoint.attached import Attached
from holdall.checkpoint.data_file import DataFile, Demand, allow_open_files, fetch_ranges
from holdall.checkpoint.fetch import BackgroundFetch, fetch_all, fetch_on_demand, start_fetch
from holdall.checkpoint.manifest import Manifest, Ref, SegmentEntry
from holdall.checkpoint.reader import LOAD_S, CheckpointReader, Loss, open_reader, require_whole, try_read
from holdall.checkpoint.save import SavedBlock, SavedRecords, SavedSegment
from holdall.checks import refuse_malformed, require_count, require_flag, require_number
from holdall.errors import BlobMissingError, CheckpointError, DamageError
from holdall.sampling import Sampler, Uniform
from holdall.schema import Schema
from holdall.schema_json import dtype_from_json, schema_from_json
from holdall.store.columns import Columns
from holdall.store.format import (
    FilePlace,
    StoredParts,
    build_segment,
    read_block,
    read_dictionary,
    read_parts,
)
from holdall.store.layouts import Layout, RowLayout
from holdall.store.records import Record, read_record
from holdall.store.snapshot import StoreState
from holdall.store.states import read_state
from holdall.store.store import Store
from holdall.store.windows import Window

if TYPE_CHECKING:
    from holdall.checkpoint.streams import LoadedMemory

_READ_AHEAD_BYTES = 2**15
_MAX_RESTARTS = 20
"""Attempts to load. Loading starts again if a memory that saves removed the checkpoint while it was read."""

_LOG = logging.getLogger("holdall")

_T = TypeVar("_T")
_M = TypeVar("_M", bound="LoadedMemory")


# ---------------------------------------------------------------- records of a checkpoint


class ReadAhead:
    """The first bytes of a record, read at once. They mostly contain the head and the small arrays."""

    def __init__(self, file: DataFile, start: int, nbytes: int) -> None:
        self.file = file
        self._start = start
        self._content = file.read(start, nbytes)

    def read(self, start: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from position `start` of the file. The result is shorter at the end of the file."""
        first = start - self._start
        if first >= 0 and first + nbytes <= len(self._content):
            return self._content[first : first + nbytes]
        return self.file.read(start, nbytes)


class RecordFiles:
    """The data files of a checkpoint, opened when they are first needed."""

    def __init__(self, reader: CheckpointReader, sizes: Mapping[str, int]) -> None:
        self._reader = reader
        self._sizes = sizes  # Bytes of the files by name, as the manifest says.
        self._files: dict[str, DataFile] = {}

    def open(self, name: str) -> DataFile:
        """Return a file, which is opened by the first call."""
        if name not in self._files:
            self._files[name] = self._reader.open(name, self._sizes[name])
        return self._files[name]

    def fetch(self, records: Iterable[tuple[Ref, int]]) -> None:
        """Fetch the first bytes of several records at once, so that reading them does not wait for one after another.

        `records` has each record with the number of bytes to fetch. A file that cannot be opened is skipped, because
        reading its records raises the error.
        """
        ranges: dict[str, list[tuple[int, int]]] = {}
        for ref, nbytes in records:
            ranges.setdefault(ref.file, []).append((ref.start, ref.start + min(ref.nbytes, nbytes)))
        demands = []
        for name, file_ranges in ranges.items():
            with contextlib.suppress(DamageError, CheckpointError):
                starts, ends = np.array(file_ranges, np.int64).T
                demands.append(Demand(self.open(name), starts, ends))
        fetch_ranges(demands)

    def read_record(self, ref: Ref, ahead_bytes: int = _READ_AHEAD_BYTES) -> tuple[Record, ReadAhead]:
        """Read the head of a record. Raise DamageError if it is not the record that the manifest names.

        `ahead_bytes` is the number of bytes that are read at once, because the caller needs that much of the record.
        """
        file = self.open(ref.file)
        ahead = ReadAhead(file, ref.start, min(ref.nbytes, ahead_bytes))
        record = read_record(ahead.read, ref.start, self._sizes[ref.file], str(file.path))
        head = ahead.read(ref.start, record.head_bytes)
        if record.nbytes != ref.nbytes or hashlib.sha256(head).hexdigest()[:32] != ref.digest:
            raise DamageError(f"The record at byte {ref.start} of {file.path} is not the one that the manifest names.")
        return record, ahead

    def read_state(self, ref: Ref) -> dict[str, Any]:
        """Read the state of the sampler and the generator, and further values that the memory saved."""
        record, ahead = self.read_record(ref)
        return read_state(record, ahead.read)

    def read_dictionary(self, name: str, ref: Ref) -> Dictionary:
        """Read a dictionary. Raise DamageError if its content is not that of `name`."""
        record, ahead = self.read_record(ref, ref.nbytes)
        found, dictionary = read_dictionary(record, ahead.read)
        if found != name:
            raise DamageError(
                f"The dictionary at byte {ref.start} of {ref.file} is not the one that the manifest names."
            )
        return dictionary


# ---------------------------------------------------------------- the content of a checkpoint


class Restored:
    """The content of a checkpoint, for a new memory.

    Args:
        capacity_ticks: Ticks that the new memory can hold. None: the saved capacity. Segments that do not fit are not
            read.

    Attributes:
        url: Place of the checkpoint.
        state: State of sampler and generator, and further values that the memory saved.
        attached: Attached files.
        keeps_ids: Whether transitions have the ids that they had when they were saved.
        saved: Records that the next save to the same place need not write. None: the next save writes everything.
        fetch: Background download from an object store, or None.
    """

    def __init__(self, manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None = None) -> None:
        self.url = reader.url
        self.manifest = manifest
        self.schema = schema_from_json(manifest.schema)
        self.columns = Columns(self.schema)
        self.files = RecordFiles(reader, manifest.files)
        self.first_tick = max(manifest.first_tick, manifest.next_tick - (capacity_ticks or manifest.capacity_ticks))
        self.entries = [entry for entry in manifest.segments if entry.first_tick + entry.ticks > self.first_tick]
        self.state: dict[str, Any] = {}
        self.attached = Attached(RecordFiles(reader.reopen(LOAD_S), manifest.files), manifest.attached)
        self.keeps_ids = True
        self.saved: SavedRecords | None = None
        self.fetch: BackgroundFetch | None = None
        self.dictionaries: dict[str, Dictionary] = {}
        self.blocks: dict[int, Block] = {}  # By number in the manifest.
        self.reward_dtype: np.dtype[Any] | None = None
        self._store_state: StoreState | None = None  # None before `read`, and after a store took it.
        self._waiting = reader.waiting

    def read(self) -> None:
        """Read everything but the units of blocks."""
        allow_open_files(len(self.manifest.files))
        self._fetch_records()
        self.state = self.files.read_state(self.manifest.state)
        description = self.state.pop("store")
        reward_dtype = description["reward_dtype"]
        self.reward_dtype = None if reward_dtype is None else dtype_from_json(reward_dtype)
        for name, ref in self.manifest.dictionaries.items():
            self.read_dictionary(name, ref)
        self._require_all_ticks()
        self.open_attached()
        segments = [self.read_segment(entry) for entry in self.entries]
        windows, layouts = self._read_layouts(description)
        self._store_state = StoreState(
            first_tick=self.first_tick,
            next_tick=self.manifest.next_tick,
            segments=tuple(segments),
            layouts=layouts,
            windows=windows,
            reward_dtype=self.reward_dtype,
        )
        self.saved = self._list_saved(segments)

    def fill_on_demand(self, store: Store) -> None:
        """Put the content into an empty store that is only read. Remote blocks are fetched when they are read."""
        state = self._take_state()
        if state is None:
            return
        store.restore(state)
        store.before_read = fetch_on_demand(state.segments)

    def fill(self, store: Any) -> None:
        """Put the content into an empty store."""
        state = self._take_state()
        if state is None:
            return
        if not isinstance(store, Store):
            fetch_all(state.segments)  # A store on a device copies everything now.
        store.restore(state)
        # After a snapshot, `rewrite` changes a copy of a part. So the parts in `saved` stay as they were saved.
        store.snapshot()
        self.fetch = start_fetch(state.segments, store, self._waiting)

    def _take_state(self) -> StoreState | None:
        """Return the content, or None after the first call: this object must not keep the content alive."""
        state = self._store_state
        self._store_state = None
        return state

    def open_attached(self) -> None:
        """Open the attached files, which are read when they are requested."""
        self.attached.open()

    def read_dictionary(self, name: str, ref: Ref) -> None:
        """Read a dictionary that blocks refer to."""
        self.dictionaries[name] = self.files.read_dictionary(name, ref)

    def read_segment(self, entry: SegmentEntry) -> Segment:
        """Read the parts of a segment, and the indexes of its blocks."""
        with refuse_malformed(f"The segment of tick {entry.first_tick}"):
            blocks = [self.read_block(number) for number in entry.blocks]
            return build_segment(self._read_parts(entry, blocks), self.columns)

    def read_block(self, number: int) -> Block:
        """Read the index of a block, whose units stay in their file."""
        if number not in self.blocks:
            entry = self.manifest.blocks[number]
            record, ahead = self.files.read_record(entry.ref, entry.index_bytes)
            file = ahead.file
            place = FilePlace(file.descriptor, file)
            self.blocks[number] = read_block(record, ahead.read, self.dictionaries, place)
        return self.blocks[number]

    def _read_parts(self, entry: SegmentEntry, blocks: list[Block]) -> StoredParts:
        record, ahead = self.files.read_record(entry.ref, entry.ref.nbytes)
        stored = read_parts(record, ahead.read, self.columns, blocks, self.reward_dtype)
        if (stored.first_tick, stored.ticks, stored.lanes) != (entry.first_tick, entry.ticks, self.schema.num_envs):
            raise DamageError(
                f"The segment of tick {entry.first_tick} has other ticks or lanes than the manifest says."
            )
        return stored

    def _fetch_records(self) -> None:
        """Fetch everything that `read` needs at once."""
        manifest = self.manifest
        numbers = sorted({number for entry in self.entries for number in entry.blocks})
        whole = [manifest.state, *manifest.dictionaries.values()]
        whole += [entry.ref for entry in self.entries]
        indexes = [(manifest.blocks[number].ref, manifest.blocks[number].index_bytes) for number in numbers]
        self.files.fetch([*((ref, ref.nbytes) for ref in whole), *indexes])

    def _require_all_ticks(self) -> None:
        """Raise DamageError unless the segments have all ticks that the manifest promises."""
        next_tick = self.manifest.next_tick
        if self.first_tick > next_tick:
            raise DamageError(f"The first tick ({self.first_tick}) is after the last one ({next_tick}).")
        if self.first_tick == next_tick:
            return
        last = self.entries[-1] if self.entries else None
        if last is None or last.first_tick + last.ticks != next_tick or self.entries[0].first_tick > self.first_tick:
            raise DamageError(f"The segments do not have all ticks from {self.first_tick} to {next_tick - 1}.")

    def _read_layouts(self, description: Any) -> tuple[tuple[Window, ...], tuple[Layout, ...]]:
        leaves = self.schema.observation.leaves
        windows = tuple(Window.from_json(each, leaf) for each, leaf in zip(description["windows"], leaves, strict=True))
        layouts: list[Layout] = []
        for layout, window in zip(description["layouts"], windows, strict=True):
            kind, *_ = layout
            if kind == "sliced":
                layouts.append(window.layout())
            elif kind in ("shared", "paired"):
                layouts.append(RowLayout(kind))
            else:
                raise DamageError(f"Corrupt layout {layout!r}.")
        return windows, tuple(layouts)

    def _list_saved(self, segments: list[Segment]) -> SavedRecords:
        """Return the records of all loaded parts and blocks, for the next save to the same place."""
        manifest = self.manifest
        saved = SavedRecords(files=dict(manifest.files))
        for entry, segment in zip(self.entries, segments, strict=True):
            serials = tuple(part.serial for part in segment.parts)
            saved.segments[entry.first_tick] = SavedSegment(entry.ticks, serials, entry.ref)
        for number, block in self.blocks.items():
            form = block.form
            dictionary = form.codec.dictionary if isinstance(form, Coded) else None
            saved.blocks[block.serial] = SavedBlock(manifest.blocks[number], dictionary)
        return saved


def read_checkpoint(
    manifest: Manifest, reader: CheckpointReader, capacity_ticks: int | None, kind: type[Restored] = Restored
) -> Restored:
    """Read the content of a checkpoint, except for the units of its blocks."""
    with refuse_malformed(f"Checkpoint {manifest.number} of {reader.url}"):
        restored = kind(manifest, reader, capacity_ticks)
        restored.read()
        return restored


def read_saved_state(manifest: Manifest, reader: CheckpointReader) -> dict[str, Any]:
    """Read the state of the sampler and the generator, and further values that the memory saved. No transitions."""
    with refuse_malformed(f"Checkpoint {manifest.number} of {reader.url}"):
        return RecordFiles(reader, manifest.files).read_state(manifest.state)


# ---------------------------------------------------------------- the newest complete checkpoint


def load_newest(reader: CheckpointReader, build: Callable[[Manifest], _T], *, allows_missing_files: bool = False) -> _T:
    """Return `build(manifest)` for the newest complete checkpoint. Log the newer ones that are not complete.

    A memory that saves meanwhile may remove the checkpoint that is being read. Loading then starts again. Raise
    CheckpointError if this happens too often, or if there is no complete checkpoint.

    Args:
        build: Raises DamageError or CheckpointError if it cannot use a checkpoint. Then the checkpoint before it is
            tried.
        allows_missing_files: Whether checkpoints with missing files are passed to `build`, too.
    """
    for _ in range(_MAX_RESTARTS):
        numbers = reader.numbers()
        # After the manifests, because a manifest is created after its files.
        sizes = None if allows_missing_files else reader.file_sizes()
        refused: dict[str, OSError] = {}  # Errors of the newer checkpoints, by their texts.
        for number in numbers:
            built = try_read(partial(_build_numbered, build, reader, number, sizes))
            if not isinstance(built, Loss):
                _log_refused(reader.url, refused, number)
                return built
            if number not in reader.numbers():
                break  # A writer removed the checkpoint, so there is a newer one.
            refused.setdefault(str(built.error), built.error)
        else:
            cause = next(iter(refused.values()), None)
            raise _explain_refused(reader.url, refused, is_recovering=allows_missing_files) from cause
    raise CheckpointError(
        f"Each of {_MAX_RESTARTS} checkpoints in {reader.url} was removed while it was read. Save less often, or pass "
        "a larger keep."
    )


def _build_numbered(
    build: Callable[[Manifest], _T], reader: CheckpointReader, number: int, sizes: dict[str, int] | None
) -> _T:
    """Return `build(manifest)` for one checkpoint.

    Args:
        sizes: Sizes of all files, to check that those of the checkpoint exist. None: files may be missing.
    """
    manifest = reader.manifest(number)
    if sizes is not None:
        require_whole(manifest, reader, sizes)
    return build(manifest)


def _log_refused(url: str, reasons: Iterable[str], number: int) -> None:
    for reason in reasons:
        _LOG.warning("%s: a newer checkpoint is not complete, so checkpoint %d was loaded. %s", url, number, reason)


def _explain_refused(url: str, reasons: Iterable[str], *, is_recovering: bool) -> CheckpointError:
    """Return the error to raise if no checkpoint can be loaded, for `reasons`. No reasons: there is no checkpoint."""
    problems = "".join(f" {reason}" for reason in reasons)
    if not problems:
        remedy = "Check the path, or save first."
    elif is_recovering:
        remedy = "Load a copy of the checkpoint from another place."
    else:
        remedy = "To load the readable part, pass recover=True."
    return CheckpointError(f"No complete checkpoint found in {url}.{problems} {remedy}")


@dataclass(frozen=True)
class Loading(Generic[_M]):
    """The arguments of `ReplayMemory.load`, and the methods that load a memory with them."""

    kind: Callable[..., _M]  # Class of the memory.
    restore: Callable[[_M, Restored, Sampler | None], None]  # Continues a checkpoint in a memory.
    settings: dict[str, Any]  # Keyword arguments of `kind`.
    sampler: Sampler | None = None  # None: the saved sampler.
    capacity: int | None = None  # None: the saved capacity.
    num_envs: int | None = None  # None: the saved number of lanes.
    recover: bool = False

    def load(self, url: str | os.PathLike[str], timeout: float) -> _M:
        """Load the newest complete checkpoint."""
        require_number("timeout", timeout, 0)
        if self.num_envs is not None:
            require_count("num_envs", self.num_envs, 1)
        require_flag("recover", self.recover)
        reader = open_reader(url, self.settings["spill_dir"], timeout)
        memory = load_newest(
            reader, lambda manifest: self.load_manifest(manifest, reader), allows_missing_files=self.recover
        )
        reader.waiting.limit_s = math.inf  # Sampling waits until the store answers or the memory is closed.
        return memory

    def load_manifest(self, manifest: Manifest, reader: CheckpointReader) -> _M:
        """Load the checkpoint of a manifest."""
        with refuse_malformed(f"Checkpoint {manifest.number} of {reader.url}"):
            schema = schema_from_json(manifest.schema)
        lanes = schema.num_envs if self.num_envs is None else self.num_envs
        if self.capacity is not None:
            require_count("capacity", self.capacity, lanes, " (num_envs: it counts transitions over all lanes)")
        if lanes == schema.num_envs and not manifest.shards:
            memory = self.load_as_saved(manifest, reader, self.capacity, is_final=True)
        else:
            from holdall.checkpoint.streams import convert  # noqa: PLC0415  only for other lanes and shards

            memory = convert(self, manifest, reader, schema, lanes)
        if self.recover:
            try:
                _require_recovered(memory, manifest, reader)
            except BaseException:
                memory.close()
                raise
        return memory

    def load_as_saved(
        self, manifest: Manifest, reader: CheckpointReader, capacity: int | None, *, is_final: bool
    ) -> _M:
        """Load a memory with the saved number of lanes.

        `is_final` is False for a source: its transitions are copied into the final memory, and then it is closed.
        """
        kind: type[Restored] = Restored
        if self.recover:
            from holdall.checkpoint.damage import Salvage  # noqa: PLC0415  only for damaged checkpoints

            kind = Salvage
        ticks = None if capacity is None else int(capacity) // int(manifest.schema["num_envs"])
        restored = read_checkpoint(manifest, reader, ticks, kind)
        if not is_final:
            restored.saved = None
        memory = self.make_memory(restored.schema, ticks or manifest.capacity_ticks, is_final=is_final)
        self.fill_memory(memory, restored, self.sampler if is_final else Uniform())
        return memory

    def make_memory(self, schema: Schema, ticks: int, *, is_final: bool) -> _M:
        """Return an empty memory. If `is_final` is False, it compresses everything and has NumPy batches."""
        settings = self.settings
        if not is_final:
            settings = {"budget": None, "prefer": settings["prefer"], "_tuning": settings.get("_tuning")}
        return self.kind(schema, None, ticks * schema.num_envs, **settings)

    def fill_memory(self, memory: _M, restored: Restored, sampler: Sampler | None) -> None:
        """Put the content of a checkpoint into a memory. Close the memory if that fails."""
        try:
            with refuse_malformed(f"Checkpoint {restored.manifest.number} of {restored.url}"):
                self.restore(memory, restored, sampler)
        except BaseException:
            memory.close()
            raise


def _require_recovered(memory: LoadedMemory, manifest: Manifest, reader: CheckpointReader) -> None:
    """Raise an error if no transition was readable, or if a writer removed the checkpoint while it was read."""
    if manifest.number not in reader.numbers():
        raise BlobMissingError(errno.ENOENT, f"Checkpoint {manifest.number} was removed while it was read.")
    if manifest.transitions > 0 and len(memory) == 0:
        raise DamageError("No transition is readable.")

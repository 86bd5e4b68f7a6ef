"""Sources: where checkpoints are looked for, and which of them is the newest that is whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from holdall.checkpoint.directory import DirectoryReader, DirectoryWriter, told
from holdall.checkpoint.ledger import RecordFiles
from holdall.checkpoint.load import Attached, Restored, restored, restored_state, sensible
from holdall.checkpoint.manifest import (
    CheckpointReader,
    CheckpointWriter,
    Manifest,
    Ref,
    require_files,
    require_whole,
    shard_folder,
    shard_manifest,
)
from holdall.checkpoint.object_store import Objects, ObjectStoreReader, ObjectStoreWriter, is_remote
from holdall.checkpoint.recover import LostTicks
from holdall.checkpoint.streams import Streams, TransitionSource, runs_of, trajectories
from holdall.errors import CheckpointError, DamageError
from holdall.json_state import schema_of
from holdall.sampling.draw import Sampler, Uniform
from holdall.schema import Schema
from holdall.storage.blocks import Coder
from holdall.storage.records import SLICES, Record, numbers
from holdall.units import require_count

_LOG = logging.getLogger("holdall")
_T = TypeVar("_T")


def normalized_url(url: str | os.PathLike[str]) -> str:
    """Return what a url or a path names, in one way of writing it."""
    if is_remote(url):
        return os.fspath(url).rstrip("/")
    return os.path.abspath(os.path.expanduser(os.fspath(url)))  # noqa: PTH100, PTH111  # links are not followed


def open_reader(url: str | os.PathLike[str], cache_dir: str | os.PathLike[str] | None = None) -> CheckpointReader:
    """Return the checkpoints at a url or path, to be read.

    Args:
        cache_dir: Where what is read of an object store lies meanwhile; None: where temporary files do.
    """
    place = normalized_url(url)
    return ObjectStoreReader(Objects(place), cache_dir) if is_remote(place) else DirectoryReader(Path(place))


def open_writer(url: str | os.PathLike[str]) -> CheckpointWriter:
    """Take hold of a place, to write to it."""
    place = normalized_url(url)
    return ObjectStoreWriter(place) if is_remote(place) else DirectoryWriter(Path(place))


def shard_url(url: str | os.PathLike[str], shard: int) -> str:
    """Return where a shard of a memory saves its own checkpoints."""
    return f"{normalized_url(url)}/{shard_folder(shard)}"


def collect_all(place: CheckpointWriter, keep: int) -> int:
    """Remove all but the last `keep` checkpoints, and those of shards that none of them names; return the bytes."""
    named = {s.folder for number in place.reader.numbers() for s in place.reader.manifest(number).shards}
    freed = place.collect(keep, ())
    for folder in sorted(named):
        below = open_writer(f"{place.url}/{folder}")
        try:
            freed += below.collect(keep, ())
        finally:
            below.close()
    return freed


def attached_files(url: str | os.PathLike[str]) -> Attached:
    """Return the files that were saved with the newest memory, without loading it."""
    reader = open_reader(url)
    return newest(reader, lambda manifest: Attached(RecordFiles(reader), manifest.attached))


def newest(reader: CheckpointReader, build: Callable[[Manifest], _T]) -> _T:
    """Build something of the newest checkpoint that is whole; those before it are said to be passed over.

    Args:
        build: May refuse a checkpoint as damaged; then the one before it is tried.
    """
    with told(reader.url, "read"):
        reader.require()
        sizes, numbers = reader.file_sizes(), reader.numbers()
    refused: list[str] = []
    first: Exception | None = None
    for number in numbers:
        try:
            manifest = reader.manifest(number)
            require_whole(manifest, reader, sizes)
            built = build(manifest)
        except (DamageError, CheckpointError) as error:
            refused.append(f"checkpoint {number}: {error}")
            first = first or error
            continue
        for reason in refused:
            _LOG.warning("%s: a newer checkpoint is not whole, so %d was loaded (%s)", reader.url, number, reason)
        return built
    why = f": {'; '.join(refused)}" if refused else ""
    raise CheckpointError(f"{reader.url} holds no checkpoint that is whole{why}; check the path") from first


@dataclass(frozen=True, slots=True)
class Damage:
    """One record that is not as it was written."""

    file: str
    start: int
    reason: str


def damages(
    reader: CheckpointReader, manifest: Manifest, coder: Coder, read: Callable[[int], None] = lambda _: None
) -> list[Damage]:
    """Read everything that a checkpoint names; `read` is told of every record's bytes."""
    try:
        require_files(manifest, reader.file_sizes())
    except CheckpointError as error:
        return [Damage("", 0, str(error))]
    shelf = RecordFiles(reader)
    found = []
    for ref in dict.fromkeys(manifest.refs):
        try:
            with sensible(f"the record at byte {ref.start} of {ref.file}"):
                _require_whole(shelf, ref, coder)
        except (DamageError, CheckpointError) as error:
            found.append(Damage(ref.file, ref.start, str(error)))
        read(ref.nbytes)
    for shard in manifest.shards:
        below = reader.below(shard.folder)
        try:
            of_shard = damages(below, shard_manifest(below, shard), coder, read)
        except (DamageError, CheckpointError) as error:
            of_shard = [Damage("", 0, str(error))]
        found += [replace(one, file=f"{shard.folder}/{one.file}") for one in of_shard]
    return found


def _require_whole(shelf: RecordFiles, ref: Ref, coder: Coder) -> None:
    record, file = shelf.record(ref)
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


class LoadedMemory(TransitionSource, Protocol):
    """What is made of a checkpoint."""

    @property
    def first_id(self) -> int:
        """Id of the oldest transition held."""

    @property
    def next_id(self) -> int:
        """Id of the next transition."""

    def extend(self, *fields: Any) -> None:
        """Add whole trajectories."""

    def close(self) -> None:
        """Free everything."""


_M = TypeVar("_M", bound=LoadedMemory)


@dataclass(frozen=True)
class Loading(Generic[_M]):
    """How a checkpoint becomes a memory again, in the lanes in which it was saved or in others.

    Args:
        make: Makes an empty memory of a schema that holds so many ticks. The last argument is False for one that is
            only read: batches of it are of NumPy arrays.
        restore: Has such a memory take over what was saved; the sampler is the one that it draws with from now on.
        capacity: Transitions to hold; None: as many as before.
        num_envs: Lanes; None: as many as before.
        recover: Whether to load what is left of a damaged checkpoint.
    """

    make: Callable[[Schema, int, bool], _M]
    restore: Callable[[_M, Restored, Sampler | None], None]
    sampler: Sampler | None = None
    capacity: int | None = None
    num_envs: int | None = None
    recover: bool = False

    def load(self, reader: CheckpointReader) -> _M:
        """Load the newest checkpoint that is whole."""
        return newest(reader, lambda manifest: self._loaded(manifest, reader))

    def _loaded(self, manifest: Manifest, reader: CheckpointReader) -> _M:
        with sensible(f"checkpoint {manifest.number} of {reader.url}"):
            schema = schema_of(manifest.schema)
        lanes = schema.num_envs if self.num_envs is None else self.num_envs
        if self.capacity is not None:
            require_count("capacity", self.capacity, lanes, " (num_envs: it counts transitions over all lanes)")
        if manifest.shards:
            return self._of_shards(manifest, reader, replace(schema, num_envs=lanes))
        if lanes == schema.num_envs:
            return self._of_one(manifest, reader, self.capacity, is_final=True)
        # One lane needs one tick at least, whatever the capacity of the memory that is made of it.
        most = None if self.capacity is None else max(self.capacity, schema.num_envs)
        source = self._of_one(manifest, reader, most, is_final=False)
        streams = Streams.of_lanes(source.first_id, source.next_id, schema.num_envs)
        state = restored_state(manifest, reader)
        return self._of_streams([source], streams, manifest, reader, replace(schema, num_envs=lanes), state)

    def _of_one(self, manifest: Manifest, reader: CheckpointReader, capacity: int | None, *, is_final: bool) -> _M:
        """Load a memory as it was saved."""
        losses = LostTicks() if self.recover else None
        ticks = None if capacity is None else capacity // int(manifest.schema["num_envs"])
        found = restored(manifest, reader, ticks, losses)
        memory = self.make(found.schema, ticks or manifest.capacity_ticks, is_final)
        if not is_final:
            found.ledger = None
        self._restore(memory, found, self.sampler if is_final else Uniform())
        if losses is not None:
            losses.report(reader.url, manifest.number)
        return memory

    def _of_shards(self, manifest: Manifest, reader: CheckpointReader, schema: Schema) -> _M:
        """Put the transitions of all shards into one memory."""
        held = sum(shard.transitions for shard in manifest.shards)
        sources: list[_M] = []
        described = []
        try:
            for shard in manifest.shards:
                below = reader.below(shard.folder)
                saved = shard_manifest(below, shard)
                rows = saved.next_tick - saved.first_tick
                share = None if self.capacity is None else max(1, self.capacity * rows // max(held, 1))
                sources.append(self._of_one(saved, below, share, is_final=False))
                with sensible(f"the state of {below.url}"):
                    runs = runs_of(restored_state(saved, below)["runs"])
                described.append((sources[-1].first_id, sources[-1].next_id, runs))
            streams = Streams.of_shards(described)
        except BaseException:
            for source in sources:
                source.close()
            raise
        return self._of_streams(sources, streams, manifest, reader, schema, restored_state(manifest, reader))

    def _of_streams(
        self,
        sources: Sequence[_M],
        streams: Streams,
        manifest: Manifest,
        reader: CheckpointReader,
        schema: Schema,
        state: dict[str, Any],
    ) -> _M:
        """Add all transitions to a new memory, and free those that held them."""
        saved_lanes, lanes = int(manifest.schema["num_envs"]), schema.num_envs
        fitting = -(-len(streams) // lanes)
        # As many as before: lanes that get less than others must not push out what others got.
        ticks = max(manifest.capacity_ticks * saved_lanes // lanes, fitting, 1)
        memory = self.make(schema, ticks if self.capacity is None else self.capacity // lanes, True)
        try:
            for fields in trajectories(sources, streams, lanes, schema):
                memory.extend(*fields)
        except BaseException:
            memory.close()
            raise
        finally:
            for source in sources:
                source.close()
        attached = Attached(RecordFiles(reader.reopened()), manifest.attached)
        self._restore(memory, Restored(reader.url, manifest, schema, None, state, attached), self.sampler)
        return memory

    def _restore(self, memory: _M, found: Restored, sampler: Sampler | None) -> None:
        try:
            with sensible(f"checkpoint {found.manifest.number} of {found.url}"):
                self.restore(memory, found, sampler)
        except BaseException:
            memory.close()
            raise

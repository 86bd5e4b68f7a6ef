"""Streams: the transitions of a memory, or of all its shards, laid out in any number of lanes.

A memory over shards is saved as

    url/manifests/NUMBER.json     names the checkpoint of every shard: folder, number, commit (`Manifest.shards`)
    url/shards/00003/             the checkpoints of one shard, a place like any other

Every shard saves its store to `shard_url(url, number)` with `keep=None`. Its rows come from several writers, so it adds
the runs of rows that each writer sent to its saved state, as "runs" (see `runs_state`). The learner, which is the
process that draws batches, saves a `ShardsSnapshot` to `url`. The snapshot waits for the checkpoints of the shards. To
load the same number of shards, each shard calls `read_checkpoint(manifest, reader, capacity_ticks)`.

Otherwise all transitions are copied into a new memory. `trajectories` yields the arguments of its `extend`, a few
megabytes at a time.

Guarantee: every transition is added once. If the next transition in a new lane does not follow in time, the transition
before it is marked as truncated, unless it is terminated already.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.checkpoint.load import Loading, Restored, read_saved_state
from holdall.checkpoint.manifest import Manifest, ShardEntry
from holdall.checkpoint.reader import CheckpointReader, read_shard_manifest
from holdall.checkpoint.save import Content, SnapshotWriter
from holdall.checkpoint.savers import Checkpoint
from holdall.checkpoint.urls import normalized_url
from holdall.checks import refuse_malformed
from holdall.errors import DamageError
from holdall.sampling import WriterRun
from holdall.schema import Array, Schema

_MAX_BYTES_AT_ONCE = 4 * 2**20
_MAX_TICKS_AT_ONCE = 1024
_OUTCOME_BYTES = 16

_M = TypeVar("_M", bound="LoadedMemory")

Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]


class TransitionSource(Protocol):
    """Transitions that can be read: a memory whose batches are of NumPy arrays."""

    def gather(self, ids: Any) -> Batch:
        """Return the transitions `ids`, in that order."""

    def are_valid(self, ids: Any) -> NDArray[np.bool_]:
        """Return which ids are transitions."""


class LoadedMemory(TransitionSource, Protocol):
    """A memory that is filled from a checkpoint."""

    @property
    def first_id(self) -> int:
        """Id of the oldest transition held."""

    @property
    def next_id(self) -> int:
        """Id of the next transition."""

    def extend(self, *fields: Any) -> None:
        """Add whole trajectories."""

    def __len__(self) -> int:
        """Return the number of transitions."""

    def close(self) -> None:
        """Free everything."""


def runs_state(runs: Sequence[WriterRun]) -> dict[str, Any]:
    """Return runs of rows as a part of a shard's saved state."""
    writers = sorted({run.writer for run in runs})
    index = {writer: position for position, writer in enumerate(writers)}
    table = [[index[run.writer], run.first_tick, run.lanes, run.first_row, run.rows] for run in runs]
    return {"writers": writers, "runs": np.array(table, np.int64).reshape(-1, 5)}


def runs_of(state: Any) -> list[WriterRun]:
    """Return the runs of a shard's saved state. Raise DamageError unless they follow each other without gaps."""
    table = state["runs"]
    writers = [str(writer) for writer in state["writers"]]
    if not isinstance(table, np.ndarray) or table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 5:
        raise DamageError("The runs of rows of a shard are not a table of five columns.")
    runs = [WriterRun(writers[writer], *rest) for writer, *rest in table.tolist()]
    ends = [run.first_row + run.rows for run in runs]
    starts = [run.first_row for run in runs]
    if ends[:-1] != starts[1:] or any(run.lanes < 1 or run.rows < 1 or run.rows % run.lanes for run in runs):
        raise DamageError("The runs of rows of a shard have gaps, or are not whole ticks.")
    return runs


@dataclass(frozen=True, slots=True)
class Streams:
    """Runs of ids from one or several sources, each in the order of time. All arrays have one entry per run."""

    source: Ids  # Position of the source in the list of sources.
    first_id: Ids  # First id of the run.
    stride: Ids  # Difference between two successive ids.
    count: Ids  # Number of ids.
    continues: Flags  # Whether the next run follows in time.

    @classmethod
    def of_lanes(cls, first_id: int, next_id: int, lanes: int) -> Streams:
        """Return the streams of a memory, lane by lane."""
        one = np.ones(lanes, np.int64)
        first = first_id + np.arange(lanes)
        return cls(0 * one, first, lanes * one, (next_id - first_id) // lanes * one, np.zeros(lanes, np.bool_))

    @classmethod
    def of_shards(cls, shards: Sequence[tuple[int, int, Sequence[WriterRun]]]) -> Streams:
        """Return the streams of shards, writer by writer and lane by lane.

        `shards` has, for each shard, its first row, the row after its last row, and its runs.
        """
        shard_runs: list[_ShardRun] = []
        for source, (first_row, end_row, runs) in enumerate(shards):
            _require_all_rows(runs, first_row, end_row)
            shard_runs += [_ShardRun(run, source, first_row) for run in runs]
        shard_runs.sort(key=lambda each: (each.run.writer, each.run.first_tick, each.source, each.run.first_row))
        return _split_by_lane(shard_runs)

    def __len__(self) -> int:
        return int(self.count.sum())


class _ShardRun(NamedTuple):
    """A run of a shard."""

    run: WriterRun
    source: int  # Position of the shard in the list of sources.
    held_from: int  # First row that the shard still holds. It has evicted the rows before.


def _require_all_rows(runs: Sequence[WriterRun], first_row: int, end_row: int) -> None:
    """Raise DamageError unless runs, which follow each other, have all rows from `first_row` to `end_row` - 1."""
    has_all = first_row == end_row
    if runs:
        last = runs[-1]
        has_all = first_row != end_row and runs[0].first_row <= first_row and last.first_row + last.rows == end_row
    if not has_all:
        raise DamageError(f"The runs of a shard do not have its {end_row - first_row} rows from row {first_row} on.")


def _split_by_lane(shard_runs: list[_ShardRun]) -> Streams:
    """Return the streams of runs, lane by lane. `shard_runs` are in the order of writer and time."""
    runs = [each.run for each in shard_runs]
    # Runs of one writer that follow each other in time have the same number in `chain`.
    chain = np.zeros(len(runs), np.int64)
    for position, (before, run) in enumerate(itertools.pairwise(runs), 1):
        is_same_writer = before.writer == run.writer and before.lanes == run.lanes
        follows = is_same_writer and before.first_tick + before.rows // before.lanes == run.first_tick
        has_ticks = before.first_tick >= 0
        chain[position] = chain[position - 1] + (not (follows and has_ticks))
    lanes = np.array([run.lanes for run in runs], np.int64)
    first_row = np.array([run.first_row for run in runs], np.int64)
    rows = np.array([run.rows for run in runs], np.int64)
    source = np.array([each.source for each in shard_runs], np.int64)
    held_from = np.array([each.held_from for each in shard_runs], np.int64)

    # From here on, arrays have one entry per run and lane. `of_run` is the position of the run in `runs`.
    of_run = np.repeat(np.arange(len(runs)), lanes)
    lane = np.arange(len(of_run)) - np.repeat(np.cumsum(lanes) - lanes, lanes)
    order = np.lexsort((of_run, lane, chain[of_run]))
    of_run = of_run[order]
    lane = lane[order]
    first_id = first_row[of_run] + lane
    stride = lanes[of_run]
    evicted = np.maximum(0, -((first_id - held_from[of_run]) // stride))  # Number of evicted ids.
    count = rows[of_run] // stride - evicted

    held = np.flatnonzero(count > 0)
    of_run = of_run[held]
    lane = lane[held]
    evicted = evicted[held]
    is_next_run = (of_run[1:] == of_run[:-1] + 1) & (lane[1:] == lane[:-1]) & (chain[of_run[1:]] == chain[of_run[:-1]])
    continues = np.zeros(len(held), np.bool_)
    continues[:-1] = is_next_run & (evicted[1:] == 0)
    return Streams(
        source=source[of_run],
        first_id=first_id[held] + evicted * stride[held],
        stride=stride[held],
        count=count[held],
        continues=continues,
    )


class LaneTicks(NamedTuple):
    """Ticks of a new memory. All arrays have the shape (ticks, lanes)."""

    source: Ids  # Position of the source in the list of sources.
    ids: Ids  # Id in the source.
    is_held: Flags  # False after the last id of a lane. `source` and `ids` are then arbitrary.
    is_last: Flags  # Whether the lane ends here, or its next transition does not follow in time.


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """All streams, one after another, cut into `lanes` pieces of the same length: the lanes of a new memory."""

    streams: Streams
    lanes: int

    @property
    def ticks(self) -> int:
        """Number of ticks of the new memory."""
        return -(-len(self.streams) // self.lanes)

    def find_ticks(self, start: int, stop: int) -> LaneTicks:
        """Return ticks `start` to `stop` - 1 of the new memory."""
        streams = self.streams
        total = len(streams)
        ends = np.cumsum(streams.count)
        tick = np.arange(start, stop)[:, None]
        wanted = np.arange(self.lanes) * self.ticks + tick
        is_held = wanted < total
        position = np.minimum(wanted, total - 1)
        run = np.searchsorted(ends, position, side="right")
        step = position - (ends[run] - streams.count[run])
        is_last = (step == streams.count[run] - 1) & ~streams.continues[run]
        is_last |= (tick == self.ticks - 1) | (position == total - 1)
        return LaneTicks(streams.source[run], streams.first_id[run] + step * streams.stride[run], is_held, is_last)


def trajectories(
    sources: Sequence[TransitionSource], streams: Streams, lanes: int, schema: Schema, *, marks_ends: bool = True
) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of `extend`, with which a memory of `lanes` lanes gets all transitions of the streams.

    Args:
        sources: Sources of the transitions, in the order of `Streams.source`.
        schema: Schema of the sources. Its `num_envs` is not used.
        marks_ends: Whether a transition is marked as truncated if the next one of its lane does not follow in time.
    """
    layout = LaneLayout(streams, lanes)
    fields = (*schema.observation.leaves, *schema.observation.leaves, *schema.action.leaves, *schema.extras.leaves)
    row_bytes = _OUTCOME_BYTES + sum(leaf.nbytes for leaf in fields)
    ticks_at_once = min(max(1, _MAX_BYTES_AT_ONCE // (lanes * row_bytes)), _MAX_TICKS_AT_ONCE)
    for start in range(0, layout.ticks, ticks_at_once):
        ticks = layout.find_ticks(start, min(start + ticks_at_once, layout.ticks))
        valid = ticks.is_held.copy()
        for number, source in enumerate(sources):
            of_source = ticks.is_held & (ticks.source == number)
            valid[of_source] = source.are_valid(ticks.ids[of_source])
        if not marks_ends:
            ticks.is_last[:] = False
        if valid.any():
            yield _make_extend_arguments(sources, ticks, valid, schema)


def _make_extend_arguments(
    sources: Sequence[TransitionSource], ticks: LaneTicks, valid: Flags, schema: Schema
) -> tuple[Any, ...]:
    trees = (schema.observation, schema.action, schema.observation, schema.extras)
    rows: list[Array] = []
    for number, source in enumerate(sources):
        where = valid & (ticks.source == number)
        if where.any():
            columns = _flatten_batch(source.gather(ticks.ids[where]), schema)
            rows = rows or [np.zeros((*valid.shape, *column.shape[1:]), column.dtype) for column in columns]
            for row, column in zip(rows, columns, strict=True):
                row[where] = column
    reward, terminated, truncated, *leaves = rows
    remaining = iter(leaves)
    obs, action, next_obs, extras = (tree.build([next(remaining) for _ in tree.leaves]) for tree in trees)
    truncated |= ticks.is_last & ~terminated
    return obs, action, reward, next_obs, terminated, truncated, extras, None if valid.all() else valid


def _flatten_batch(batch: Batch, schema: Schema) -> list[Array]:
    """Return all fields of a batch as one flat list."""
    leading = (len(batch),)
    return [
        batch.reward,
        batch.terminated,
        batch.truncated,
        *schema.observation.flatten(batch.obs, leading, "obs"),
        *schema.action.flatten(batch.action, leading, "action"),
        *schema.observation.flatten(batch.next_obs, leading, "next_obs"),
        *schema.extras.flatten(batch.extras, leading, "extras"),
    ]


@dataclass(slots=True)
class ShardsSnapshot:
    """The content of a checkpoint of a memory over shards, without the shards' own checkpoints."""

    schema: dict[str, Any]
    capacity_ticks: int
    state: dict[str, Any]
    wait: Callable[[], Mapping[int, Checkpoint]]
    """Function that waits for the saves of all shards and returns their checkpoints by shard number."""
    attach: Mapping[str, Path | bytes] = field(default_factory=dict)

    def write(self, writer: SnapshotWriter) -> Content:
        """Wait for the checkpoints of all shards, and name them in the manifest."""
        writer.phase = "shards"
        shards = []
        for shard, saved in sorted(self.wait().items()):
            writer.count_written(saved.bytes_written)
            folder = shard_folder(shard)
            commit = writer.reader.open_shard(folder).manifest(saved.number).commit
            shards.append(ShardEntry(folder, saved.number, commit, saved.transitions, saved.bytes_total))
        transitions = sum(shard.transitions for shard in shards)
        fields = {"first_tick": 0, "next_tick": 0, "transitions": transitions, "shards": tuple(shards)}
        return Content(self.state, fields)


def shard_folder(shard: int) -> str:
    """Return the folder of a shard's checkpoints."""
    return f"shards/{shard:05d}"


def shard_url(url: str | os.PathLike[str], shard: int) -> str:
    """Return the place of a shard's checkpoints."""
    return f"{normalized_url(url)}/{shard_folder(shard)}"


def convert(loading: Loading[_M], manifest: Manifest, reader: CheckpointReader, schema: Schema, lanes: int) -> _M:
    """Load a checkpoint of shards, or with another number of lanes: every transition is added to a new memory.

    `schema` is that of the saved memory.
    """
    sources: list[_M] = []
    state = read_saved_state(manifest, reader)
    try:
        if manifest.shards:
            streams = _load_shards(loading, manifest, reader, sources)
        else:
            # Load at least one tick, even if the new memory holds fewer transitions.
            capacity = None if loading.capacity is None else max(int(loading.capacity), schema.num_envs)
            sources.append(loading.load_as_saved(manifest, reader, capacity, is_final=False))
            streams = Streams.of_lanes(sources[0].first_id, sources[0].next_id, schema.num_envs)
        # The default is at least the number of ticks that the streams need, so that adding them evicts nothing.
        ticks = max(manifest.capacity_ticks * schema.num_envs // lanes, -(-len(streams) // lanes), 1)
        if loading.capacity is not None:
            ticks = int(loading.capacity) // lanes
        new_schema = replace(schema, num_envs=lanes)
        memory = loading.make_memory(new_schema, ticks, is_final=True)
        try:
            for fields in trajectories(sources, streams, lanes, new_schema):
                memory.extend(*fields)
        except BaseException:
            memory.close()
            raise
    finally:
        for source in sources:
            source.close()
    restored = Restored(manifest, reader)
    restored.state = state
    restored.keeps_ids = False
    loading.fill_memory(memory, restored, loading.sampler)
    return memory


def _load_shards(loading: Loading[_M], manifest: Manifest, reader: CheckpointReader, sources: list[_M]) -> Streams:
    """Load every shard into a memory of its own, and append the memories to `sources`. Return the streams of all."""
    readers = [reader.open_shard(shard.folder) for shard in manifest.shards]
    manifests = [read_shard_manifest(each, shard) for each, shard in zip(readers, manifest.shards, strict=True)]
    saved_rows = [each.next_tick - each.first_tick for each in manifests]  # The store of a shard has one lane.
    described = []
    for shard_manifest, shard_reader, rows in zip(manifests, readers, saved_rows, strict=True):
        capacity = None
        if loading.capacity is not None:
            capacity = max(1, int(loading.capacity) * rows // max(sum(saved_rows), 1))
        source = loading.load_as_saved(shard_manifest, shard_reader, capacity, is_final=False)
        sources.append(source)
        with refuse_malformed(f"The state of {shard_reader.url}"):
            runs = runs_of(read_saved_state(shard_manifest, shard_reader)["runs"])
        described.append((source.first_id, source.next_id, runs))
    return Streams.of_shards(described)

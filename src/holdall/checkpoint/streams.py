"""Streams: the transitions of a memory, or of all its shards, laid out in any number of lanes.

A memory over shards is saved as

    url/manifests/NUMBER.json     names the checkpoint of every shard: folder, number, commit (`Manifest.shards`)
    url/shards/00003/             the checkpoints of one shard, a place like any other

Every shard saves its store to `shard_url(url, number)` with `keep=None`, and adds `runs_state` of its rows to the saved
state as "runs". The learner saves a `ShardsSnapshot` to `url`, which waits for the checkpoints of the shards.

`trajectories` yields the arguments of `extend` with which a new memory gets all transitions, a few megabytes at a time.

Guarantee: every transition is added once. If the next transition in a new lane does not follow in time, the transition
before it is marked as truncated, unless that one is terminated already.
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

_BYTES_AT_ONCE = 4 * 2**20
_MOST_TICKS_AT_ONCE = 1024
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
    number = {writer: index for index, writer in enumerate(writers)}
    table = [[number[run.writer], run.first_tick, run.lanes, run.first_row, run.rows] for run in runs]
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
    """Runs of ids, each in the order of time. All arrays have one entry per run."""

    source: Ids  # Number of the source.
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

        `shards` has, for each shard, the first row that is held, the row after the last one, and the runs.
        """
        runs: list[WriterRun] = []
        table: list[tuple[int, int]] = []
        for source, (first, end, held) in enumerate(shards):
            covered = not held if first == end else held and held[0].first_row <= first
            if not covered or (held and held[-1].first_row + held[-1].rows != end):
                raise DamageError(f"the runs of a shard are not those of its rows {first} to {end}")
            runs += held
            table += [(source, first)] * len(held)
        order = sorted(range(len(runs)), key=lambda n: (*runs[n][:2], table[n], runs[n].first_row))
        return _by_lane([runs[n] for n in order], np.array([table[n] for n in order], np.int64).reshape(-1, 2))

    def __len__(self) -> int:
        return int(self.count.sum())


def _by_lane(runs: list[WriterRun], held: Ids) -> Streams:
    """Return the streams of runs that are in the order of writer and time, lane by lane.

    `held` has, for each run, its source and the first row that the source still holds.
    """
    chain = np.zeros(len(runs), np.int64)
    for n, (before, run) in enumerate(itertools.pairwise(runs), 1):
        is_same_writer = before.writer == run.writer and before.lanes == run.lanes
        follows = is_same_writer and before.first_tick + before.rows // before.lanes == run.first_tick
        chain[n] = chain[n - 1] + (not follows or before.first_tick < 0)
    lanes = np.array([run.lanes for run in runs])
    which = np.repeat(np.arange(len(runs)), lanes)
    lane = np.arange(len(which)) - np.repeat(np.cumsum(lanes) - lanes, lanes)
    order = np.lexsort((which, lane, chain[which]))
    which = which[order]
    lane = lane[order]
    first = np.array([run.first_row for run in runs])[which] + lane
    stride = lanes[which]
    evicted = np.maximum(0, -((first - held[which, 1]) // stride))  # Number of rows that the source has evicted.
    count = np.array([run.rows for run in runs])[which] // stride - evicted
    kept = np.flatnonzero(count > 0)
    which = which[kept]
    lane = lane[kept]
    evicted = evicted[kept]
    continues = np.zeros(len(kept), np.bool_)
    same = (chain[which][1:] == chain[which][:-1]) & (lane[1:] == lane[:-1]) & (which[1:] == which[:-1] + 1)
    continues[:-1] = same & (evicted[1:] == 0)
    return Streams(
        source=held[which, 0],
        first_id=first[kept] + evicted * stride[kept],
        stride=stride[kept],
        count=count[kept],
        continues=continues,
    )


class LaneTicks(NamedTuple):
    """Ticks of a new memory. All arrays have the shape (ticks, lanes)."""

    source: Ids
    ids: Ids
    is_held: Flags  # False where a lane has no more transitions. The id is then arbitrary.
    is_last: Flags  # Whether the next transition of the lane does not follow in time.


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Streams, one after another, cut into `lanes` pieces of the same length."""

    streams: Streams
    lanes: int

    @property
    def ticks(self) -> int:
        """Number of ticks of the new memory."""
        return -(-len(self.streams) // self.lanes)

    def between(self, start: int, stop: int) -> LaneTicks:
        """Return ticks `start` to `stop` - 1."""
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
        sources: Sources of the transitions. The streams name them by their index.
        schema: Schema of the sources. Its `num_envs` is not used.
        marks_ends: Whether a transition is marked as truncated if the next one of its lane does not follow in time.
    """
    layout = LaneLayout(streams, lanes)
    fields = (*schema.observation.leaves, *schema.observation.leaves, *schema.action.leaves, *schema.extras.leaves)
    row_bytes = _OUTCOME_BYTES + sum(leaf.nbytes for leaf in fields)
    at_once = min(max(1, _BYTES_AT_ONCE // (lanes * row_bytes)), _MOST_TICKS_AT_ONCE)
    for start in range(0, layout.ticks, at_once):
        ticks = layout.between(start, min(start + at_once, layout.ticks))
        valid = ticks.is_held.copy()
        for number, source in enumerate(sources):
            of_source = ticks.is_held & (ticks.source == number)
            valid[of_source] = source.are_valid(ticks.ids[of_source])
        if not marks_ends:
            ticks.is_last[:] = False
        if valid.any():
            yield _extend_arguments(sources, ticks, valid, schema)


def _extend_arguments(
    sources: Sequence[TransitionSource], ticks: LaneTicks, valid: Flags, schema: Schema
) -> tuple[Any, ...]:
    trees = (schema.observation, schema.action, schema.observation, schema.extras)
    rows: list[Array] = []
    for number, source in enumerate(sources):
        where = valid & (ticks.source == number)
        if where.any():
            found = _leaves(source.gather(ticks.ids[where]), schema)
            rows = rows or [np.zeros((*valid.shape, *leaf.shape[1:]), leaf.dtype) for leaf in found]
            for row, leaf in zip(rows, found, strict=True):
                row[where] = leaf
    reward, terminated, truncated, *leaves = rows
    left = iter(leaves)
    obs, action, next_obs, extras = (tree.build([next(left) for _ in tree.leaves]) for tree in trees)
    truncated |= ticks.is_last & ~terminated
    return obs, action, reward, next_obs, terminated, truncated, extras, None if valid.all() else valid


def _leaves(batch: Batch, schema: Schema) -> list[Array]:
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
    """Waits for the saves of all shards to `shard_url`, and returns their checkpoints by shard number."""
    attach: Mapping[str, Path | bytes] = field(default_factory=dict)
    transitions: int = 0  # Without those of shards.

    def write(self, writer: SnapshotWriter) -> Content:
        """Name the checkpoints of all shards, which are complete by then."""
        writer.phase = "shards"
        shards = []
        for shard, saved in sorted(self.wait().items()):
            writer.count_written(saved.bytes_written)
            folder = shard_folder(shard)
            commit = writer.reader.below(folder).manifest(saved.number).commit
            shards.append(ShardEntry(folder, saved.number, commit, saved.transitions, saved.bytes_total))
        return Content(self.state, {"first_tick": 0, "next_tick": 0, "shards": tuple(shards)})


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
            # At least one tick, even if the new memory holds fewer transitions.
            capacity = None if loading.capacity is None else max(int(loading.capacity), schema.num_envs)
            sources.append(loading.load_as_saved(manifest, reader, capacity, is_final=False))
            streams = Streams.of_lanes(sources[0].first_id, sources[0].next_id, schema.num_envs)
        # By default at least as many ticks as the streams need, so that adding them evicts nothing.
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
    """Load every shard into a memory of its own, append it to `sources`, and describe the streams of all."""
    below = [reader.below(shard.folder) for shard in manifest.shards]
    saved = [read_shard_manifest(*each) for each in zip(below, manifest.shards, strict=True)]
    held = [each.next_tick - each.first_tick for each in saved]
    described = []
    for of_shard, each, rows in zip(saved, below, held, strict=True):
        share = None if loading.capacity is None else max(1, int(loading.capacity) * rows // max(sum(held), 1))
        source = loading.load_as_saved(of_shard, each, share, is_final=False)
        sources.append(source)
        with refuse_malformed(f"The state of {each.url}"):
            runs = runs_of(read_saved_state(of_shard, each)["runs"])
        described.append((source.first_id, source.next_id, runs))
    return Streams.of_shards(described)

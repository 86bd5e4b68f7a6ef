"""Segments on their way from writers to shards.

`SegmentBuilder` collects the ticks of some lanes in a native writer and packs them as bytes: a head with the dtype of
rewards, and the segment in the format of store/format.py. `unpack_payload` checks the bytes and returns the segment.
`flatten_lanes` makes one lane of several, because a shard is a store with one lane.

Guarantee: the rows of a flattened segment are the transitions that were added, tick by tick and, within a tick, lane by
lane. Damaged or forged bytes raise DamageError.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall._native import FULL, UNCHECKED, Block, Coded, Part, Reader, Segment, Writer, encode
from holdall.checks import refuse_malformed
from holdall.codec.choice import choose_codec
from holdall.codec.codec import Codec, Method
from holdall.codec.sample import Sample
from holdall.errors import DamageError
from holdall.schema import Array, Leaf, Schema
from holdall.schema_json import dtype_from_json, dtype_to_json
from holdall.store.columns import Columns
from holdall.store.format import (
    NEXT_FOLLOWS,
    ROW_KINDS,
    EncodeBlock,
    encode_block,
    pack_segment,
    unpack_segment,
)
from holdall.store.layout_search import LayoutSearch
from holdall.store.layouts import PAIRED, SHARED, SlicedLayout, find_sliced_layout
from holdall.store.records import pack_record, read_record, reader_of
from holdall.store.step import RawStep, Step, check_step
from holdall.store.tuning import Tuning
from holdall.store.windows import Window

_HEAD = "payload"
"""Kind of the record at the start of a payload."""
_MAX_CURSOR = 2**31
"""Bound of a log's entries, because a cursor has 31 bits for a position and one for a flag."""
_MAX_TICK = 2**40
"""Bound of a writer's ticks. `RowOrder` numbers the steps of a lane up to this."""

# A codec is chosen once there are `_SAMPLE_SLICES` slices, or `_SAMPLE_BYTES` bytes in `_MIN_SAMPLE_SLICES` or more.
_SAMPLE_SLICES = 128
_SAMPLE_BYTES = 4 * 2**20
_MIN_SAMPLE_SLICES = 16
_FIRST_UNIT_BYTES = 2**16
"""Bytes of a unit of the first codec."""
_MAX_FIRST_GROUP = 8
"""Largest number of slices in a unit of the first codec."""
_QUICK_LEVELS = {Method.LZ4: (0,), Method.ZSTANDARD: (1, 3)}
"""Levels that are tried instead of the chosen one, quickest first."""
_QUICK_TOLERANCE = 1.05
"""How much larger than with the chosen level the result of a quick level may be."""


class WriterCodec:
    """Compression of the slices of one field, on the writer's side.

    The first segments are compressed with a default codec. A background thread chooses a better one on their slices. It
    never chooses a dictionary, because every segment must be readable alone.
    """

    def __init__(self, leaf: Leaf, window: Window, prefer: str) -> None:
        self._leaf = leaf
        self._window = window
        self._prefer = prefer
        self._codec: Codec | None = None
        self._sample: list[NDArray[np.uint8]] | None = []  # Slices for the choice. None once the choice has begun.

    def encode(self, block: Block) -> Coded:
        """Compress a raw block."""
        if self._sample is not None:
            self._collect(block)
        codec = self._codec
        if codec is not None:
            coded = encode(block, codec, block.lane_order())
            if coded is not None:  # None: the block has too many different words for the codec's palette.
                return coded
        coded = encode(block, _first_codec(block.slice_bytes), block.lane_order())
        if coded is None:
            raise AssertionError("A codec without a palette represents all slices.")
        return coded

    def _collect(self, block: Block) -> None:
        """Copy slices for the choice. Start the choice once there are enough."""
        sample = self._sample
        if sample is None:
            return
        sample.append(block.read(0, block.slice_count))
        count = sum(len(slices) for slices in sample)
        is_enough = count >= _SAMPLE_SLICES or count * block.slice_bytes >= _SAMPLE_BYTES
        if is_enough and count >= _MIN_SAMPLE_SLICES:
            self._sample = None
            slices = np.concatenate(sample)[: max(_SAMPLE_SLICES, _SAMPLE_BYTES // block.slice_bytes)]
            threading.Thread(target=self._choose, args=(slices,), name="holdall-codec", daemon=True).start()

    def _choose(self, slices: NDArray[np.uint8]) -> None:
        sample = Sample(slices, np.zeros((0, slices.shape[1]), np.uint8), len(slices))
        codec = choose_codec(self._leaf, self._window, sample, self._prefer).codec
        self._codec = _lower_level(replace(codec, dictionary=None), slices)


def _first_codec(slice_bytes: int) -> Codec:
    """Return the codec of a field before one was chosen for it."""
    group = min(max(1, _FIRST_UNIT_BYTES // slice_bytes), _MAX_FIRST_GROUP)
    return Codec(slice_bytes, method=Method.ZSTANDARD, level=1, group=group)


def _lower_level(codec: Codec, slices: NDArray[np.uint8]) -> Codec:
    """Return `codec` with the quickest level that needs hardly more bytes, because `add` waits for compression."""
    chosen = encode(slices, codec)
    if chosen is None:
        return codec
    for level in _QUICK_LEVELS.get(codec.method, ()):
        quick = replace(codec, level=min(codec.level, level))
        coded = encode(slices, quick)
        if coded is not None and coded.nbytes <= _QUICK_TOLERANCE * chosen.nbytes:
            return quick
    return codec


class SegmentBuilder:
    """Builds the segments of some lanes of a writer. Not thread-safe: the writer holds its lock.

    Attributes:
        columns: Numbers of the columns.
        reward_dtype: Dtype of all rewards, which the first one sets. None before it.
    """

    def __init__(self, schema: Schema, max_rows: int, prefer: str, tuning: Tuning) -> None:
        self.columns = Columns(schema)
        self.reward_dtype: np.dtype[Any] | None = None
        self._schema = schema
        self._lanes = schema.num_envs
        self._max_ticks = max(1, max_rows // schema.num_envs)
        self._prefer = prefer
        self._tuning = tuning
        self._reader = Reader()
        # A shard stores all lanes as one. With one lane, the next observation is still in the next row, so rows can
        # share it. With several lanes it is not, so each row stores both observations.
        self._layouts = LayoutSearch(schema, tuning, SHARED if schema.num_envs == 1 else PAIRED)
        self._codecs: dict[tuple[int, SlicedLayout], WriterCodec] = {}  # By observation leaf and layout.
        self._writer = self._new_writer(0)

    def _new_writer(self, first_tick: int) -> Writer:
        """Return an empty native writer. Every segment has its own writer, so that segments share no block."""
        writer = Writer(
            self.columns.list_columns(),
            self.columns.list_groups(),
            self._lanes,
            self._max_ticks,
            self._max_ticks,
            self._tuning.block_bytes,
            self._layouts.list_layouts(self.columns.flags + 1),
            first_tick,
        )
        if self.reward_dtype is not None:
            writer.set_type(self.columns.reward, int(self.reward_dtype.num))
        return writer

    @property
    def ticks(self) -> int:
        """Ticks that were written to the open segment."""
        return self._writer.next_tick - self._writer.first_tick

    @property
    def rows(self) -> int:
        """Rows that were written to the open segment."""
        return self.ticks * self._lanes

    @property
    def has_new_window(self) -> bool:
        """Whether the next segment could share more slices, so that the open one should be closed early."""
        return self._layouts.has_new_window

    @property
    def ends_episodes(self) -> bool:
        """Whether in every lane, the last tick ended an episode or was added with `valid=False`."""
        if self.ticks == 0:
            return False
        next_id = self._writer.next_tick * self._lanes
        ids = np.arange(next_id - self._lanes, next_id)
        (flags,) = self._reader.gather(self._writer.catalog, ids, (self.columns.flags_output,))
        return bool((flags != 0).all())

    def check(self, leading: tuple[int, ...], step: tuple[Any, ...]) -> Step:
        """Return a checked step, or raise ArgumentError. The first step sets the dtype of rewards."""
        checked = check_step(self._schema, leading, self.reward_dtype, RawStep(*step))
        self.set_reward_dtype(checked.reward.dtype)
        return checked

    def set_reward_dtype(self, dtype: np.dtype[Any]) -> None:
        """Set the dtype of all rewards, unless it is set already."""
        if self.reward_dtype is None:
            self._writer.set_type(self.columns.reward, int(dtype.num))
            self.reward_dtype = dtype

    def append(self, step: tuple[Any, ...]) -> bool:
        """Write one tick. Return False, and write nothing, if the segment is full."""
        outcome = self._writer.append(*step)
        if outcome == UNCHECKED:
            step = self.check((self._lanes,), step)
            outcome = self._writer.append(*step)
        if outcome == FULL:
            return False
        if self._layouts.is_searching:
            self._layouts.look(step[0], step[3])
        return True

    def extend(self, steps: Step, first: int) -> int:
        """Write checked steps from number `first` on until the segment is full. Return how many were written.

        While windows are searched for, write only a few steps at a time.
        """
        progress = np.array([first])
        if not self._layouts.is_searching:
            return self._writer.extend(steps, progress)
        count = self._writer.extend(_cut_steps(steps, first + self._tuning.detector_max_pairs), progress)
        for position in range(first, first + count):
            obs = tuple(array[position] for array in steps.obs)
            next_obs = tuple(array[position] for array in steps.next_obs)
            self._layouts.look(obs, next_obs)
        return count

    def close(self) -> bytes:
        """Return the segment as bytes, and start the next one.

        The segment is compressed first. If an interrupt stops that, the segment is still open.
        """
        segment = self._writer.snapshot().segments[-1]
        payload = self._pack(segment)
        self._layouts.adapt(segment)
        self._writer = self._new_writer(self._writer.next_tick)
        return payload

    def _pack(self, segment: Segment) -> bytes:
        if self.reward_dtype is None:
            raise AssertionError("A segment with ticks has rewards.")
        return pack_payload(segment, self.reward_dtype, partial(self._encode, segment))

    def _encode(self, segment: Segment, column: int, block: Block) -> Coded:
        layout = find_sliced_layout(segment.parts[column])
        key = (column, layout)
        if key not in self._codecs:
            leaf = self._schema.observation.leaves[column]
            self._codecs[key] = WriterCodec(leaf, Window.from_layout(leaf, layout), self._prefer)
        return self._codecs[key].encode(block)


def _cut_steps(steps: Step, end: int) -> Step:
    """Return the steps before number `end`."""
    return Step(
        obs=tuple(array[:end] for array in steps.obs),
        action=tuple(array[:end] for array in steps.action),
        reward=steps.reward[:end],
        next_obs=tuple(array[:end] for array in steps.next_obs),
        terminated=steps.terminated[:end],
        truncated=steps.truncated[:end],
        extras=None if steps.extras is None else tuple(array[:end] for array in steps.extras),
        valid=None if steps.valid is None else steps.valid[:end],
    )


class ReceivedSegment(NamedTuple):
    """A checked segment of a writer, as a store with one lane adopts it."""

    segment: Segment
    first_tick: int  # Of the writer's own ticks.
    lanes: int  # Of the writer.
    reward_dtype: np.dtype[Any]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.segment.ticks


def pack_payload(segment: Segment, reward_dtype: np.dtype[Any], encode_raw: EncodeBlock = encode_block) -> bytes:
    """Return a segment as bytes. `encode_raw` compresses the blocks that are not compressed yet."""
    head = pack_record(_HEAD, {"reward_dtype": dtype_to_json(reward_dtype)}, {})
    return b"".join([*head, pack_segment(segment, encode_raw=encode_raw)])


def unpack_payload(payload: bytes, columns: Columns) -> ReceivedSegment:
    """Return the segment that `pack_payload` packed, as one lane. Raise DamageError if the bytes are damaged."""
    head = read_record(reader_of(payload), 0, len(payload))
    head.require_kind(_HEAD)
    with refuse_malformed("The head of a segment"):
        reward_dtype = dtype_from_json(head.head["reward_dtype"])
    segment = unpack_segment(memoryview(payload)[head.nbytes :], columns, reward_dtype=reward_dtype)
    if segment.first_tick + segment.ticks > _MAX_TICK:
        raise DamageError(f"A segment starts at tick {segment.first_tick}, more than a writer counts.")
    return ReceivedSegment(flatten_lanes(segment), segment.first_tick, segment.lanes, reward_dtype)


def flatten_lanes(segment: Segment) -> Segment:
    """Return a segment with one lane, in which row r is tick r // lanes and lane r % lanes of `segment`."""
    if segment.lanes == 1:
        return segment
    parts = [_flatten_part(part, segment.ticks, segment.lanes) for part in segment.parts]
    return Segment(0, segment.ticks * segment.lanes, 1, parts)


def _flatten_part(part: Part, ticks: int, lanes: int) -> Part:
    arrays = part.arrays()
    rows = ticks * lanes
    if part.kind in ROW_KINDS or part.kind == "paired":  # The same memory, read as one lane.
        return Part.restore(part.kind, rows, 1, part.row_bytes, arrays, part.layout, None)
    if part.kind == "shared":
        paired = {"rows": _pair_rows(arrays, ticks, lanes, part.row_bytes)}
        return Part.restore("paired", rows, 1, part.row_bytes, paired, PAIRED, None)
    if part.kind == "sliced":
        return Part.restore("sliced", rows, 1, part.row_bytes, _flatten_log(arrays, lanes), part.layout, part.block)
    raise DamageError(f"A segment of {lanes} lanes has a part of kind {part.kind!r}, which writers do not send.")


def _pair_rows(arrays: dict[str, NDArray[Any]], ticks: int, lanes: int, row_bytes: int) -> Array:
    """Return shared rows as pairs of an observation and the next observation."""
    shared = arrays["rows"].reshape(ticks + 1, lanes, row_bytes)
    pairs = np.stack([shared[:-1], shared[1:]], axis=2).reshape(ticks * lanes, 2, row_bytes)
    if "exception_rows" in arrays:
        pairs[arrays["exception_rows"], 1] = arrays["exceptions"].reshape(-1, row_bytes)
    return pairs.reshape(-1)


def _flatten_log(arrays: dict[str, NDArray[Any]], lanes: int) -> dict[str, NDArray[Any]]:
    """Return a log in which the entries of each lane follow those of the lane before it, and cursors into that log."""
    log = arrays["log"].reshape(-1, lanes)
    if log.size >= _MAX_CURSOR:
        raise DamageError(f"A segment has a log of {log.size} entries, more than a writer sends.")
    starts = np.arange(lanes, dtype=np.uint32) * np.uint32(len(log))
    cursors = arrays["cursors"].reshape(-1, lanes)
    moved = (cursors & ~NEXT_FOLLOWS) + starts
    return {"log": np.ascontiguousarray(log.T).reshape(-1), "cursors": (moved | (cursors & NEXT_FOLLOWS)).reshape(-1)}

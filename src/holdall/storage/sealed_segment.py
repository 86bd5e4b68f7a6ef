"""Segments that travel: a run of ticks as bytes, for the network, a journal, or another store.

In:  a store's segment.  Out: the records that a checkpoint has of it, one after another; and back.
Invariant: a segment refers to nothing outside of itself but dictionaries, by name. Nothing that was received is
trusted: every checksum is computed, and every number is held against the others before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError
from holdall.json_state import counted, dtype_of, malformed_refused
from holdall.schema import Leaf, Schema
from holdall.storage.blocks import CarriedSlices, Coder, KeptBlock
from holdall.storage.codec import Codec, Dictionary, Method, Transform
from holdall.storage.records import (
    ROWS,
    Like,
    pack_logs,
    pack_rows,
    pack_slices,
    records_in,
    require_kind,
    unpack_logs,
    unpack_rows,
    unpack_slices_whole,
)
from holdall.storage.slices import NEXT_IS_WHOLE, ClosedPart
from holdall.storage.snapshot import RowChunk

MOST_SEGMENT_ROWS = 2**20


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A run of ticks that can be moved: to another machine, to a journal, to another store.

    It refers to nothing outside of itself but the dictionaries of its codecs. `Store.segment_at` and writers make it,
    `pack_segment` and `unpack_segment` turn it into bytes and back, `Store.adopt` takes it over.

    The columns of `rows` are named as a store names its own, each (ticks, lanes, ...): `action.0`, `extras.0`,
    `reward.0`, `terminated.0`, `truncated.0`; `invalid.0` only if a lane made no transition; `cursors.3` for an
    observation leaf that lies in slices, `obs.0` and `next.0` for one that does not. Nothing is kept apart.
    """

    rows: RowChunk
    parts: tuple[ClosedPart, ...]  # by large leaf, in the order of the leaves: window, log (entries, lanes), block

    @property
    def lanes(self) -> int:
        """Lanes that advanced together."""
        return int(self.rows.columns["terminated.0"].shape[1])

    @property
    def large(self) -> tuple[int, ...]:
        """The observation leaves that lie in slices."""
        return _large_leaves(self.rows.columns)

    def require(self, lanes: int, large: Sequence[int], reward_dtype: np.dtype[Any] | None) -> None:
        """Refuse to be adopted by a store of other fields; one of a single lane takes any number of lanes."""
        dtype = self.rows.columns["reward.0"].dtype
        if reward_dtype is not None and reward_dtype != dtype:
            raise ArgumentError(
                f"reward has dtype {dtype}, the first add had {reward_dtype}; holdall never casts, so have every "
                f"writer pass np.asarray(reward, dtype=np.{reward_dtype.name})"
            )
        if self.large != tuple(large) or lanes not in (1, self.lanes):
            raise ArgumentError(
                f"a segment of {self.lanes} lanes whose leaves {self.large} are large came to a store of {lanes} lanes "
                f"whose leaves {tuple(large)} are; make both of the same schema"
            )

    def in_one_lane(self) -> SealedSegment:
        """Return the same transitions one after another: row r was tick r // lanes in lane r % lanes."""
        rows, lanes = self.rows.ticks * self.lanes, self.lanes
        columns = {name: column.reshape(rows, 1, *column.shape[2:]) for name, column in self.rows.columns.items()}
        parts = []
        for i, part in zip(self.large, self.parts, strict=True):
            log: Any = part.log
            entries = np.arange(lanes, dtype=np.uint32) * np.uint32(len(log))
            columns[f"cursors.{i}"] = (self.rows.columns[f"cursors.{i}"] + entries).reshape(rows, 1)
            parts.append(replace(part, log=np.ascontiguousarray(log.T).reshape(-1, 1), log_rows=log.size))
        return SealedSegment(RowChunk(self.rows.first_tick * lanes, rows, columns, {}), tuple(parts))


def travelling(part: ClosedPart, coder: Coder) -> ClosedPart:
    """Return a part with a log and with sealed slices in memory, whatever it has."""
    block, log = part.block, part.log
    if log is None:
        lanes = part.slice_count // max(part.log_rows, 1)
        log = np.arange(part.slice_count, dtype=np.uint32).reshape(part.log_rows, lanes)
    sealed = block.sealed
    if sealed is None:
        raw = block.arena[: part.slice_count * block.slice_bytes].reshape(part.slice_count, block.slice_bytes)
        sealed = coder.seal(raw, Codec(Method.STORED, 0, Transform(block.slice_bytes)))
    if sealed is None:
        raise DamageError("slices could not be stored as they are; report this")
    carried = CarriedSlices(sealed.coded.in_memory())
    return replace(part, log=log, block=KeptBlock(block.slice_bytes, carried.count, carried))


def pack_segment(segment: SealedSegment, coder: Coder) -> bytes:
    """Return a segment as bytes: the records that a checkpoint has of it, one after another.

    These are its rows, its logs, and the slices of every large leaf. Dictionaries are records of their own, by name.
    """
    records = [pack_rows(segment.rows, compresses=False), pack_logs(segment.parts, compresses=False)]
    for part in segment.parts:
        if part.block.sealed is None:
            raise TypeError("the slices of a segment that travels are sealed")
        coded = part.block.sealed.coded
        records.append(pack_slices(coded, coder.checksums(np.asarray(coded.data), coded.offsets)))
    return b"".join(buffer for record in records for buffer in record)


def unpack_segment(
    payload: bytes, schema: Schema, dictionaries: Mapping[str, Dictionary], coder: Coder
) -> SealedSegment:
    """Read a segment that was received; DamageError if anything in it does not make sense.

    Every checksum is computed and every number held against the others, so whatever was sent, reading the result
    stays within it. Its lanes may be any number, whatever the schema says of its own.
    """

    def read(start: int, nbytes: int) -> bytes:
        return payload[start : start + nbytes]

    with malformed_refused("a segment"):
        rows, logs, *slices = records_in(payload)
        require_kind(rows, ROWS, read)
        like = _columns_like(rows.head["columns"], schema)
        ticks, first_tick = rows.head["ticks"], counted(rows.head["first_tick"])
        lanes = like["terminated.0"][0][0]
        if type(ticks) is not int or not 1 <= ticks * lanes <= MOST_SEGMENT_ROWS:
            raise DamageError(f"a segment claims {ticks!r} ticks of {lanes} lanes; nothing of it is used")
        chunk = unpack_rows(rows, read, first_tick, ticks, like)
        leaves = [schema.observation.leaves[i] for i in _large_leaves(like)]
        coded = [unpack_slices_whole(record, read, dictionaries, coder) for record in slices]
        blocks = [KeptBlock(each.codec.transform.slice_bytes, each.count, CarriedSlices(each)) for each in coded]
        segment = SealedSegment(chunk, tuple(unpack_logs(logs, read, lanes, leaves, blocks)))
        for i, part in zip(segment.large, segment.parts, strict=True):
            _require_within(part, chunk.columns[f"cursors.{i}"])
    return segment


def _columns_like(described: Any, schema: Schema) -> Like:
    """Return what the columns of a segment must be, where only lanes, large leaves and the reward's dtype are free."""
    found = {name: (dtype_of(dtype), shape) for name, dtype, shape in described}
    (lanes,) = {counted(shape[0]) for _, shape in found.values()}
    large = _large_leaves(found)
    flag, cursor = Leaf("", (), np.dtype(np.bool_)), Leaf("", (), np.dtype(np.uint32))
    leaves = {f"action.{i}": leaf for i, leaf in enumerate(schema.action.leaves)}
    leaves |= {f"extras.{i}": leaf for i, leaf in enumerate(schema.extras.leaves)}
    leaves |= {"reward.0": schema.reward_leaf(found["reward.0"][0]), "terminated.0": flag, "truncated.0": flag}
    leaves |= {"invalid.0": flag} if "invalid.0" in found else {}
    for i, leaf in enumerate(schema.observation.leaves):
        leaves |= {f"cursors.{i}": cursor} if i in large else {f"obs.{i}": leaf, f"next.{i}": leaf}
    return {name: ((lanes, *leaf.shape), leaf.dtype) for name, leaf in leaves.items()}


def _large_leaves(columns: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(sorted(int(name.removeprefix("cursors.")) for name in columns if name.startswith("cursors.")))


def _require_within(part: ClosedPart, cursors: NDArray[np.uint32]) -> None:
    """Refuse cursors that point outside the log, and a log that points outside the block."""
    window, log = part.window, part.log
    start = (cursors & ~NEXT_IS_WHOLE).astype(np.int64)
    end = start + window.count + np.where(cursors & NEXT_IS_WHOLE, window.count, window.shift)
    if log is None or log.size >= NEXT_IS_WHOLE or end.max() > len(log) or int(log.max()) >= part.slice_count:
        raise DamageError("a segment points outside itself; nothing of it is used")

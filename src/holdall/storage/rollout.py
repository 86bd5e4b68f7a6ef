"""The observations of a rollout: the slices and parts of a replay memory, filled once, read a few times, emptied.

In:  observations of all lanes, tick by tick.  Out: rows at given places, tick * lanes + lane.
Invariant: an observation continues its lane's last one only where the bytes say so; otherwise it is written whole.
`reset` frees nothing: the next rollout is written to the memory of the one before.

A part takes pairs of an observation and the next one. Here every tick is the next one of the tick before, so the
cursor of a tick leads to it as a next observation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError
from holdall.machine import pool_threads
from holdall.report import FieldReport, MemoryReport
from holdall.schema import Array, Leaf
from holdall.storage.batch_source import RECORD_FIELDS, Places
from holdall.storage.blocks import KeptBlock, SealedSlices, SliceBlock, reserve
from holdall.storage.codec import describe
from holdall.storage.codec_choice import COST_CAPS
from holdall.storage.sealer import Sealer
from holdall.storage.slices import (
    ClosedPart,
    Cursors,
    FrozenBlock,
    OpenPart,
    Window,
    WindowScout,
    as_bytes,
    lies_direct,
)
from holdall.storage.snapshot import new_ring
from holdall.storage.ticks import Kernels

_TINY_BYTES = 256
"""Fields up to this size lie in flat rows, whatever they hold."""
_SMALL_BYTES = 4096
"""Fields up to this size lie in flat rows unless a window is found; larger ones are always cut into slices."""
_SPARE_ROOM = 0.25
"""Room for slices beyond one new one per step: for episodes that begin and steps that skip."""
_MIN_WAITING_BYTES = 8 * 2**20
"""Bytes of full segments that may wait for compression, if the rollout is compressed."""
_COMPRESSED_SEGMENT_BYTES = 16 * 2**20
"""Slices after which a segment is compressed, if the rollout is."""


class FlatRows:
    """A field whose observations lie one after another, as in a plain array."""

    def __init__(self, leaf: Leaf, ticks: int, lanes: int) -> None:
        self._row_bytes = lanes * leaf.nbytes
        self._rows = new_ring(ticks, lanes, leaf)

    def write(self, tick: int, obs: Array) -> None:
        """Write one tick."""
        self._rows[tick] = obs

    def read(self, tick: int) -> Array:
        """Return one tick, to read only."""
        return np.asarray(self._rows[tick])

    def gather(self, places: NDArray[np.int64], out: Array, _pool: Any = None) -> None:
        """Copy the rows of `places` to `out`; a negative place gives zeros."""
        gather_padded(self._rows, places, out)

    def reset(self) -> None:
        """Do nothing: the next rollout writes over this one."""

    def fits(self) -> bool:
        """Return True: nothing is known against flat rows."""
        return True

    def used_bytes(self, ticks: int) -> tuple[int, int, int]:
        """Return the bytes of slices, logs and rows that `ticks` ticks take."""
        return 0, 0, ticks * self._row_bytes

    def arrays(self) -> list[Array]:
        """Return the arrays of the field."""
        return [self._rows]

    def describe(self) -> str:
        """Describe the layout for people."""
        return "flat rows"


def gather_rows(rows: Array, places: NDArray[np.int64], out: Array) -> None:
    """Copy rows of an array of (ticks, lanes, ...) to `out`."""
    rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:]).take(places, axis=0, out=out, mode="clip")


def gather_padded(rows: Array, places: NDArray[np.int64], out: Array) -> None:
    """Copy rows as `gather_rows` does; a negative place gives zeros."""
    gather_rows(rows, places, out)
    if len(places) and places.min() < 0:
        out[places < 0] = 0


class SlicedRows:
    """A field cut into unique slices, in one segment or, where segments are compressed, in many small ones."""

    def __init__(self, leaf: Leaf, window: Window, ticks: int, lanes: int, kernels: Kernels, compressed: bool) -> None:
        self._leaf = leaf
        self._window = window
        self._ticks = ticks
        self._lanes = lanes
        self._kernels = kernels
        self._compressed = compressed and not lies_direct(window)
        self._cursors: Cursors = reserve(ticks * lanes * 4).view(np.uint32).reshape(ticks, lanes)
        self._segment_by_tick = np.zeros(ticks, np.int32)
        self._written_ticks = 0
        self._ticks_at_hand = np.zeros((2, lanes, *leaf.shape), leaf.dtype)  # see `Kernels.append_next`
        self._parts: list[OpenPart | ClosedPart] = []  # one a segment; a closed one is compressed
        self._spare: list[OpenPart] = []  # empty ones, with their memory
        self._handed_out = 0  # segments that were submitted
        self._records: NDArray[np.int64] | None = None

    def write(self, tick: int, obs: Array) -> None:
        """Write one tick; `obs` is read once and may change afterwards."""
        self._records = None
        part = self._parts[-1] if self._parts else None
        if not isinstance(part, OpenPart) or not part.has_room():
            part = self._open_segment()
        self._kernels.append_next(part, self._ticks_at_hand, obs, self._cursors[tick])
        self._segment_by_tick[tick] = len(self._parts) - 1
        self._written_ticks = tick + 1

    def read(self, tick: int) -> Array:
        """Return a copy of one tick."""
        out = np.empty((self._lanes, *self._leaf.shape), self._leaf.dtype)
        self.gather(np.arange(tick * self._lanes, (tick + 1) * self._lanes), out)
        return out

    def gather(self, places: NDArray[np.int64], out: Array, pool: Any = None) -> None:
        """Copy the rows of `places` to `out`; a negative place gives zeros."""
        if not len(places):
            return
        if places.max() >= self._written_ticks * self._lanes:
            raise _outside(int(places.argmax()))
        padded = places < 0 if places.min() < 0 else None
        found = self._find(places if padded is None else np.where(padded, 0, places))
        self._kernels.gather(found, 0, None, out.reshape(len(places), -1).view(np.uint8), pool)
        if padded is not None:
            out[padded] = 0

    def reset(self) -> None:
        """Forget every tick and keep the memory."""
        self._records = None
        self._written_ticks = self._handed_out = 0
        while self._parts:
            if isinstance(part := self._parts[-1], OpenPart):
                self._empty(part)
            self._parts.pop()

    def fits(self) -> bool:
        """Whether observations overlap as the window says."""
        parts = [part for part in self._parts if isinstance(part, OpenPart)]
        return self._window.count > 1 and 2 * sum(p.broken_steps for p in parts) <= sum(p.steps for p in parts)

    def used_bytes(self, _ticks: int) -> tuple[int, int, int]:
        """Return the bytes of slices, of logs and cursors, and of rows."""
        slices = sum(p.used_bytes if isinstance(p, OpenPart) else p.block.used_bytes for p in self._parts)
        return slices, sum(part.log_bytes for part in self._parts) + self._cursors.nbytes, 0

    def arrays(self) -> list[Array]:
        """Return the arrays of the field."""
        found: list[Array | None] = [self._cursors, self._segment_by_tick, self._ticks_at_hand]
        for part in (*self._parts, *self._spare):
            found += [part.log, *([part.slices] if isinstance(part, OpenPart) else part.block.arrays())]
        return [array for array in found if array is not None]

    def describe(self) -> str:
        """Describe the layout for people."""
        sealed = [p.block.sealed for p in self._parts if isinstance(p, ClosedPart) and p.block.sealed is not None]
        kinds = sorted({describe(slices.codec) for slices in sealed})
        ending = f"; {len(sealed)} of {len(self._parts)} segments sealed by {', '.join(kinds)}" if sealed else ""
        return self._window.describe() + ending

    def take_sealed(self, block: SliceBlock, sealed: SealedSlices) -> bool:
        """Keep a segment compressed and its raw memory for later; False if the block is not of this field."""
        for number, part in enumerate(self._parts):
            if isinstance(part, OpenPart) and part.block is block:
                closed = part.closed()
                kept = KeptBlock(block.slice_bytes, closed.slice_count, sealed)
                self._records = None
                self._parts[number] = replace(closed, block=kept)
                self._empty(part)
                return True
        return False

    def submit_full(self, sealer: Sealer) -> bool:
        """Have the segments compressed that became full since the last call; return whether there are any."""
        if not self._compressed or not self._parts:
            return False
        newest = self._parts[-1]
        end = len(self._parts) - (isinstance(newest, OpenPart) and newest.has_room())
        full = [part.block for part in self._parts[self._handed_out : end] if isinstance(part, OpenPart)]
        for block in full:
            if block is not None:
                sealer.submit(FrozenBlock(id(self), self._leaf, self._window, block, self._lanes))
        if full:
            sealer.record_filled(sum(block.used_bytes for block in full if block is not None))
        self._handed_out = end
        return bool(full)

    def _open_segment(self) -> OpenPart:
        """Continue in the memory of an earlier segment, or in new memory."""
        part = self._spare.pop() if self._spare else self._new_part()
        self._parts.append(part)
        return part

    def _new_part(self) -> OpenPart:
        window, lanes = self._window, self._lanes
        room = lanes * (int(self._ticks * window.shift * (1 + _SPARE_ROOM)) + 8 * window.count)
        if self._compressed:
            room = max(_COMPRESSED_SEGMENT_BYTES // window.slice_bytes, 8 * window.count * lanes)
        arena_bytes = room * window.slice_bytes
        block = None if lies_direct(window) else self._kernels.new_block(window.slice_bytes, reserve(arena_bytes))
        return self._kernels.new_part(window, lanes, block, arena_bytes)

    def _empty(self, part: OpenPart) -> None:
        part.clear()
        if part not in self._spare:
            self._spare.append(part)

    def _find(self, places: NDArray[np.int64]) -> Places:
        if self._records is None:
            records = [part.record() for part in self._parts]
            self._records = np.array(records, np.int64).reshape(-1, len(RECORD_FIELDS))
        tick, lane = np.divmod(places, self._lanes)
        return Places(
            records=[self._records],
            segment=self._segment_by_tick.take(tick),
            cursors=[self._cursors.reshape(-1).take(places)],
            lane=lane.astype(np.int32),
            lanes=self._lanes,
            held=(tuple(part.held for part in self._parts),),
        )


def _outside(row: int) -> DamageError:
    return DamageError(
        f"row {row} of the batch points outside the rollout; nothing of the batch is returned. Call reset() and "
        "collect again, and report this"
    )


class RolloutField:
    """One field in the layout that suits it, which its first steps decide."""

    def __init__(self, leaf: Leaf, ticks: int, lanes: int, kernels: Kernels, compressed: bool) -> None:
        self.leaf = leaf
        self.name = f"obs.{leaf.name}" if leaf.name else "obs"
        self._lanes = lanes
        self._cut: Callable[[Window], SlicedRows] = lambda window: SlicedRows(
            leaf, window, ticks, lanes, kernels, compressed
        )
        self.rows: FlatRows | SlicedRows = (
            FlatRows(leaf, ticks, lanes) if leaf.nbytes <= _SMALL_BYTES else self._cut(Window.whole(leaf))
        )
        self._scout = WindowScout(leaf) if leaf.nbytes > _TINY_BYTES else None
        self._rollouts = 0
        self._searches = 1

    def write(self, tick: int, obs: Array) -> None:
        """Write the observations of one tick, of exactly the leaf's shape and dtype; ticks come in order."""
        self.rows.write(tick, obs)
        if self._scout is None or tick == 0:
            return
        self._scout.look(*(as_bytes(self.rows.read(t), self._lanes) for t in (tick - 1, tick)))
        if self._scout.done:
            if self._scout.finding is not None:
                self._write_again(self._scout.finding, tick)
            self._scout = None

    def reset(self) -> None:
        """Forget every tick; search for a window again where none was found or the one found does not fit."""
        self._rollouts += 1
        resting = self._rollouts < 1 << self._searches  # twice as long after every search
        if self._scout is None and not resting and self.leaf.nbytes > _TINY_BYTES and not self.rows.fits():
            self._searches += 1
            self._scout = WindowScout(self.leaf)
        self.rows.reset()

    def report(self, ticks: int) -> FieldReport:
        """Account for the field's bytes."""
        plain = ticks * self._lanes * self.leaf.nbytes
        return FieldReport(self.name, *self.rows.used_bytes(ticks), plain, self.rows.describe())

    def _write_again(self, window: Window, tick: int) -> None:
        """Write everything up to `tick` again, cut by `window`."""
        cut = self._cut(window)
        for past in range(tick + 1):
            cut.write(past, self.rows.read(past))
        self.rows = cut


class RolloutFields:
    """All observation fields of a rollout, and the threads that serve them.

    Args:
        compress: How much slower reading may get, over a raw gather, to take less memory: a key of `COST_CAPS`; None
            leaves everything raw.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        ticks: int,
        lanes: int,
        compress: str | None,
        kernels: Kernels,
    ) -> None:
        if compress is not None and compress not in tuple(COST_CAPS):
            raise ArgumentError(
                f"compress ({compress!r}) must be None or one of {sorted(COST_CAPS)}; pass one of these"
            )
        threads = pool_threads()
        self._pool = kernels.new_pool(threads)
        self.sealer = None
        if compress is not None:
            self.sealer = Sealer(kernels.coder, COST_CAPS[compress], threads, min_waiting_bytes=_MIN_WAITING_BYTES)
        self._fields = [RolloutField(leaf, ticks, lanes, kernels, compress is not None) for leaf in leaves]

    def write(self, tick: int, obs: Sequence[Array]) -> None:
        """Write the observations of one tick, leaf by leaf."""
        for field, rows in zip(self._fields, obs, strict=True):
            field.write(tick, rows)
            if self.sealer is not None and isinstance(field.rows, SlicedRows):
                if field.rows.submit_full(self.sealer):
                    self.sealer.wait_for_room()
                self._take_sealed(self.sealer)

    def gather(self, field: int, places: NDArray[np.int64], out: Array) -> None:
        """Copy one field's rows of `places` to `out`; a negative place gives zeros."""
        self._fields[field].rows.gather(places, out, self._pool)

    def reset(self) -> None:
        """Forget every tick, keep the memory."""
        self.drain()
        for field in self._fields:
            field.reset()

    def drain(self) -> None:
        """Wait until every full segment is compressed."""
        if self.sealer is not None:
            self.sealer.drain()
            self._take_sealed(self.sealer)

    def report(
        self, ticks: int, flat: Iterable[tuple[str, int]], others: Iterable[FieldReport] = (), **sums: Any
    ) -> MemoryReport:
        """Account for every field, for plain arrays, and for others.

        Args:
            flat: Names and bytes of plain arrays.
            sums: What else a report has: transitions, staging_bytes.
        """
        fields = [field.report(ticks) for field in self._fields]
        fields += [FieldReport(name, 0, 0, nbytes, nbytes, "flat rows") for name, nbytes in flat]
        if self.sealer is not None:
            sums |= {"backlog": self.sealer.backlog, "failure": self.sealer.failure}
        return MemoryReport(fields=(*fields, *others), segments=1, **sums)

    def arrays(self) -> list[tuple[str, Array]]:
        """Return every array held, by field."""
        return [(field.name, array) for field in self._fields for array in field.rows.arrays()]

    def close(self) -> None:
        """End the threads."""
        if self.sealer is not None:
            self.sealer.stop()
        if self._pool is not None:
            self._pool.dismiss()

    def _take_sealed(self, sealer: Sealer) -> None:
        """Let fields change over to what the worker finished."""
        for block, sealed, *_ in sealer.collect():
            if sealed is not None:
                any(isinstance(f.rows, SlicedRows) and f.rows.take_sealed(block, sealed) for f in self._fields)


_FIRST_ROWS = 8


class FinalObservations:
    """Whole observations of several leaves under one list of ids, in arrays that double when they are full."""

    def __init__(self, leaves: tuple[Leaf, ...]) -> None:
        self._ids = np.empty(0, np.int64)
        self._rows = [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ids of the rows; a view."""
        return self._ids[: self._count]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and ids held."""
        return self.ids.nbytes + sum(rows[: self._count].nbytes for rows in self._rows)

    def gather(self, leaf: int, rows: NDArray[np.int64], out: Array) -> None:
        """Copy rows of one leaf to `out`."""
        self._rows[leaf].take(rows, axis=0, out=out, mode="clip")

    def arrays(self) -> list[Array]:
        """Return the arrays held, with the room kept for more."""
        return [self._ids, *self._rows]

    def append(self, ids: NDArray[np.int64], rows: list[Array]) -> None:
        """Keep rows, leaf by leaf."""
        end = self._count + len(ids)
        if end > min(map(len, (self._ids, *self._rows))):
            room = max(2 * len(self._ids), end, _FIRST_ROWS)
            self._ids, *self._rows = (_longer(old, room, self._count) for old in (self._ids, *self._rows))
        self._ids[self._count : end] = ids
        for kept, new in zip(self._rows, rows, strict=True):
            kept[self._count : end] = new
        self._count = end

    def drop_from(self, first_id: int) -> None:
        """Forget the rows of ids from one on, and keep the memory."""
        if self._count and self._ids[self._count - 1] >= first_id:
            self._count = int(np.searchsorted(self.ids, first_id))


def _longer(old: Array, room: int, used: int) -> Array:
    new = np.empty((room, *old.shape[1:]), old.dtype)
    new[:used] = old[:used]
    return new

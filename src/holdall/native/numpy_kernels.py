"""The same loops in NumPy, for machines where the compiled library was not built.

In:  contiguous arrays.  Out: parts and batches, byte for byte those of reading.py and writing.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.native.numpy_codec import PortableCoder
from holdall.schema import Array, Bytes
from holdall.storage import (
    ALIGNMENT_BYTES,
    COLUMN_FIELDS,
    NEXT_IS_WHOLE,
    NO_ROOM,
    NOT_CONTINUED,
    RECORD_FIELDS,
    BatchReader,
    Coder,
    Cursors,
    FastTick,
    FlatField,
    OpenPart,
    Places,
    Repair,
    SealedSlices,
    SliceBlock,
    SlicedTick,
    TickWriter,
    Window,
    as_bytes,
    release_tail,
)


class PortableKernels:
    """Makes parts and fills batches with NumPy."""

    name = "portable"
    packs_columns = False

    def __init__(self) -> None:
        self.coder: Coder = PortableCoder()

    def pack_columns(self, *_: Any) -> int:
        """Pack nothing: rows stay in their rings."""
        return -1

    def release(self, _first: int, _nbytes: int) -> None:
        """Keep all pages."""

    def new_block(self, slice_bytes: int, arena: Bytes) -> SliceBlock:
        """Make an empty block in `arena`."""
        return PortableBlock(slice_bytes, arena)

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""
        return PortablePart(window, lanes, block, arena_bytes)

    def append_next(self, part: OpenPart, ticks: Array, obs: Array, cursors: Cursors) -> None:
        """See `Kernels.append_next`."""
        turn = part.steps // part.lanes % 2
        np.copyto(ticks[turn], obs)
        part.append(ticks[turn - 1 if part.steps else turn], ticks[turn], cursors)

    def new_writer(
        self, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int], repair: Repair
    ) -> TickWriter:
        """Make a writer that has written the ticks from `ticks[0]` up to `ticks[1]`."""
        return PortableTickWriter(flat, ring_ticks, ticks, repair)

    def new_fast_tick(self, _lock: Any, _repair: Repair) -> FastTick:
        """Make one that never writes."""
        return FastTick()

    def new_batch_reader(self, *_: Any) -> BatchReader:
        """Make one that never draws."""
        return BatchReader()

    def new_pool(self, threads: int | None = None) -> None:
        """Make none: NumPy's loops use one thread."""

    def read_rows(
        self,
        columns: NDArray[np.int64],
        ids: NDArray[np.int64],
        held: tuple[int, int],
        ring_rows: int,
        blocks: tuple[Bytes, Bytes],
    ) -> bool:
        """See `RowReader`."""
        if not ids.size:
            return True
        if not held[0] <= ids.min() <= ids.max() < held[1]:
            return False
        first = [0, 0]
        for values in columns.tolist():
            column = dict(zip(COLUMN_FIELDS, values, strict=True))
            nbytes, block = column["row_bytes"], column["block"]
            end = first[block] + len(ids) * nbytes
            out = blocks[block][first[block] : end].reshape(len(ids), nbytes)
            slot = (ids + column["later"]) % ring_rows
            if column["unless"]:
                ended, cut = (_memory(column[name], ring_rows)[slot] for name in ("ring", "unless"))
                out[:] = (ended > cut).astype(np.float32).view(np.uint8).reshape(out.shape)
            else:
                out[:] = _memory(column["ring"], ring_rows * nbytes).reshape(ring_rows, nbytes)[slot]
            if column["apart_count"]:
                _put_apart(column, ids, out)
            first[block] = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return True

    def find(
        self, first_ticks: NDArray[np.int64], ids: NDArray[np.int64], lanes: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See `Kernels.find`."""
        ticks, lane = np.divmod(ids, lanes)
        segment = np.searchsorted(first_ticks, ticks, side="right") - 1
        return segment.astype(np.int32), lane.astype(np.int32)

    def gather(self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None, _pool: Any = None) -> None:
        """See `Kernels.gather`."""
        obs_bytes = next(rows.shape[1] for rows in (obs, next_obs) if rows is not None)
        cursors = places.cursors[field]
        sealed = places.sealed_slices(field)
        order = np.arange(len(places.segment)) if places.rows is None else places.rows
        room = min(len(rows) for rows in (obs, next_obs) if rows is not None)
        outside = np.flatnonzero((order < 0) | (order >= room))
        if outside.size:
            raise _outside(outside)
        for number in np.unique(places.segment).tolist():
            rows = np.flatnonzero(places.segment == number)
            if not 0 <= number < len(places.records[field]):
                raise _outside(rows)
            record = dict(zip(RECORD_FIELDS, places.records[field][number].tolist(), strict=True))
            lane = places.lane[rows]
            row_bytes = record["outer"] * record["run_bytes"] * record["window"]
            if lane.min() < 0 or lane.max() >= places.lanes or row_bytes != obs_bytes:
                raise _outside(rows)
            start = (cursors[rows] & ~NEXT_IS_WHOLE).astype(np.int64)
            whole = (cursors[rows] & NEXT_IS_WHOLE) != 0
            after = start + np.where(whole, record["window"], record["shift"])
            wanted = [(out, first) for out, first in ((obs, start), (next_obs, after)) if out is not None]
            numbers = np.stack([_numbers(record, first, lane, places.lanes, rows) for _, first in wanted])
            # What an observation and the next one share is decoded once.
            windows = _windows(record, numbers, sealed.get(record["sealed"]))
            for (out, _), copied in zip(wanted, windows, strict=True):
                out[order[rows]] = copied

    def namer(self) -> None:
        """See `Kernels.namer`: slices are named in C alone."""


class PortableBlock(SliceBlock):
    """Unique slices behind a dict from hash to number; a hit is compared byte for byte."""

    def __init__(self, slice_bytes: int, arena: Bytes) -> None:
        super().__init__(slice_bytes, arena)
        self._slices = arena[: self.capacity * slice_bytes].reshape(self.capacity, slice_bytes)
        self._number_by_hash: dict[int, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Slices held."""
        return self._used

    def clear(self) -> None:
        """Forget every slice and keep the memory."""
        self._number_by_hash.clear()
        self._used = 0

    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""
        self.capacity = self._used
        self._number_by_hash = {}
        self._slices = self._slices[:0].copy()  # a view would keep the arena from being freed
        release_tail(self.arena, self.used_bytes)

    def intern(self, slices: Bytes) -> NDArray[np.uint32]:
        """Number each row of `slices`, keeping those not seen before."""
        numbers = np.empty(len(slices), np.uint32)
        for i, row in enumerate(slices):
            key = xxhash.xxh3_64_intdigest(row)
            number = self._number_by_hash.get(key)
            if number is None or not np.array_equal(self._slices[number], row):
                number = self._used
                self._slices[number] = row
                self._used = number + 1  # before anybody can find it: it stays, even if its tick does not
                self._number_by_hash.setdefault(key, number)
            numbers[i] = number
        return numbers


class _Written(NamedTuple):
    """How far a part is; what lies behind the lanes' ends does not count."""

    end: NDArray[np.int64]  # log entries of each lane
    last: Bytes  # the newest observation of each lane
    steps: int
    broken_steps: int
    pushed: int


class PortablePart(OpenPart):
    """A part whose ticks are written lane group by lane group."""

    def __init__(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> None:
        super().__init__(window, lanes, block, arena_bytes)
        self.written = self._nothing()

    def _nothing(self) -> _Written:
        return _Written(np.zeros(self.lanes, np.int64), np.empty((self.lanes, self.obs_bytes), np.uint8), 0, 0, 0)

    def append(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """See `OpenPart.append`."""
        self._require_tick(obs, next_obs, len(cursors))
        self.lengthen_log()
        if not self.has_room():
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")
        self._append_rows(as_bytes(obs, self.lanes), as_bytes(next_obs, self.lanes), cursors)

    def clear(self) -> None:
        """See `OpenPart.clear`."""
        if isinstance(self.block, PortableBlock):
            self.block.clear()
        self.written = self._nothing()
        self._used_before = 0

    def _append_rows(self, obs: Bytes, next_obs: Bytes, cursors: Cursors) -> None:
        window, before = self.window, self.written
        end = before.end.copy()
        known = (obs == before.last).all(axis=1) & (before.steps > 0)
        pushed = self._push(obs, np.flatnonzero(~known), window.count, end)
        cursors[:] = end - window.count
        stretches = (self.lanes, window.outer, window.count * window.run_bytes)
        skipped = window.shift * window.run_bytes
        old = obs.reshape(stretches)[:, :, skipped:]
        new = next_obs.reshape(stretches)[:, :, : stretches[2] - skipped]
        shifts = (old == new).all(axis=(1, 2))
        breaking = np.flatnonzero(~shifts)
        pushed += self._push(next_obs, np.flatnonzero(shifts), window.shift, end)
        pushed += self._push(next_obs, breaking, window.count, end)
        cursors[breaking] |= NEXT_IS_WHOLE
        self.written = _Written(
            end, next_obs.copy(), before.steps + self.lanes, before.broken_steps + breaking.size, before.pushed + pushed
        )

    @property
    def longest(self) -> int:
        """See `OpenPart.longest`."""
        return int(self.written.end.max())

    @property
    def shortest(self) -> int:
        """See `OpenPart.shortest`."""
        return int(self.written.end.min())

    @property
    def steps(self) -> int:
        """See `OpenPart.steps`."""
        return self.written.steps

    @property
    def broken_steps(self) -> int:
        """See `OpenPart.broken_steps`."""
        return self.written.broken_steps

    @property
    def pushed(self) -> int:
        """See `OpenPart.pushed`."""
        return self.written.pushed

    def _push(self, obs: Bytes, lanes: NDArray[np.int64], count: int, end: NDArray[np.int64]) -> int:
        """Append the newest `count` slices of the given lanes' observations at their ends; count the slices."""
        if lanes.size == 0:
            return 0
        cut = self.window.newest(obs[lanes], count)
        position = end[lanes][:, None] + np.arange(count)
        if self.log is not None and isinstance(self.block, PortableBlock):
            numbers = self.block.intern(cut.reshape(-1, self.window.slice_bytes))
            self.log[position, lanes[:, None]] = numbers.reshape(position.shape)
        else:
            entries = self.slices.reshape(-1, self.lanes, self.window.slice_bytes)
            entries[position, lanes[:, None]] = cut
        end[lanes] += count
        return count * lanes.size


class PortableTickWriter(TickWriter):
    """Writes a tick field by field; if it does not get to the end, the next call takes all of it back."""

    def __init__(self, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int], repair: Repair) -> None:
        self.flat, self.ring_ticks = tuple(flat), ring_ticks
        self.first_tick, self.next_tick = ticks
        self._repair = repair

    def write(self, rows: Sequence[Array], sliced: SlicedTick | None, *, is_kept: bool) -> int:
        """See `TickWriter.write`."""
        tick = self.next_tick
        slot, values = tick % self.ring_ticks, self._places(rows)
        if not is_kept and tick > self.first_tick and not self._is_continued(slot, values):
            return NOT_CONTINUED
        parts: list[Any] = [] if sliced is None else sliced.parts
        if not all(part.has_room() and part.longest + 2 * part.window.count <= part.log_rows for part in parts):
            return NO_ROOM
        old = [(ring, at, ring[at].copy()) for ring, at, _ in values]
        written = [part.written for part in parts]

        def take_back() -> None:
            if self.next_tick == tick:
                for ring, at, row in old:
                    ring[at] = row
                for part, before in zip(parts, written, strict=True):
                    part.written = before

        self._repair.begin(take_back)
        for ring, at, row in values:
            ring[at] = row
        if sliced is not None:
            for part, cursors, obs, next_obs in zip(parts, sliced.cursors, sliced.obs, sliced.next_obs, strict=True):
                part.append(obs, next_obs, cursors[slot])
        self.next_tick = tick + 1
        self._repair.end()
        return tick + 1

    def _is_continued(self, slot: int, values: list[tuple[Array, int, Array]]) -> bool:
        shared = {id(field.rows) for field in self.flat if field.is_observation and field.following is None}
        at_slot = [(ring[at], row) for ring, at, row in values if at == slot and id(ring) in shared]
        return all(stands.tobytes() == row.tobytes() for stands, row in at_slot)

    def _places(self, rows: Sequence[Array]) -> list[tuple[Array, int, Array]]:
        """Return ring, slot and content of all rows of the tick to come."""
        slot, next_slot = (tick % self.ring_ticks for tick in (self.next_tick, self.next_tick + 1))
        given, values = iter(rows), []
        for field in self.flat:
            values.append((field.rows, slot, next(given)))
            if field.following is not None:
                values.append((field.following, slot, next(given)))
            elif field.is_observation:
                values.append((field.rows, next_slot, next(given)))
        return values


def _put_apart(column: dict[str, int], ids: NDArray[np.int64], out: Bytes) -> None:
    """Overwrite the rows of `out` that do not stand in the ring."""
    count, nbytes = column["apart_count"], column["row_bytes"]
    held = _memory(column["apart_ids"], 8 * count).view(np.int64)
    place = held.searchsorted(ids)
    found = (held.take(place, mode="clip") == ids).nonzero()[0]
    out[found] = _memory(column["apart_rows"], count * nbytes).reshape(count, nbytes)[place[found]]


def _numbers(
    record: dict[str, int], start: NDArray[np.int64], lane: NDArray[np.int32], lanes: int, rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the slices of the observations that begin at `start` of their lanes' logs, (rows, window)."""
    if start.min() < 0 or start.max() + record["window"] > record["log_rows"]:
        raise _outside(rows)
    number: NDArray[np.int64] = (start[:, None] + np.arange(record["window"])) * lanes + lane[:, None]
    if record["log"]:
        log = _memory(record["log"], record["log_rows"] * lanes * record["log_width"])
        number = log.view(f"u{record['log_width']}")[number].astype(np.int64)
    if number.max() >= record["slice_count"]:
        raise _outside(rows)
    return number


def _windows(record: dict[str, int], numbers: NDArray[np.int64], sealed: SealedSlices | None) -> Bytes:
    """Copy observations of given slices, (sides, rows, window), as (sides, rows, bytes)."""
    outer, run_bytes = record["outer"], record["run_bytes"]
    if sealed is None:
        slices = _memory(record["slices"], record["slice_count"] * outer * run_bytes)
    else:
        wanted, inverse = np.unique(numbers, return_inverse=True)
        slices = np.empty((len(wanted), outer * run_bytes), np.uint8)
        PortableCoder().decode(sealed, wanted, slices)
        numbers = inverse.reshape(numbers.shape)
    cut = slices.reshape(-1, outer, run_bytes)[numbers]  # (sides, rows, window, outer, run_bytes)
    return np.asarray(cut.transpose(0, 1, 3, 2, 4).reshape(*numbers.shape[:2], -1), np.uint8)


def _memory(start: int, nbytes: int) -> Bytes:
    """See `nbytes` bytes from an address on as an array; the places keep them alive."""
    return np.ctypeslib.as_array(ctypes.cast(start, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))


def _outside(rows: NDArray[np.int64]) -> DamageError:
    return DamageError(
        f"a row of the batch ({rows[0]} or later) points outside its segment; nothing of the batch "
        "is returned. Load the last checkpoint, and report this"
    )

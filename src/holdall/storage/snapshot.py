"""Snapshots: all that a store holds, at one moment.

In:  rings that go on being written to, and segments.  Out: chunks of rows, and what checkpoints and pickles hold.
Invariant: a chunk holds the rows of its moment, whatever is written over them before it is taken.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, Union

import numpy as np
from numpy.typing import NDArray

from holdall.errors import HoldallError
from holdall.schema import Array, Bytes, Leaf
from holdall.storage.blocks import SliceBlock, address
from holdall.storage.slices import ClosedPart, OpenPart, Segment, Window

Ring = Union[Array, "LiveRows"]
_CHUNK_BYTES = 2**19
_MOST_CHUNK_TICKS = 2**16
SETTLED_TICKS = 65
"""A window found late rewrites the cursors of at most 64 past ticks, and a tick is only complete when the next one
stands: rows older than this change only where flags or extras are written again."""


def chunk_ticks_of(tick_bytes: int) -> int:
    """Return how many ticks are written as one chunk: a power of two, so that chunks of two saves are the same."""
    fitting = max(1, _CHUNK_BYTES // max(1, tick_bytes))
    return int(min(1 << (fitting.bit_length() - 1), _MOST_CHUNK_TICKS))


@dataclass(frozen=True, slots=True)
class RowChunk:
    """The rows of a run of ticks, by column."""

    first_tick: int
    ticks: int
    columns: dict[str, Array]  # (ticks, lanes, ...)
    apart: dict[str, tuple[NDArray[np.int64], Array]]  # ids and next observations that no later row shows

    def since(self, tick: int, lanes: int) -> RowChunk | None:
        """Return the rows of ticks from one on; None if there are none."""
        skipped = max(0, tick - self.first_tick)
        if skipped >= self.ticks:
            return None
        first, apart = self.first_tick + skipped, {}
        for name, (ids, rows) in self.apart.items():
            kept = int(np.searchsorted(ids, first * lanes))
            apart[name] = ids[kept:], rows[kept:]
        columns = {name: column[skipped:] for name, column in self.columns.items()}
        return RowChunk(first, self.ticks - skipped, columns, apart)


@dataclass(frozen=True, slots=True)
class Apart:
    """Next observations that are kept apart, at the moment of a snapshot; what is appended later lies behind `end`."""

    ids: NDArray[np.int64]
    rows: Array
    first: int
    end: int

    def between(self, first_id: int, end_id: int) -> tuple[NDArray[np.int64], Array]:
        """Return those of a range of ids."""
        ids = self.ids[self.first : self.end]
        start, stop = np.searchsorted(ids, [first_id, end_id]) + self.first
        return self.ids[start:stop], self.rows[start:stop]


APART_FIELDS = ("ids", "rows", "end", "room")
_END, _ROOM = 2, 3


def _room_in(held: Apart, most: int = 0) -> NDArray[np.int64]:
    room = min(len(held.ids), held.first + most)
    return np.array([address(held.ids), address(held.rows), held.end, room], np.int64)


class RowsById:
    """Rows under ascending transition ids: appended at the end, dropped at the front.

    What is held is one object, replaced in one step: an interrupt leaves what was there before or all of the new.
    Compiled loops append rows by themselves, as far as there is room, and count them in `room`.
    """

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        held = Apart(np.empty(0, np.int64), np.empty((0, *leaf.shape), leaf.dtype), 0, 0)
        self._held = held, _room_in(held)

    @property
    def held(self) -> Apart:
        """All that is held now: another object after every change."""
        held, room = self._held
        if (end := int(room[_END])) != held.end:
            held = replace(held, end=end)
            self._held = held, room
        return held

    @property
    def room(self) -> NDArray[np.int64]:
        """Where loops may append rows, see `APART_FIELDS`; another object when that is elsewhere."""
        return self._held[1]

    def hold(self, held: Apart, most: int = 0) -> None:
        """Hold other rows than before; loops may append until there are `most`."""
        self._held[1][_ROOM] = 0  # from now on none are appended there: an interrupt may come before the next line
        self._held = held, _room_in(held, most)

    def __len__(self) -> int:
        return self.held.end - self.held.first

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and ids held, and of the room kept for more."""
        return self.held.ids.nbytes + self.held.rows.nbytes

    def arrays(self) -> list[Array]:
        """Return the arrays of ids and rows."""
        return [self.held.ids, self.held.rows]

    def append(self, ids: NDArray[np.int64], rows: Array, most: int = 0) -> None:
        """Add rows whose ids are higher than all before; those of the same ids or higher ones are replaced.

        Args:
            most: As many may there be before somebody has to look at them again.
        """
        held, count = self.held, len(ids)
        first, end = held.first, held.end
        if count and end > first and held.ids[end - 1] >= ids[0]:
            end = first + int(np.searchsorted(held.ids[first:end], ids[0]))
        all_ids, all_rows = held.ids, held.rows
        if end + count > len(all_ids) or end < held.end:  # what is replaced stays as it is for snapshots that hold it
            needed = end - first + count
            room = needed + needed // 4 + 16
            all_ids, all_rows = np.empty(room, np.int64), np.empty((room, *self._leaf.shape), self._leaf.dtype)
            all_ids[: end - first], all_rows[: end - first] = held.ids[first:end], held.rows[first:end]
            first, end = 0, end - first
        all_ids[end : end + count], all_rows[end : end + count] = ids, rows
        self.hold(Apart(all_ids, all_rows, first, end + count), most)

    def drop_before(self, first_id: int) -> None:
        """Forget rows of ids below `first_id`."""
        held = self.held
        gone = int(np.searchsorted(held.ids[held.first : held.end], first_id))
        if gone:
            self.hold(replace(held, first=held.first + gone))

    def replace(self, rows: Array, ids: NDArray[np.int64]) -> None:
        """Overwrite those of `rows` whose id is held here."""
        first, end = self.held.first, self.held.end
        if first == end:
            return
        held = self.held.ids[first:end]
        place = held.searchsorted(ids)
        found = (held.take(place, mode="clip") == ids).nonzero()[0]
        if found.size:
            rows[found] = self.held.rows[first + place[found]]

    def freeze(self) -> Apart:
        """Return what is held now; what is appended later lies behind it, and what moves leaves it where it is."""
        return self.held


class LiveRows(ABC):
    """A ring that may keep rows elsewhere, but has them all under their ticks."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def rows(self, first: int, end: int) -> Array:
        """Copy the rows of ticks [first, end)."""

    @abstractmethod
    def view(self, first: int, end: int) -> Array:
        """Return rows that pass no end of the ring, copied only where they do not stand there."""


class FrozenRows:
    """The rows of all ticks held at one moment. Every method is called under the memory's lock.

    Args:
        columns: Rings by name, (ring ticks, lanes, ...).
        saved: Chunks, by number, of which a copy is not needed.
    """

    def __init__(
        self,
        columns: Mapping[str, Ring],
        apart: Mapping[str, Apart],
        first_tick: int,
        next_tick: int,
        lanes: int,
        chunk_ticks: int,
        saved: Iterable[int],
    ) -> None:
        self.first_tick, self.next_tick = first_tick, next_tick
        self.chunk_ticks = chunk_ticks
        self._columns = dict(columns)
        self._apart = dict(apart)
        self._lanes = lanes
        known = set(saved)
        numbers = range(first_tick // chunk_ticks, -(-next_tick // chunk_ticks))
        self.wanted = [number for number in numbers if number not in known]
        self._pending = set(self.wanted)
        self._copies: dict[int, RowChunk] = {}
        self._before: dict[int, dict[str, Array]] = {}  # of chunks to come: columns that were written again since
        for number in self.wanted:
            if not is_settled(number, chunk_ticks, next_tick):
                self._rescue(number)

    @property
    def is_pending(self) -> bool:
        """Whether rows are still to be read from rings that go on being written to."""
        return bool(self._pending)

    def before_ticks(self, first: int, end: int) -> None:
        """Copy what the rows of new ticks are about to be written over."""
        ring_ticks = len(next(iter(self._columns.values())))
        for number in range((first + 1 - ring_ticks) // self.chunk_ticks, (end - ring_ticks) // self.chunk_ticks + 1):
            self._rescue(number)

    def before_rewrite(self, numbers: Iterable[int], names: Iterable[str]) -> None:
        """Copy columns of chunks that are about to be written again."""
        for number in self._pending.intersection(numbers):
            kept = self._before.setdefault(number, {})
            kept.update((name, self._rows(number, name)) for name in names if name not in kept)

    def take(self, number: int) -> RowChunk:
        """Return a chunk that is wanted; once only."""
        self._rescue(number)
        return self._copies.pop(number)

    def take_again(self, number: int, next_tick: int) -> RowChunk | None:
        """Return a chunk that was not wanted; None if ticks up to `next_tick` were written over it since."""
        first = max(number * self.chunk_ticks, self.first_tick)
        ring_ticks = len(next(iter(self._columns.values())))
        return self._copied(number) if first > next_tick + 1 - ring_ticks else None

    @property
    def wanted_bytes(self) -> int:
        """The bytes of the chunks that are wanted, about."""
        ticks = sum(min((n + 1) * self.chunk_ticks, self.next_tick) - n * self.chunk_ticks for n in self.wanted)
        return ticks * sum(prod(ring.shape[1:]) * ring.dtype.itemsize for ring in self._columns.values())

    def drop(self) -> None:
        """Give up all that was not taken."""
        self._pending.clear()
        self._copies.clear()
        self._before.clear()

    def _rescue(self, number: int) -> None:
        if number not in self._pending:
            return
        self._copies[number] = self._copied(number)
        self._pending.discard(number)
        self._before.pop(number, None)

    def _copied(self, number: int) -> RowChunk:
        (first, end), kept = self._ticks(number), self._before.get(number, {})
        return RowChunk(
            first,
            end - first,
            {name: kept[name] if name in kept else self._rows(number, name) for name in self._columns},
            {name: apart.between(first * self._lanes, end * self._lanes) for name, apart in self._apart.items()},
        )

    def _rows(self, number: int, name: str) -> Array:
        return rows_of(self._columns[name], *self._ticks(number))

    def _ticks(self, number: int) -> tuple[int, int]:
        """The first tick of a chunk that was held, and the one behind its last."""
        return max(number * self.chunk_ticks, self.first_tick), min((number + 1) * self.chunk_ticks, self.next_tick)


class RowSnapshots:
    """The snapshots of a store's rows that are still to be read, and which chunks changed after they were written."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._pending: list[weakref.ref[FrozenRows]] = []  # nobody wants one that its save was interrupted before
        self._versions: dict[int, int] = {}  # how often rows of a chunk were written again

    @property
    def pending(self) -> list[FrozenRows]:
        """Snapshots that somebody is about to read."""
        if not self._pending:
            return []
        found = [(ref, rows) for ref in self._pending if (rows := ref()) is not None]
        self._pending = [ref for ref, _ in found]
        return [rows for _, rows in found]

    def before_rewrite(self, ids: NDArray[np.int64], names: tuple[str, ...], chunk_ticks: int) -> None:
        """Copy columns that are about to be written again, and count their chunks as changed."""
        for frozen in self.pending:
            frozen.before_rewrite(np.unique(ids // (self._lanes * frozen.chunk_ticks)).tolist(), names)
        for number in np.unique(ids // (self._lanes * chunk_ticks)).tolist():
            self._versions[number] = self._versions.get(number, 0) + 1

    def freeze(
        self,
        columns: Mapping[str, Ring],
        apart: Mapping[str, Apart],
        first_tick: int,
        next_tick: int,
        chunk_ticks: int,
        saved: Mapping[int, tuple[int, tuple[str, ...]]],
    ) -> tuple[FrozenRows, dict[int, int]]:
        """Return the rows of all ticks held, without chunks that are saved as they are; and the versions of chunks."""
        names = tuple(columns)
        self._versions = {n: v for n, v in self._versions.items() if (n + 1) * chunk_ticks > first_tick}
        known = [
            number
            for number, (version, written) in saved.items()
            if version == self._versions.get(number, 0)
            and written == names
            and is_settled(number, chunk_ticks, next_tick)
        ]
        rows = FrozenRows(columns, apart, first_tick, next_tick, self._lanes, chunk_ticks, known)
        if rows.is_pending:
            self._pending = [*self._pending, weakref.ref(rows)]
        return rows, dict(self._versions)

    def take_again(self, rows: FrozenRows, number: int, version: int, next_tick: int) -> RowChunk | None:
        """Return a chunk that was not wanted, in its version; None if it was written over since."""
        return rows.take_again(number, next_tick) if self._versions.get(number, 0) == version else None

    def release(self, rows: FrozenRows) -> None:
        """Forget a snapshot whose rows were read, or are not wanted any more."""
        rows.drop()
        self._pending = [ref for ref in self._pending if ref() is not rows]


def is_settled(number: int, chunk_ticks: int, next_tick: int) -> bool:
    """Whether nothing but flags or extras that are written again can still change a chunk."""
    return (number + 1) * chunk_ticks + SETTLED_TICKS <= next_tick


def chunks_of(
    columns: Mapping[str, Ring], apart: Mapping[str, Apart], first_tick: int, next_tick: int, lanes: int
) -> list[RowChunk]:
    """Return the rows of ticks [first_tick, next_tick) as views of rings, where they stand there: one or two chunks."""
    ring_ticks = len(next(iter(columns.values())))
    wrap = min(next_tick, first_tick - first_tick % ring_ticks + ring_ticks)
    return [
        RowChunk(
            first,
            end - first,
            {name: _view(ring, first, end) for name, ring in columns.items()},
            {name: rows.between(first * lanes, end * lanes) for name, rows in apart.items()},
        )
        for first, end in ((first_tick, wrap), (wrap, next_tick))
        if end > first
    ]


def _view(ring: Ring, first: int, end: int) -> Array:
    return ring.view(first, end) if isinstance(ring, LiveRows) else ring[first % len(ring) :][: end - first]


def rows_of(ring: Ring, first: int, end: int) -> Array:
    """Copy the rows of ticks [first, end) out of a ring."""
    if isinstance(ring, LiveRows):
        return ring.rows(first, end)
    start, rows = first % len(ring), np.empty((end - first, *ring.shape[1:]), ring.dtype)
    before_wrap = min(len(rows), len(ring) - start)
    copy_held(ring[start : start + before_wrap], rows[:before_wrap])
    copy_held(ring[: len(rows) - before_wrap], rows[before_wrap:])
    return rows


def copy_held(rows: Array, to: Array) -> None:
    """Copy rows that lie one behind the other, and keep Python's lock meanwhile.

    NumPy lets go of it for more than 500 numbers. To get it back may take a whole turn of another thread, some
    milliseconds, and who makes a snapshot has the memory's lock, too.
    """
    to.reshape(-1).view(np.uint8).data[:] = rows.reshape(-1).view(np.uint8).data


def last_rows(ids: NDArray[np.int64], columns: Mapping[str, Any]) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Return every id once, and copies of the last rows that each has."""
    unique, from_the_end = np.unique(ids[::-1], return_index=True)
    last = len(ids) - 1 - from_the_end
    return unique, {name: rows[last] for name, rows in columns.items()}


def put_rows(ring: Array, first: int, rows: Array) -> None:
    """Write rows of ticks from `first` on into a ring that is at least as long."""
    start = first % len(ring)
    before_wrap = min(len(rows), len(ring) - start)
    ring[start : start + before_wrap] = rows[:before_wrap]
    ring[: len(rows) - before_wrap] = rows[before_wrap:]


@dataclass(frozen=True, slots=True)
class OpenSlices:
    """The slices of a block that was still being filled: those numbered by then."""

    key: object  # the same one in every snapshot, for as long as the block is open
    block: SliceBlock  # as the segments of the snapshot name it
    slice_bytes: int
    slices: Bytes  # (count * slice_bytes,)
    settled: int  # of the slices, the first so many never change

    @classmethod
    def of(cls, part: OpenPart, closed: ClosedPart) -> OpenSlices:
        """See what an open part's block holds."""
        slice_bytes, count = part.window.slice_bytes, closed.slice_count
        slices = part.slices[: count * slice_bytes]
        if part.block is not None:
            return cls(part.block, closed.block, slice_bytes, slices, count)
        # Without a log, slices lie where the log's entries would: lanes that are behind fill their places later.
        return cls(part, closed.block, slice_bytes, slices, part.shortest * part.lanes)


class FullBlock(NamedTuple):
    """A block that takes no more slices, in the form in which it stays for now."""

    block: SliceBlock
    is_direct: bool  # its slices lie in memory in place of a log


@dataclass(frozen=True, slots=True)
class StoreContent:
    """All that a store holds at one moment, but for its rows, which follow chunk by chunk."""

    first_tick: int
    next_tick: int
    large: list[int]  # observation leaves in segments, in the order of their fields
    windows: list[Window]
    segments: list[Segment[ClosedPart]]  # the open one last, as it stood, if it had any tick
    searches: dict[str, Any]
    newest: dict[int, Array]  # by small leaf: the next observations of the newest tick, where they have no row yet
    paired: list[int]  # small leaves whose next observations have a column of their own
    scouts: dict[str, Any]
    reward_dtype: np.dtype[Any] | None
    has_invalid: bool


@dataclass(frozen=True, slots=True)
class FrozenStore(StoreContent):
    """A store at one moment, while it goes on."""

    rows: FrozenRows
    versions: dict[int, int]  # of chunks of rows that were written again
    filling: list[OpenSlices]  # by field: what the open segment's block held
    open_tick: int  # where the open segment begins
    transitions: int


class UnchangedStore:
    """Refuses to be pickled once its store was written to: what was written before is not of one moment then."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._next_tick, self._rewrites = store.next_tick, store.rewrites

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        store = self._store
        if (store.next_tick, store.rewrites) != (self._next_tick, self._rewrites):
            raise HoldallError(
                f"the memory was added to while it was pickled ({store.next_tick - self._next_tick} ticks, and "
                f"{store.rewrites - self._rewrites} updates), so what was written is not one moment; throw it away, "
                "hold the threads that write, and save again"
            )
        return bool, ()

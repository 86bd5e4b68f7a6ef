"""Snapshots: all that a store holds at one moment, for checkpoints and pickles; and its rows and logs as records.

In:  rings that go on being written to, and segments.  Out: chunks of rows, what a store consists of, records of them.
Invariant: a chunk holds the rows of its moment, whatever is written over them before it is taken. A record is read only
as what it says it is.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Array, Leaf, count_of, dtype_name, dtype_of
from holdall.storage.batch_source import APART_END, APART_FIELDS, APART_ROOM
from holdall.storage.blocks import address, reserve
from holdall.storage.records import Buffer, CompressedParts, Read, Record, array_of, require_kind
from holdall.storage.slices import ClosedPart, OpenSlices, Segment, Window

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


def chunk_numbers(first_tick: int, next_tick: int, chunk_ticks: int) -> range:
    """Return the numbers of the chunks that hold ticks [first_tick, next_tick); none if there is no tick."""
    if first_tick == next_tick:
        return range(0)
    return range(first_tick // chunk_ticks, -(-next_tick // chunk_ticks))


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


@dataclass(frozen=True, slots=True, eq=False)
class Apart:
    """Next observations that are kept apart, under ascending transition ids: appended at the end, dropped at the front.

    It never changes, so that a snapshot may hold it, and an interrupt leaves the one before or all of the next. What is
    appended lies behind `end`, in the same arrays while they have room.
    """

    ids: NDArray[np.int64]
    rows: Array
    first: int
    end: int

    @classmethod
    def none_of(cls, leaf: Leaf) -> Apart:
        """Begin without any."""
        return cls(np.empty(0, np.int64), np.empty((0, *leaf.shape), leaf.dtype), 0, 0)

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and ids held, and of the room kept for more."""
        return self.ids.nbytes + self.rows.nbytes

    def appended(self, ids: NDArray[np.int64], rows: Array) -> Apart:
        """Return it with rows whose ids are higher than all before; those of the same ids or higher ones go."""
        count, first, end, all_ids, all_rows = len(ids), self.first, self.end, self.ids, self.rows
        if count and end > first and all_ids[end - 1] >= ids[0]:
            end = first + int(np.searchsorted(all_ids[first:end], ids[0]))
        if end + count > len(all_ids) or end < self.end:  # what is replaced stays as it is for snapshots that hold it
            needed = end - first + count
            room = needed + needed // 4 + 16
            all_ids, all_rows = np.empty(room, np.int64), np.empty((room, *rows.shape[1:]), self.rows.dtype)
            all_ids[: end - first], all_rows[: end - first] = self.ids[first:end], self.rows[first:end]
            first, end = 0, end - first
        all_ids[end : end + count], all_rows[end : end + count] = ids, rows
        return Apart(all_ids, all_rows, first, end + count)

    def since(self, first_id: int) -> Apart:
        """Return it without rows of ids below one."""
        gone = int(np.searchsorted(self.ids[self.first : self.end], first_id))
        return replace(self, first=self.first + gone) if gone else self

    def between(self, first_id: int, end_id: int) -> tuple[NDArray[np.int64], Array]:
        """Return those of a range of ids."""
        start, stop = np.searchsorted(self.ids[self.first : self.end], [first_id, end_id]) + self.first
        return self.ids[start:stop], self.rows[start:stop]

    def write_over(self, rows: Array, ids: NDArray[np.int64]) -> None:
        """Overwrite those of `rows` whose id is held here."""
        if self.first == self.end:
            return
        held = self.ids[self.first : self.end]
        place = held.searchsorted(ids)
        found = (held.take(place, mode="clip") == ids).nonzero()[0]
        if found.size:
            rows[found] = self.rows[self.first + place[found]]


class KeptApart:
    """The next observations of a ring that are kept apart now, and room where compiled loops may add more.

    Both are replaced in one step: an interrupt leaves what was there before or all of the new. Loops count in the
    room what they add: who looks whether all is as it was compares the room and its `APART_END`.
    """

    def __init__(self, leaf: Leaf) -> None:
        self.now = Apart.none_of(leaf), np.zeros(len(APART_FIELDS), np.int64)

    @property
    def held(self) -> Apart:
        """All that is held now: another object after every change."""
        held, room = self.now
        if (end := int(room[APART_END])) != held.end:
            held = replace(held, end=end)
            self.now = held, room
        return held

    @property
    def room(self) -> NDArray[np.int64]:
        """Where loops may add rows, see `APART_FIELDS`; another object when that is elsewhere."""
        return self.now[1]

    def hold(self, held: Apart, most: int = 0) -> None:
        """Hold other rows than before; loops may add to them until there are `most`."""
        self.room[APART_ROOM] = 0  # from now on none are added there: an interrupt may come before the next line
        most = min(len(held.ids), held.first + most)
        self.now = held, np.array([address(held.ids), address(held.rows), held.end, most], np.int64)


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
        numbers = chunk_numbers(first_tick, next_tick, chunk_ticks)
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


def new_ring(ticks: int, lanes: int, leaf: Leaf) -> Array:
    """Reserve a ring of `ticks` rows per lane; untouched pages cost nothing."""
    rows = reserve(ticks * lanes * leaf.nbytes)
    return rows.view(leaf.dtype).reshape(ticks, lanes, *leaf.shape)


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


def put_rows(ring: Array, first: int, rows: Array) -> None:
    """Write rows of ticks from `first` on into a ring that is at least as long."""
    start = first % len(ring)
    before_wrap = min(len(rows), len(ring) - start)
    ring[start : start + before_wrap] = rows[:before_wrap]
    ring[: len(rows) - before_wrap] = rows[before_wrap:]


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


# ---------------------------------------------------------------- as records

ROWS, LOGS, PIECE = "rows", "logs", "piece"
PIECE_BYTES = 4 * 2**20
Like = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


def pack_rows(chunk: RowChunk, *, compresses: bool = True) -> list[Buffer]:
    """Return a chunk of rows as a record."""
    parts = CompressedParts(compresses=compresses)
    for name, column in chunk.columns.items():
        parts.put(name, column)
    for name, (ids, rows) in chunk.apart.items():
        parts.put(f"{name}/ids", ids)
        parts.put(f"{name}/apart", rows)
    columns = [[name, dtype_name(array.dtype), list(array.shape[1:])] for name, array in chunk.columns.items()]
    apart = {name: len(ids) for name, (ids, _) in chunk.apart.items()}
    head = {"first_tick": chunk.first_tick, "ticks": chunk.ticks, "columns": columns, "apart": apart}
    return parts.packed(ROWS, head)


def unpack_rows(record: Record, read: Read, first_tick: int, ticks: int, like: Like) -> RowChunk:
    """Read a chunk of rows whose ticks and columns are known."""
    require_kind(record, ROWS, read)
    head = record.head
    columns = [[name, dtype_name(dtype), list(shape)] for name, (shape, dtype) in like.items()]
    if (head["first_tick"], head["ticks"]) != (first_tick, ticks) or sorted(head["columns"]) != sorted(columns):
        raise DamageError(f"the rows at byte {record.start} are of other ticks or columns than the manifest says")
    found = {name: array_of(record, name, read, dtype, (ticks, *shape)) for name, (shape, dtype) in like.items()}
    apart = {}
    for name, count in head["apart"].items():
        (lanes, *shape), dtype = like[name]
        count_of(count, ticks * lanes)
        ids = array_of(record, f"{name}/ids", read, np.dtype(np.int64), (count,))
        ascending = (np.diff(ids) > 0).all() and (count == 0 or first_tick * lanes <= ids[0])
        if not ascending or (count and ids[-1] >= (first_tick + ticks) * lanes):
            raise DamageError(f"the rows at byte {record.start} keep ids apart that are not in order")
        apart[name] = ids, array_of(record, f"{name}/apart", read, dtype, (count, *shape))
    return RowChunk(first_tick, ticks, found, apart)


def pack_logs(parts: Sequence[ClosedPart], *, compresses: bool = True) -> list[Buffer]:
    """Return the logs of a segment as a record."""
    written = CompressedParts(compresses=compresses)
    fields = []
    for number, part in enumerate(parts):
        if part.log is not None:
            written.put(f"log.{number}", part.log)
        log = None if part.log is None else dtype_name(part.log.dtype)
        counts = {"log_rows": part.log_rows, "slices": part.slice_count, "steps": part.steps}
        fields.append({"window": part.window.words(), "log": log, **counts, "new_slices": part.new_slices})
    return written.packed(LOGS, {"fields": fields})


def unpack_logs(
    record: Record, read: Read, lanes: int, leaves: Sequence[Leaf], blocks: Sequence[Any]
) -> list[ClosedPart]:
    """Read the logs of a segment, field by field; `blocks` are the blocks that they name."""
    require_kind(record, LOGS, read)
    fields = record.head["fields"]
    if len(fields) != len(leaves) or len(blocks) != len(leaves):
        raise DamageError(f"the logs at byte {record.start} are of {len(fields)} fields, not {len(leaves)}")
    parts = []
    for number, (words, leaf, block) in enumerate(zip(fields, leaves, blocks, strict=True)):
        window = Window.of_words(words["window"], leaf)
        rows, count, steps, new = (count_of(words[key]) for key in ("log_rows", "slices", "steps", "new_slices"))
        if block.slice_bytes != window.slice_bytes or count > block.used:
            raise DamageError(f"the logs at byte {record.start} name another block than their own")
        log: Any = None
        if words["log"] is not None:
            dtype = dtype_of(words["log"])
            if dtype not in (np.uint16, np.uint32):
                raise DamageError(f"the logs at byte {record.start} are numbers of {dtype}")
            log = array_of(record, f"log.{number}", read, dtype, (rows, lanes))
        elif rows * lanes != count or block.sealed is not None:
            raise DamageError(f"the logs at byte {record.start} count {rows} rows and {count} slices")
        parts.append(ClosedPart(window, log, rows, block, count, steps, new))
    return parts


def pack_piece(slices: NDArray[np.uint8], slice_bytes: int, first: int) -> list[Buffer]:
    """Return some slices of a block that is still being filled as a record."""
    parts = CompressedParts()
    parts.put("slices", slices)
    return parts.packed(PIECE, {"slice_bytes": slice_bytes, "first": first, "count": slices.size // slice_bytes})


def unpack_piece(record: Record, read: Read, slice_bytes: int, first: int, most: int) -> NDArray[np.uint8]:
    """Read some slices of a block, from number `first` on."""
    require_kind(record, PIECE, read)
    count = count_of(record.head["count"])
    most = min(most, max(1, PIECE_BYTES // slice_bytes))
    if (record.head["slice_bytes"], record.head["first"]) != (slice_bytes, first) or count > most:
        raise DamageError(f"the slices at byte {record.start} are others than the manifest says")
    found: NDArray[np.uint8] = array_of(record, "slices", read, np.dtype(np.uint8), (count * slice_bytes,))
    return found


def chunks_of(
    columns: Mapping[str, Ring], apart: Mapping[str, Apart], first_tick: int, next_tick: int, lanes: int
) -> list[RowChunk]:
    """Return the rows of ticks [first_tick, next_tick) as views of rings: two chunks if they wrap around, else one."""
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

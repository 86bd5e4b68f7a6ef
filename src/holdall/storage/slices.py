"""Parts: what one segment holds of one large field.

In:  observations and next observations of all lanes, as rows of bytes, tick by tick.
Out: a cursor per transition, and a record from which kernels read the observations back.
Invariant: an observation is a range of its lane's log. It continues the last one only where
the bytes say so; where they do not, it is written whole. A closed part never changes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Array, Bytes, Leaf
from holdall.storage.batch_source import BatchReader, RowReader
from holdall.storage.blocks import Coder, KeptBlock, Order, SealedSlices, SliceBlock, reserve
from holdall.storage.layout import Window
from holdall.storage.ticks import FastTick, FlatField, Repair, TickWriter

if TYPE_CHECKING:
    from holdall.native import SliceNamer


Log = NDArray[np.uint16] | NDArray[np.uint32]
Cursors = NDArray[np.uint32]
Held = tuple[object, ...]
"""What the addresses of a record point into; referring to it keeps it from being freed."""

NEXT_IS_WHOLE = np.uint32(1 << 31)
"""Set in a cursor whose next observation does not continue the window but follows it."""

RECORD_FIELDS = (
    "log", "log_rows", "log_width", "slices", "slice_count", "outer", "run_bytes", "window", "shift",
    "sealed",
)  # fmt: skip
"""Columns of a table of records, in the order of the struct `part` in structs.h; the library's loader compares them."""
_SEALED = RECORD_FIELDS.index("sealed")
_WINDOW = RECORD_FIELDS.index("window")

_DIRECT_BYTES = 32
"""Slices up to this size lie in the log itself: a number would cost as much."""
_REUSE_THAT_PAYS = 0.25
"""Share of known slices from which on the next segment goes on in the same block."""
_FIRST_LOG_ROWS = 64


def lies_direct(window: Window) -> bool:
    """Whether slices are kept in the order of the log, without numbers."""
    return window.count > 1 and window.slice_bytes <= _DIRECT_BYTES


class OpenPart(ABC):
    """One field in the open segment; how a tick is written is the kernels' affair.

    Args:
        block: Where unique slices go; None if they lie in the log itself.
        arena_bytes: Room for the slices that lie in the log itself.
    """

    def __init__(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> None:
        self.window = window
        self.lanes = lanes
        self.block = block
        self.obs_bytes = window.slice_bytes * window.count
        self.log: NDArray[np.uint32] | None = None
        if block is None:
            rows = arena_bytes // (lanes * window.slice_bytes)
            self.slices = reserve(rows * lanes * window.slice_bytes)
            self._used_before = 0
        else:
            rows = max(_FIRST_LOG_ROWS, 2 * window.count)
            self.slices = block.arena
            self.log = np.zeros((rows, lanes), np.uint32)
            self._used_before = block.used
        self._direct_rows = rows
        self.steps_before = 0  # transitions of the closed parts before this one that name slices of the block

    @abstractmethod
    def append(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """Write one tick, of any dtype and layout with a leading lane axis, and the cursors to it."""

    def append_run(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """Write ticks one after another: all three have a leading time axis. The log has room, or is made to."""
        for now, after, places in zip(obs, next_obs, cursors, strict=True):
            self.append(now, after, places)

    @abstractmethod
    def clear(self) -> None:
        """Forget every tick, and every slice of the block, and keep the memory; nobody may be reading it."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Log entries of the lane that has most."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """Log entries of the lane that has fewest."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Transitions written."""

    @property
    @abstractmethod
    def broken_steps(self) -> int:
        """Transitions whose next observation did not shift as the window says."""

    @property
    @abstractmethod
    def pushed(self) -> int:
        """Slices handed in, known or new."""

    @property
    def used_bytes(self) -> int:
        """Bytes of slices that stand in the part's block or log."""
        if self.block is not None:
            return self.block.used_bytes
        return self.longest * self.lanes * self.window.slice_bytes

    @property
    def new_slices(self) -> int:
        """Slices that this part brought."""
        return self.pushed if self.block is None else self.block.used - self._used_before

    @property
    def added_bytes(self) -> int:
        """Bytes of slices that this part added; a block that it went on in held others before."""
        return self.used_bytes - self._used_before * self.window.slice_bytes

    def has_room(self) -> bool:
        """Whether one more tick fits, even if nothing of it is known."""
        return self.ticks_that_fit() > 0

    def ticks_that_fit(self) -> int:
        """Count the ticks that fit whatever they bring."""
        most = 2 * self.window.count
        if self.block is not None:
            return (self.block.capacity - self.block.used) // (most * self.lanes)
        return (self.log_rows - self.longest) // most

    def block_to_go_on_in(self) -> SliceBlock | None:
        """Return the block if the next segment would otherwise repeat much of it."""
        if self.block is None or self.pushed == 0 or not self.has_room():
            return None
        known = self.pushed - self.new_slices
        context = self.lanes * self.window.count
        pays = (known + context) / self.pushed >= _REUSE_THAT_PAYS
        return self.block if pays else None

    def closed(self) -> ClosedPart:
        """Return the part as it stands, with a log as narrow as its numbers."""
        rows = self.longest
        if self.log is None or self.block is None:
            used = rows * self.lanes
            block = self.block or KeptBlock(self.window.slice_bytes, used, self.slices)
            return ClosedPart(self.window, None, rows, block, used, self.steps, self.new_slices)
        count = self.block.used
        log = self.log[:rows].astype(np.uint16) if count <= 1 << 16 else self.log[:rows].copy()
        return ClosedPart(self.window, log, rows, self.block, count, self.steps, self.new_slices)

    def record(self) -> list[int]:
        """Describe the part to the kernels by the bounds of its memory, which rarely change."""
        count = self.slices.size // self.window.slice_bytes
        return _record(self.window, self.log, self.log_rows, self.slices.ctypes.data, count, 0)

    @property
    def held(self) -> Held:
        """Return what the record points into."""
        return (self.log, self.slices)

    @property
    def log_bytes(self) -> int:
        """Bytes of the log entries in use."""
        return 0 if self.log is None else self.longest * self.lanes * self.log.itemsize

    def _require_tick(self, obs: Array, next_obs: Array, places: int) -> None:
        """Refuse a tick of other lanes or bytes: the loops go by the part's own."""
        lanes, tick_bytes = self.lanes, self.lanes * self.obs_bytes
        if not (obs.nbytes == next_obs.nbytes == tick_bytes and len(obs) == len(next_obs) == places == lanes):
            raise DamageError(
                f"a tick of {obs.nbytes} and {next_obs.nbytes} bytes in {len(obs)} lanes came to a part of "
                f"{tick_bytes} in {lanes}; report this"
            )

    def lengthen_log(self, ticks: int = 1) -> bool:
        """Make room for ticks in a new log, and say whether that had to be; readers go on with the old one."""
        needed = self.longest + 2 * ticks * self.window.count
        if self.log is None or needed <= self.log_rows:
            return False
        longer = np.zeros((max(2 * self.log_rows + 2 * self.window.count, needed), self.lanes), np.uint32)
        longer[: self.log_rows] = self.log
        self.log = longer  # from now on: C follows when it writes next
        return True

    @property
    def log_rows(self) -> int:
        """Entries per lane that there is room for."""
        return self._direct_rows if self.log is None else len(self.log)


@dataclass(frozen=True, slots=True)
class ClosedPart:
    """One field in a closed segment."""

    window: Window
    log: Log | None
    log_rows: int
    block: SliceBlock
    slice_count: int  # slices that stood in the block when the part was closed
    steps: int
    new_slices: int  # slices that this part brought to its block

    @property
    def held(self) -> Held:
        """Return what the record points into."""
        return (self.log, self.block.held)

    @property
    def log_bytes(self) -> int:
        """Bytes of the log."""
        return 0 if self.log is None else self.log.nbytes

    @property
    def overhead_bytes(self) -> int:
        """Bytes that no tier can take away: the log, or the slices that lie in its place."""
        return self.block.used_bytes if self.log is None else self.log.nbytes

    def record(self) -> list[int]:
        """Describe the part to the kernels."""
        sealed = 0 if self.block.sealed is None else self.block.sealed.address
        start = self.block.arena.ctypes.data
        return _record(self.window, self.log, self.log_rows, start, self.slice_count, sealed)


def _record(window: Window, log: Log | None, log_rows: int, slices: int, slice_count: int, sealed: int) -> list[int]:
    start, width = (0, 0) if log is None else (log.ctypes.data, log.itemsize)
    return [
        start, log_rows, width, slices, slice_count,
        window.outer, window.run_bytes, window.count, window.shift, sealed,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Places:
    """Where the observations of a batch lie; holding it keeps them from being freed."""

    records: list[NDArray[np.int64]]  # per field: (segments, len(RECORD_FIELDS))
    segment: NDArray[np.int32]  # (batch,)
    cursors: list[Cursors]  # per field: (batch,)
    lane: NDArray[np.int32]  # (batch,)
    lanes: int
    held: tuple[tuple[Held, ...], ...]  # per field and segment
    rows: NDArray[np.int64] | None = None  # where in the arrays of a larger batch each goes; None: one after another
    reads_files: bool = False
    awaits_files: bool = False  # some of them lie elsewhere, and what is read has to be brought here first

    def window(self, field: int, segment: int) -> int:
        """Return how many slices make an observation of a field in a segment."""
        return int(self.records[field][segment, _WINDOW])

    def sealed_slices(self, field: int) -> dict[int, SealedSlices]:
        """Return the sealed slices that the records of a field name, by address."""
        contents = (content for held in self.held[field] for content in held)
        return {content.address: content for content in contents if isinstance(content, SealedSlices)}

    def damage(self, field: int, row: int, error: int) -> DamageError:
        """Say what is wrong with the block that holds a row.

        Args:
            error: What the system said when it read a file, or 0.
        """
        segment = int(self.segment[row])
        sealed = int(self.records[field][segment, _SEALED]) if 0 <= segment < len(self.records[field]) else 0
        named = self.sealed_slices(field).get(sealed)
        extent = None if named is None else named.extent
        if extent is None:
            return DamageError(
                f"row {row} of the batch points outside its segment, or its bytes are damaged; nothing of the batch "
                "is returned. Load the last checkpoint, and report this"
            )
        why = f"cannot be read ({os.strerror(error)})" if error else "is damaged or was cut short"
        return DamageError(
            f"{extent.file.path} {why}: row {row} of the batch lies in it, and nothing of the batch is returned. Check "
            "the disk, and load the last checkpoint"
        )


class Kernels(RowReader, Protocol):
    """Batches in, batches out; the caller never handles a row alone."""

    name: str
    coder: Coder
    packs_columns: bool  # whether short observations can be packed, and pages of their rings given back

    def pack_columns(
        self,
        run: NDArray[np.int64],
        rings: NDArray[np.int64],
        ring_ticks: int,
        lanes: int,
        out: Bytes,
        scratch: tuple[NDArray[np.uint32], Bytes],
        /,
    ) -> int:
        """Pack the ticks that `run` names, see `RUN_FIELDS`, and describe it there; return the bytes used, or -1.

        Args:
            rings: Addresses, by leaf of the plan.
            scratch: Memory for two numbers a row and one more for every group, and for a row.
        """

    def release(self, first: int, nbytes: int, /) -> None:
        """Give the whole pages of a range of addresses back to the system."""

    def new_block(self, slice_bytes: int, arena: Bytes) -> SliceBlock:
        """Make an empty block of unique slices in `arena`."""

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""

    def new_writer(
        self, flat: Sequence[FlatField], ring_ticks: int, ticks: tuple[int, int], repair: Repair, /
    ) -> TickWriter:
        """Make a writer that has written the ticks from `ticks[0]` up to `ticks[1]`."""

    def new_fast_tick(self, lock: Any, repair: Repair, /) -> FastTick:
        """Make a short way to write ticks, for a memory with this lock."""

    def new_batch_reader(
        self, lock: Any, repair: Repair, is_changed: bytearray, most_kept_bytes: int, threads: int, /
    ) -> BatchReader:
        """Make a short way to draw batches, for a memory with this lock; see `SegmentIndex` for `is_changed`."""

    def gather(
        self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None, pool: Any = None, /
    ) -> None:
        """Fill `obs` and `next_obs`, rows of bytes, with one field of the places; None for one not wanted.

        Args:
            pool: From `new_pool`; without it the calling thread works alone.
        """

    def find(
        self, first_ticks: NDArray[np.int64], ids: NDArray[np.int64], lanes: int, /
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the segment and the lane of every id, given where segments begin."""

    def new_pool(self, threads: int | None = None) -> Any:
        """Make threads that help with `gather`, the caller's among them; None where it uses none; see `ThreadPool`."""

    def namer(self) -> SliceNamer | None:
        """Return what names the slices of a batch, each once; None where that is not compiled."""


AnyPart = OpenPart | ClosedPart


class SegmentIndex:
    """First tick of every segment, and per field a record of every part; the open segment's come last."""

    def __init__(self) -> None:
        self.version = 0  # another one when segments or their blocks are others
        self.is_changed = bytearray(b"\x01")  # 1 with every change; read by C, and set to 0 by who has seen it
        self.first_ticks: NDArray[np.int64] = np.empty(0, np.int64)
        self.records: list[NDArray[np.int64]] = []  # per field: (segments, len(RECORD_FIELDS))
        self.held: list[tuple[Held, ...]] = []  # per field and segment: what its record points into

    def rebuild(self, first_ticks: list[int], fields: list[list[AnyPart]]) -> None:
        """Start over, field by field and segment by segment."""
        self.version += 1
        self.is_changed[0] = 1
        self.first_ticks = np.array(first_ticks, np.int64)
        self.records = [
            np.array([part.record() for part in parts], np.int64).reshape(-1, len(RECORD_FIELDS)) for parts in fields
        ]
        self.held = [tuple(part.held for part in parts) for parts in fields]

    def open_next(self, first_tick: int, closed: list[ClosedPart], following: list[OpenPart]) -> None:
        """The open segment was closed, and another one follows."""
        self.version += 1
        self.is_changed[0] = 1
        self.first_ticks = np.append(self.first_ticks, first_tick)
        for field, (old, new) in enumerate(zip(closed, following, strict=True)):
            rows = np.array([old.record(), new.record()], np.int64)
            self.records[field] = np.concatenate([self.records[field][:-1], rows])
            self.held[field] = (*self.held[field][:-1], old.held, new.held)

    def drop(self, segments: int) -> None:
        """Forget the oldest segments."""
        self.version += 1
        self.is_changed[0] = 1
        self.first_ticks = self.first_ticks[segments:]
        self.records = [records[segments:] for records in self.records]
        self.held = [held[segments:] for held in self.held]

    def update(self, field: int, segment: int, part: AnyPart) -> None:
        """A part lies elsewhere now."""
        self.version += 1
        self.is_changed[0] = 1
        records = self.records[field].copy()
        records[segment] = part.record()
        self.records[field] = records
        held = list(self.held[field])
        held[segment] = part.held
        self.held[field] = tuple(held)


PartT = TypeVar("PartT", OpenPart, ClosedPart)


@dataclass(slots=True)
class Segment(Generic[PartT]):
    """The parts of all large fields over a run of ticks."""

    first_tick: int
    ticks: int
    parts: list[PartT]


def read_tick(kernels: Kernels, part: OpenPart, cursors: Cursors) -> tuple[Bytes, Bytes]:
    """Read the observations and next observations of all lanes in one tick of an open part, as rows of bytes."""
    shape = (part.lanes, part.obs_bytes)
    obs, next_obs = np.empty(shape, np.uint8), np.empty(shape, np.uint8)
    places = Places(
        records=[np.array([part.record()], np.int64)],
        segment=np.zeros(part.lanes, np.int32),
        cursors=[cursors.copy()],
        lane=np.arange(part.lanes, dtype=np.int32),
        lanes=part.lanes,
        held=((part.held,),),
    )
    kernels.gather(places, 0, obs, next_obs)
    return obs, next_obs


def describe_parts(parts: Sequence[AnyPart], window: Window) -> str:
    """Say what was found about a field by its parts, the open one last, for people."""
    found = window.describe()
    fitting = [part for part in parts if part.window == window]
    steps = sum(part.steps for part in fitting)
    if window.count > 1 and steps:
        shared = max(window.count - sum(part.new_slices for part in fitting) / steps, 0.0)
        found = f"{found}; {shared:.1f} of {window.count} slices shared"
    closed = [part for part in parts if isinstance(part, ClosedPart)]
    sealed = [part.block.sealed for part in closed if part.block.sealed is not None]
    if not sealed:
        return found
    kinds = sorted({each.codec.describe() for each in sealed})
    return f"{found}; {len(sealed)} of {len(closed)} segments sealed by {', '.join(kinds)}"


@dataclass(frozen=True, slots=True)
class FrozenBlock:
    """A block that takes no more slices, and what it holds."""

    field: int
    leaf: Leaf
    window: Window
    block: SliceBlock
    lanes: int = 1  # that brought slices in turn
    logs: Callable[[], list[NDArray[Any]]] = list  # slices' numbers, (rows, lanes), of the segments that name the block

    def lane_order(self) -> Order | None:
        """Order the slices as lane after lane shows them; None if there is one lane, or nothing names them."""
        logs = self.logs() if self.lanes > 1 else []
        if not logs:
            return None
        seen, first = np.unique(np.concatenate(logs).T.reshape(-1), return_index=True)
        named = seen[np.argsort(first)]
        order = np.concatenate([named, np.setdiff1d(np.arange(self.block.used), seen)])
        return order.astype(np.uint32) if len(order) == self.block.used else None

"""Slices: how observations are cut so that they overlap (windows), and what a segment holds of a field (parts).

In:  observations and next observations of all lanes, as rows of bytes, tick by tick.
Out: a window; a cursor per transition, and a record from which kernels read the observations back.
Invariant: a window is a proposal. An observation is a range of its lane's log, and continues the last one only where
the bytes say so; else it is written whole: a wrong window costs memory, never truth. A closed part never changes.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Array, Bytes, Leaf, count_of
from holdall.storage.batch_source import Held
from holdall.storage.blocks import KeptBlock, SliceBlock, reserve
from holdall.storage.coded_units import Order, order_by_lanes

Log = NDArray[np.uint16] | NDArray[np.uint32]
Cursors = NDArray[np.uint32]

NEXT_IS_WHOLE = np.uint32(1 << 31)
"""Set in a cursor whose next observation does not continue the window but follows it."""
_DIRECT_BYTES = 32
"""Slices up to this size lie in the log itself: a number would cost as much."""
_REUSE_THAT_PAYS = 0.25
"""Share of known slices from which on the next segment goes on in the same block."""
_FIRST_LOG_ROWS = 64
_ENOUGH = 8
"""Informative pairs after which a window may be named."""
_PATIENCE = 32
"""Informative pairs after which the search is given up."""
_AGREEMENT = 0.75
"""Share of the pairs that a window must explain; resets and skipped steps are the rest."""
_PAIRS_PER_TICK = 4
"""Lanes looked at in one tick: more of them would say the same."""


# ---------------------------------------------------------------- windows


def as_bytes(array: NDArray[Any], lanes: int) -> Bytes:
    """See an array with a leading lane axis as rows of bytes, copying only if it must."""
    contiguous: NDArray[Any] = np.ascontiguousarray(array)
    return contiguous.reshape(lanes, -1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Window:
    """An observation as `count` slices along one axis.

    In memory an observation is `outer` stretches; each holds one run of `run_bytes` bytes of
    every slice, in order. A stack on the first axis has one stretch; on the last, one per pixel.
    """

    axis: int
    unit: int  # elements of the axis in one slice
    count: int
    outer: int
    run_bytes: int
    shift: int  # slices that are new in the next observation

    @classmethod
    def whole(cls, leaf: Leaf) -> Window:
        """See the observation as one slice: nothing but equality is shared."""
        return cls(axis=0, unit=1, count=1, outer=1, run_bytes=leaf.nbytes, shift=1)

    @classmethod
    @functools.lru_cache(maxsize=64)  # a checkpoint asks for the same one with every segment
    def along(cls, leaf: Leaf, axis: int, step: int) -> Window:
        """Cut `leaf` along `axis`, where consecutive observations lie `step` elements apart."""
        length = leaf.shape[axis]
        unit = gcd(step, length)
        inner = prod(leaf.shape[axis + 1 :]) * leaf.dtype.itemsize
        return cls(
            axis=axis,
            unit=unit,
            count=length // unit,
            outer=prod(leaf.shape[:axis]),
            run_bytes=unit * inner,
            shift=step // unit,
        )

    def words(self) -> list[int] | None:
        """Say along which axis it slides and by how many elements; None if it does not."""
        return None if self.count == 1 else [self.axis, self.shift * self.unit]

    @classmethod
    def of_words(cls, words: Any, leaf: Leaf) -> Window:
        """Cut a leaf as `words` said; whatever was read, the window fits the leaf."""
        if words is None:
            return cls.whole(leaf)
        axis, step = (count_of(word) for word in words)
        if axis >= len(leaf.shape) or not 0 < step < leaf.shape[axis]:
            raise DamageError(f"a window of {step} along axis {axis} does not fit a field of shape {leaf.shape}")
        return cls.along(leaf, axis, step)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice."""
        return self.outer * self.run_bytes

    def newest(self, rows: Bytes, slices: int) -> Bytes:
        """Cut the last `slices` slices out of each row: (rows, slices, slice_bytes), contiguous."""
        if slices == self.count and self.outer == 1:
            return rows.reshape(len(rows), self.count, self.run_bytes)
        cut = rows.reshape(len(rows), self.outer, self.count, self.run_bytes)[:, :, -slices:]
        return np.ascontiguousarray(cut.transpose(0, 2, 1, 3)).reshape(len(rows), slices, -1)

    def describe(self) -> str:
        """Say what was found, for people."""
        if self.count == 1:
            return "whole observations"
        return f"window of {self.count} along axis {self.axis}"


class WindowScout:
    """Looks for the window of one field in its first steps.

    A pair of equal observations fits every window and is not counted; so a static first
    screen only makes the search longer.
    """

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._votes: Counter[tuple[int, int]] = Counter()
        self._pairs = 0
        self.finding: Window | None = None
        self.done = not any(length > 1 for length in leaf.shape)

    def state(self) -> list[Any]:
        """Return the evidence so far, as plain numbers."""
        return [self._pairs, [[axis, step, votes] for (axis, step), votes in self._votes.items()]]

    def restore(self, state: Any) -> None:
        """Go on where `state` was returned elsewhere."""
        pairs, votes = state
        self._pairs = int(pairs)
        for axis, step, count in votes:
            if 0 <= axis < len(self._leaf.shape) and 0 < step < self._leaf.shape[axis]:
                self._votes[int(axis), int(step)] = int(count)

    def look(self, obs: Bytes, next_obs: Bytes) -> None:
        """Take one tick as evidence: rows of bytes, one per lane."""
        for before, after in zip(obs[:_PAIRS_PER_TICK], next_obs[:_PAIRS_PER_TICK], strict=True):
            if self.done:
                return
            if np.array_equal(before, after):
                continue
            self._pairs += 1
            for axis in range(len(self._leaf.shape)):
                for step in self._steps(before, after, axis):
                    self._votes[axis, step] += 1
            self._conclude()

    def _steps(self, before: Bytes, after: Bytes, axis: int) -> list[int]:
        """Name the steps along `axis`, up to half its length, by which `after` follows `before`."""
        length = self._leaf.shape[axis]
        if length < 2:
            return []
        old, new = (row.reshape(prod(self._leaf.shape[:axis]), length, -1) for row in (before, after))
        candidates = self._starts(old, new[:, 0])
        return [step for step in candidates if np.array_equal(old[:, step:], new[:, : length - step])]

    @staticmethod
    def _starts(old: NDArray[np.uint8], first: NDArray[np.uint8]) -> list[int]:
        """Where in the older observation the newer one's first element stands."""
        half = old.shape[1] // 2
        standing = (old[:, 1 : half + 1] == first[:, None]).all(axis=(0, 2))
        return [int(step) + 1 for step in np.flatnonzero(standing)[:8]]

    def _conclude(self) -> None:
        if self._pairs < _ENOUGH:
            return
        explaining = [
            (-votes, step / self._leaf.shape[axis], axis, step)
            for (axis, step), votes in self._votes.items()
            if votes >= _AGREEMENT * self._pairs
        ]
        if explaining:
            *_, axis, step = min(explaining)
            self.finding = Window.along(self._leaf, axis, step)
        self.done = bool(explaining) or self._pairs >= _PATIENCE


class WindowSearches:
    """One search a field at a time; the more searches find nothing, the longer the pause before the next."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self.scouts: dict[int, WindowScout] = {}  # of the fields that are looked at
        self._in_vain: dict[int, int] = {}
        self._rest: dict[int, int] = {}  # segments to pass before the next search

    def state(self) -> dict[str, Any]:
        """Return how far the searches are, as plain numbers."""
        return {
            "scouts": {str(field): scout.state() for field, scout in self.scouts.items()},
            "in_vain": {str(field): count for field, count in self._in_vain.items()},
            "rest": {str(field): count for field, count in self._rest.items()},
        }

    def restore(self, state: dict[str, Any], leaves: list[Leaf]) -> None:
        """Go on where `state` was returned elsewhere."""
        self.scouts = {}
        for field, leaf in enumerate(leaves):
            if str(field) in state["scouts"]:
                self.begin(field, leaf)
                self.scouts[field].restore(state["scouts"][str(field)])
        self._in_vain = {int(field): int(count) for field, count in state["in_vain"].items()}
        self._rest = {int(field): int(count) for field, count in state["rest"].items()}

    def begin(self, field: int, leaf: Leaf) -> None:
        """Look at a field from the next tick on."""
        self.scouts[field] = WindowScout(leaf)

    def consider(self, field: int, leaf: Leaf) -> None:
        """Begin a search in a field whose segment closed without a window that fits."""
        if field in self.scouts:
            return
        self._rest[field] = self._rest.get(field, 0) - 1
        if self._rest[field] <= 0:
            self.begin(field, leaf)

    def look(self, obs: list[Array], next_obs: list[Array]) -> list[int]:
        """Show a tick to the scouts; return the fields whose search is over."""
        for field, scout in self.scouts.items():
            scout.look(as_bytes(obs[field], self._lanes), as_bytes(next_obs[field], self._lanes))
        return [field for field, scout in self.scouts.items() if scout.done]

    def end(self, field: int) -> Window | None:
        """Close a search and return what it found."""
        finding = self.scouts.pop(field).finding
        self._in_vain[field] = 0 if finding else self._in_vain.get(field, 0) + 1
        self._rest[field] = 1 << min(self._in_vain[field], 16)
        return finding


# ---------------------------------------------------------------- parts


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


AnyPart = OpenPart | ClosedPart


PartT = TypeVar("PartT", OpenPart, ClosedPart)


@dataclass(slots=True)
class Segment(Generic[PartT]):
    """The parts of all large fields over a run of ticks."""

    first_tick: int
    ticks: int
    parts: list[PartT]


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
        """Order the slices as lane after lane brought them; None if there is one lane, or nothing names them."""
        logs = self.logs() if self.lanes > 1 else []
        return order_by_lanes(np.concatenate(logs), self.block.used) if logs else None


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

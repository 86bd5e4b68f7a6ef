"""The observations of a rollout, written tick by tick and read at places: place = tick * lanes + lane.

    RawFields           observations as they are; each frame of a stack is stored once
    CompressedFields    the same, compressed in the background by a `Store`

`reset` begins another rollout. Raw fields then overwrite the memory of the rollout before: they allocate and free
nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall._native import ObservationLog
from holdall.codec.choice import PREFERENCES
from holdall.errors import ArgumentError
from holdall.machine import pool_threads
from holdall.report import FieldReport, field_name
from holdall.schema import Array, Leaf, Schema, Tree
from holdall.store.budget import Budget
from holdall.store.store import Store
from holdall.store.tuning import Tuning
from holdall.store.windows import Window, WindowDetector

Places = NDArray[np.int64]

_MAX_BROKEN_SHARE = 0.5
"""If a larger share of the observations does not fit the window, `reset` begins the search for another window."""
_MIN_SHARED_BYTES = 4 * 2**20
"""Smallest gather, in bytes, that threads share."""
_PIECE_BYTES = 4 * 2**20
"""Bytes of compressed observations that are read at a time."""
_KEPT_PIECES = 4
"""Pieces whose memory is kept for later pieces."""
_MAX_QUEUED_SEGMENTS = 2
"""Full segments that may wait for compression before `write` waits."""


class RolloutFields(ABC):
    """All observation fields of a rollout. Only one thread may use them at a time."""

    @abstractmethod
    def write(self, tick: int, obs: Sequence[Array]) -> None:
        """Write the observations of one tick, leaf by leaf.

        The arrays have exactly the shapes and dtypes of the leaves, after an axis of lanes. Ticks are written in order.
        A tick may be written again if the call before was interrupted.
        """

    @abstractmethod
    def gather(self, field: int, places: Places, out: Array) -> None:
        """Copy rows of one field to `out`. A negative place gives zeros."""

    @abstractmethod
    def reset(self) -> None:
        """Remove every tick."""

    @abstractmethod
    def report(self, ticks: int) -> list[FieldReport]:
        """Return the bytes of every field. `ticks` ticks were written."""

    def finish(self) -> None:  # noqa: B027  Most fields have nothing to do.
        """Prepare for reading, after the last tick of a rollout."""

    @property
    def backlog(self) -> int:
        """Blocks that wait to be compressed."""
        return 0

    @property
    def failure(self) -> str:
        """Why the last block could not be compressed. Empty if all blocks could."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """End all threads."""


def new_rollout_fields(
    leaves: Sequence[Leaf], ticks: int, lanes: int, compress: str | None, tuning: Tuning | None = None
) -> RolloutFields:
    """Return the observation fields of rollouts of up to `ticks` ticks.

    Args:
        compress: How much slower than a raw gather reading may get: a key of `PREFERENCES`. None: store observations
            uncompressed.
    """
    tuning = Tuning() if tuning is None else tuning
    if compress is None:
        return RawFields(leaves, ticks, lanes, tuning)
    if compress not in tuple(PREFERENCES):
        raise ArgumentError(f"compress ({compress!r}) must be None or one of {sorted(PREFERENCES)}. Pass one of these.")
    return CompressedFields(leaves, ticks, lanes, compress, tuning)


# ---------------------------------------------------------------- raw


class _Rows(Protocol):
    """The stored observations of one field: an `ObservationLog` or `FlatRows`."""

    @property
    def slice_bytes(self) -> int: ...

    @property
    def cursor_bytes(self) -> int: ...

    def write(self, tick: int, obs: Array, /) -> None: ...

    def gather(self, places: Places, out: Array, /) -> None: ...

    def clear(self) -> None: ...


class FlatRows:
    """Rows of one field as a plain array: (ticks, lanes, ...)."""

    slice_bytes = 0
    cursor_bytes = 0

    def __init__(self, leaf: Leaf, ticks: int, lanes: int) -> None:
        self.array: Array = np.zeros((ticks, lanes, *leaf.shape), leaf.dtype)

    def write(self, tick: int, rows: Array) -> None:
        """Write one tick."""
        self.array[tick] = rows

    def gather(self, places: Places, out: Array) -> None:
        """Copy rows to `out`. A negative place gives zeros."""
        ticks, lanes, *shape = self.array.shape
        rows = self.array.reshape(ticks * lanes, *shape)
        rows.take(places, axis=0, out=out, mode="clip")
        if len(places) and places.min() < 0:
            out[places < 0] = 0

    def clear(self) -> None:
        """Do nothing: the next rollout overwrites this one."""


class RawFields(RolloutFields):
    """Observations that are stored as they are. Large gathers are shared among threads."""

    def __init__(self, leaves: Sequence[Leaf], ticks: int, lanes: int, tuning: Tuning) -> None:
        self._fields = [_RawField(leaf, ticks, lanes, tuning) for leaf in leaves]
        self._threads = pool_threads()
        self._executor: ThreadPoolExecutor | None = None

    def write(self, tick: int, obs: Sequence[Array]) -> None:
        """See `RolloutFields`."""
        for field, rows in zip(self._fields, obs, strict=True):
            field.write(tick, rows)

    def gather(self, field: int, places: Places, out: Array) -> None:
        """See `RolloutFields`."""
        gather = self._fields[field].gather
        parts = min(self._threads, len(places), 2 * out.nbytes // _MIN_SHARED_BYTES)
        if parts < 2:
            gather(places, out)
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._threads - 1, "holdall-rollout")
        pieces = list(zip(np.array_split(places, parts), np.array_split(out, parts), strict=True))
        jobs = [self._executor.submit(gather, *piece) for piece in pieces[1:]]
        gather(*pieces[0])
        for job in jobs:
            job.result()

    def reset(self) -> None:
        """See `RolloutFields`."""
        for field in self._fields:
            field.reset()

    def report(self, ticks: int) -> list[FieldReport]:
        """See `RolloutFields`."""
        return [field.report(ticks) for field in self._fields]

    def close(self) -> None:
        """See `RolloutFields`."""
        if self._executor is not None:
            self._executor.shutdown()
        self._executor = None


class _RawField:
    """One observation field. Its first ticks decide how it is stored."""

    def __init__(self, leaf: Leaf, ticks: int, lanes: int, tuning: Tuning) -> None:
        self._leaf = leaf
        self._ticks = ticks
        self._lanes = lanes
        self._detector = WindowDetector(leaf, tuning) if leaf.nbytes > tuning.tiny_field_bytes else None
        # None: the observations are stored as flat rows.
        self._window: Window | None = Window.whole(leaf) if leaf.nbytes > tuning.small_field_bytes else None
        self._rows: _Rows = FlatRows(leaf, ticks, lanes) if self._window is None else self._new_log(self._window)

    def _new_log(self, window: Window) -> ObservationLog:
        return ObservationLog(window.layout(), self._ticks, self._lanes, self._leaf.nbytes)

    def write(self, tick: int, obs: Array) -> None:
        """Write one tick, and search for a window if none is known."""
        self._rows.write(tick, obs)
        if self._detector is None or not self._detector.is_searching or tick == 0:
            return
        if self._detector.look(self._read(tick - 1), self._read(tick)) and self._detector.window is not None:
            self._use_window(self._detector.window, tick)

    def gather(self, places: Places, out: Array) -> None:
        """Copy rows to `out`."""
        self._rows.gather(places, out)

    def reset(self) -> None:
        """Remove every tick. Search for another window if the present one does not fit."""
        if self._detector is not None and not self._is_fitting():
            self._detector.end_segment()
        self._rows.clear()

    def report(self, ticks: int) -> FieldReport:
        """Return the bytes of the field."""
        plain_bytes = ticks * self._lanes * self._leaf.nbytes
        return FieldReport(
            field_name("obs", self._leaf.name),
            slice_bytes=self._rows.slice_bytes,
            log_bytes=self._rows.cursor_bytes,
            row_bytes=plain_bytes if self._window is None else 0,
            plain_bytes=plain_bytes,
            finding="flat rows" if self._window is None else self._window.describe(),
        )

    def _read(self, tick: int) -> Array:
        """Return a copy of one tick. The array that the caller passed may have changed since."""
        out = np.empty((self._lanes, *self._leaf.shape), self._leaf.dtype)
        self._rows.gather(np.arange(tick * self._lanes, (tick + 1) * self._lanes), out)
        return out

    def _use_window(self, window: Window, tick: int) -> None:
        """Store all ticks up to `tick` again, as slices of `window`."""
        log = self._new_log(window)
        for past in range(tick + 1):
            log.write(past, self._read(past))
        self._rows = log
        self._window = window

    def _is_fitting(self) -> bool:
        """Return whether most observations overlap as the window says."""
        if not isinstance(self._rows, ObservationLog) or self._window is None or self._window.count == 1:
            return False
        return self._rows.broken <= _MAX_BROKEN_SHARE * self._rows.ticks * self._lanes


# ---------------------------------------------------------------- compressed


class CompressedFields(RolloutFields):
    """Observations in a `Store` that compresses every full block.

    Every tick of the rollout is the next observation of one tick of the store, whose observation is the tick before.
    """

    def __init__(self, leaves: Sequence[Leaf], ticks: int, lanes: int, compress: str, tuning: Tuning) -> None:
        structure = tuple(range(len(leaves)))
        no_fields = Tree((), ())
        schema = Schema(Tree(tuple(leaves), structure), no_fields, no_fields, lanes)
        tuning = replace(tuning, max_queued_bytes=_MAX_QUEUED_SEGMENTS * tuning.block_bytes)
        budget = Budget.from_settings(None, schema, can_spill=False, tuning=tuning)
        # An interrupted call may leave a tick that is written again, so there is room for more than one rollout.
        self._store = Store(
            schema, 2 * ticks, budget, prefer=compress, tuning=tuning, max_kept_bytes=_KEPT_PIECES * _PIECE_BYTES
        )
        self._store.set_reward_dtype(np.dtype(np.bool_))
        self._leaves = tuple(leaves)
        self._lanes = lanes
        self._previous = tuple(np.zeros((lanes, *leaf.shape), leaf.dtype) for leaf in leaves)
        self._flags = np.zeros(lanes, np.bool_)  # Rewards and flags of all ticks. They are never read.
        self._store_ticks = np.zeros(ticks, np.int64)  # Tick in the store, by tick of the rollout.

    def write(self, tick: int, obs: Sequence[Array]) -> None:
        """See `RolloutFields`."""
        previous = tuple(obs) if tick == 0 else self._previous
        self._store_ticks[tick] = self._store.next_tick
        self._store.append(previous, (), self._flags, tuple(obs), self._flags, self._flags)
        for kept, new in zip(self._previous, obs, strict=True):
            kept[...] = new

    def gather(self, field: int, places: Places, out: Array) -> None:
        """See `RolloutFields`."""
        count = max(1, _PIECE_BYTES // max(self._leaves[field].nbytes, 1))
        for first in range(0, len(places), count):
            self._gather_piece(field, places[first : first + count], out[first : first + count])

    def _gather_piece(self, field: int, places: Places, out: Array) -> None:
        """Copy a few rows to `out`. The store returns them in a new array, which should be small."""
        is_real = places >= 0
        ticks, lanes = np.divmod(places[is_real], self._lanes)
        ids = self._store_ticks[ticks] * self._lanes + lanes
        (rows,) = self._store.view().read(ids, (self._store.columns.next_obs_outputs[field],))
        if is_real.all():
            out[...] = rows
        else:
            out[is_real] = rows
            out[~is_real] = 0

    def reset(self) -> None:
        """See `RolloutFields`."""
        self._store.evict(self._store.next_tick)

    def finish(self) -> None:
        """Wait until every full block is compressed."""
        self._store.wait_idle()

    def report(self, ticks: int) -> list[FieldReport]:
        """See `RolloutFields`."""
        fields = self._store.report()[: len(self._leaves)]
        return [
            replace(field, plain_bytes=ticks * self._lanes * leaf.nbytes)
            for field, leaf in zip(fields, self._leaves, strict=True)
        ]

    @property
    def backlog(self) -> int:
        """See `RolloutFields`."""
        return self._store.backlog

    @property
    def failure(self) -> str:
        """See `RolloutFields`."""
        return self._store.failure

    def close(self) -> None:
        """See `RolloutFields`."""
        self._store.close()


# ---------------------------------------------------------------- final observations


class FinalObservations:
    """True final observations of truncated episodes, in the order in which the episodes ended.

    The arrays of rows double in length when they are full. Every row has the place of its step, and places ascend.
    """

    _FIRST_ROWS = 8

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._count = 0
        self._places = np.empty(0, np.int64)
        self._rows: list[Any] = [np.empty((0, *leaf.shape), leaf.dtype) for leaf in leaves]

    def __len__(self) -> int:
        return self._count

    @property
    def places(self) -> Places:
        """Places of the truncated steps. A view of the stored array."""
        return self._places[: self._count]

    @property
    def nbytes(self) -> int:
        """Bytes of the observations and places that are held."""
        row_bytes = sum(int(rows[: self._count].nbytes) for rows in self._rows)
        return self.places.nbytes + row_bytes

    def gather(self, leaf: int, numbers: NDArray[np.int64], out: Array) -> None:
        """Copy the observations `numbers` of one leaf to `out`. The first observation has number 0."""
        self._rows[leaf].take(numbers, axis=0, out=out, mode="clip")

    def append(self, places: Places, rows: Sequence[Array]) -> None:
        """Store observations, leaf by leaf."""
        end = self._count + len(places)
        if end > len(self._places):
            length = max(2 * len(self._places), end, self._FIRST_ROWS)
            self._rows = [_copy_longer(old, length, self._count) for old in self._rows]
            self._places = _copy_longer(self._places, length, self._count)
        self._places[self._count : end] = places
        for kept, new in zip(self._rows, rows, strict=True):
            kept[self._count : end] = new
        self._count = end

    def drop_from(self, first_place: int) -> None:
        """Remove the observations at `first_place` and later places. Their memory is used again."""
        if self._count > 0 and self._places[self._count - 1] >= first_place:
            self._count = int(np.searchsorted(self.places, first_place))


def _copy_longer(old: Array, length: int, used: int) -> Array:
    """Return an array of `length` rows that begins with the first `used` rows of `old`."""
    new = np.empty((length, *old.shape[1:]), old.dtype)
    new[:used] = old[:used]
    return new

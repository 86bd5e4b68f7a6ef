"""Flat rings: the small fields of a transition, addressed by tick.

In:  rows of every lane, tick by tick.  Out: rows of given ticks and lanes.
Invariant: the row of tick t stands at t modulo the ring's length, which is one more than the
capacity, so that the newest next observation has a place of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Leaf, as_bytes
from holdall.storage.blocks import reserve
from holdall.storage.snapshot import Apart, put_rows

_UNSHARED_BEFORE_PAIRING = 1024
"""Next observations kept apart before it is asked whether sharing pays at all."""


def new_ring(ticks: int, lanes: int, leaf: Leaf) -> Array:
    """Reserve a ring of `ticks` rows per lane; untouched pages cost nothing."""
    rows = reserve(ticks * lanes * leaf.nbytes)
    return rows.view(leaf.dtype).reshape(ticks, lanes, *leaf.shape)


class ObservationRing:
    """A short observation field that keeps each observation once.

    The next observation of a tick is read where the following tick's observation stands. Where
    the two differ (an episode ended in between), the older tick's next observation is kept apart
    under its transition id. Where they differ so often that this costs more than it spares, the
    ring is paired with a second one and both are written in full.
    """

    def __init__(self, leaf: Leaf, lanes: int, ring_ticks: int) -> None:
        self.leaf = leaf
        self._lanes = lanes
        self._ring_ticks = ring_ticks
        self._rows = new_ring(ring_ticks, lanes, leaf)
        self._flat = self._rows.reshape(ring_ticks * lanes, *leaf.shape)
        self._paired: Array | None = None
        self._apart = RowsById(leaf)
        self._expected: bytes | None = None

    def write(self, tick: int, obs: Array, next_obs: Array) -> None:
        """Write one tick; both arrays have a leading lane axis."""
        slot = tick % self._ring_ticks
        if self._paired is None and self._expected != obs.tobytes():
            if self._expected is not None:
                self._keep_apart(tick - 1, slot, obs)
            self._rows[slot] = obs
        if self._paired is None:
            self._rows[slot + 1 if slot + 1 < self._ring_ticks else 0] = next_obs
            self._expected = next_obs.tobytes()
        else:
            self._rows[slot] = obs
            self._paired[slot] = next_obs

    def read(
        self, ids: NDArray[np.int64], slot: NDArray[np.int64], next_slot: NDArray[np.int64]
    ) -> tuple[Array, Array]:
        """Return copies of the observations and next observations at flat (tick, lane) slots."""
        obs = self._flat.take(slot, axis=0)
        if self._paired is not None:
            return obs, self._paired.reshape(self._flat.shape).take(slot, axis=0)
        next_obs = self._flat.take(next_slot, axis=0)
        self._apart.replace(next_obs, ids)
        return obs, next_obs

    @property
    def is_shared(self) -> bool:
        """Whether next observations are found in the following tick."""
        return self._paired is None

    def arrays(self) -> list[Array]:
        """Return the arrays that the field lies in."""
        return [*self.columns().values(), *self._apart.arrays()]

    @property
    def apart_bytes(self) -> int:
        """Bytes that these take, with their ids."""
        return self._apart.nbytes

    def describe(self, kept: int) -> str:
        """Say what was found, for people; `kept` is the number of transitions whose rows are still there."""
        if self._paired is not None:
            return "flat rows; next observations seldom shared, so kept beside"
        share = 100 * (1 - len(self._apart) / kept) if kept else 100.0
        return f"flat rows; {share:.1f} % of next observations shared"

    def state(self, ticks: int) -> dict[str, Any]:
        """Return what the first `ticks` places hold, sharing memory with the ring."""
        paired = None if self._paired is None else self._paired[:ticks]
        return {
            "rows": self._rows[:ticks],
            "paired": paired,
            "apart": self._apart,
            "expected": self._expected,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned elsewhere."""
        self._rows[: len(state["rows"])] = state["rows"]
        if state["paired"] is not None:
            self._paired = new_ring(self._ring_ticks, self._lanes, self.leaf)
            self._paired[: len(state["paired"])] = state["paired"]
        self._apart, self._expected = state["apart"], state["expected"]

    def columns(self) -> dict[str, Array]:
        """Return the rings of rows: of observations, and of next observations if they have one of their own."""
        return {"obs": self._rows} if self._paired is None else {"obs": self._rows, "next": self._paired}

    def apart(self) -> Apart:
        """Return the next observations kept apart now, unharmed by what comes later."""
        return self._apart.freeze()

    def newest_next(self, next_tick: int) -> Array:
        """Copy the next observations of the newest tick, which stand where the next tick's observations will."""
        return np.array(self._rows[next_tick % self._ring_ticks])

    def refill(self, next_tick: int, newest: Array | None, *, is_paired: bool) -> None:
        """Begin to take over rows that were saved.

        Args:
            newest: Next observations of the newest tick, if they have no row of their own.
        """
        if is_paired:
            self._paired = new_ring(self._ring_ticks, self._lanes, self.leaf)
        elif newest is not None:
            self._rows[next_tick % self._ring_ticks] = newest
            self._expected = newest.tobytes()

    def pair(self, first_tick: int, next_tick: int) -> None:
        """Give next observations a ring of their own, with those of the ticks held in it."""
        if self._paired is None:
            self._pair(first_tick, next_tick)

    def put(
        self, first_tick: int, rows: Array, following: Array | None, apart: tuple[NDArray[np.int64], Array] | None
    ) -> None:
        """Take over rows of ticks from `first_tick` on, in order.

        Args:
            following: Their next observations, if these have rows of their own.
            apart: If they have not: ascending ids of those that no later row shows, and these.
        """
        put_rows(self._rows, first_tick, rows)
        if self._paired is not None and following is not None:
            put_rows(self._paired, first_tick, following)
        if self._paired is None and apart is not None:
            self._apart.append(*apart)

    def _keep_apart(self, tick: int, slot: int, obs: Array) -> None:
        """Save the next observations of `tick` that `obs`, about to take their place, is not."""
        standing = as_bytes(self._rows[slot], self._lanes)
        differs = np.flatnonzero((standing != as_bytes(obs, self._lanes)).any(axis=1))
        self._apart.drop_before((tick + 2 - self._ring_ticks) * self._lanes)
        self._apart.append(tick * self._lanes + differs, self._rows[slot][differs])
        kept_ticks = min(tick + 1, self._ring_ticks - 1)
        if len(self._apart) > max(_UNSHARED_BEFORE_PAIRING, kept_ticks * self._lanes // 2):
            self._pair(max(0, tick + 2 - self._ring_ticks), tick + 1)

    def _pair(self, first_tick: int, next_tick: int) -> None:
        """Go over to two full rings, the second for next observations, here of the ticks [first_tick, next_tick)."""
        paired = new_ring(self._ring_ticks, self._lanes, self.leaf)
        ticks = np.arange(first_tick, next_tick)
        ids = ticks[:, None] * self._lanes + np.arange(self._lanes)
        next_obs = self._rows[(ticks + 1) % self._ring_ticks].reshape(ids.size, *self.leaf.shape)
        self._apart.replace(next_obs, ids.reshape(-1))
        paired[ticks % self._ring_ticks] = next_obs.reshape(len(ticks), *self._rows.shape[1:])
        self._paired = paired
        self._apart = RowsById(self.leaf)


class RowsById:
    """Rows under ascending transition ids: appended at the end, dropped at the front."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._ids = np.empty(0, np.int64)
        self._rows = np.empty((0, *leaf.shape), leaf.dtype)
        self._first = 0
        self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and ids held, and of the room kept for more."""
        return self._ids.nbytes + self._rows.nbytes

    def arrays(self) -> list[Array]:
        """Return the arrays of ids and rows."""
        return [self._ids, self._rows]

    def append(self, ids: NDArray[np.int64], rows: Array) -> None:
        """Add rows whose ids are higher than all before."""
        count = len(ids)
        if self._end + count > len(self._ids):
            self._move(len(self) + count)
        self._ids[self._end : self._end + count] = ids
        self._rows[self._end : self._end + count] = rows
        self._end += count

    def drop_before(self, first_id: int) -> None:
        """Forget rows of ids below `first_id`."""
        self._first += int(np.searchsorted(self._ids[self._first : self._end], first_id))

    def replace(self, rows: Array, ids: NDArray[np.int64]) -> None:
        """Overwrite those of `rows` whose id is held here."""
        if self._first == self._end:
            return
        held = self._ids[self._first : self._end]
        place = held.searchsorted(ids)
        found = (held.take(place, mode="clip") == ids).nonzero()[0]
        if found.size:
            rows[found] = self._rows[self._first + place[found]]

    def freeze(self) -> Apart:
        """Return what is held now; what is appended later lies behind it, and what moves leaves it where it is."""
        return Apart(self._ids, self._rows, self._first, self._end)

    def _move(self, needed: int) -> None:
        """Move what is held into new arrays with a quarter of room to spare."""
        room = needed + needed // 4 + 16
        ids, rows = np.empty(room, np.int64), np.empty((room, *self._leaf.shape), self._leaf.dtype)
        ids[: len(self)] = self._ids[self._first : self._end]
        rows[: len(self)] = self._rows[self._first : self._end]
        self._ids, self._rows, self._first, self._end = ids, rows, 0, len(self)


WriteObservation = Callable[[int, Array, Array], None]

_BOOL = np.dtype(np.bool_)


class FastRows:
    """The rows of a tick that are no observations: one action, the reward, the flags."""

    def __init__(self, action: Array, reward: Array, terminated: Array, truncated: Array) -> None:
        self._action = action
        self._reward = reward
        self._terminated = terminated
        self._truncated = truncated
        self._ring_ticks = len(action)
        self._action_shape, self._action_dtype = action.shape[1:], action.dtype
        self._lane_shape, self._reward_dtype = reward.shape[1:], reward.dtype

    def fit(self, action: Any, reward: Any, terminated: Any, truncated: Any) -> bool:
        """Whether every argument is an array of exactly the expected shape and dtype."""
        return (
            type(action) is type(reward) is type(terminated) is type(truncated) is np.ndarray
            and action.dtype is self._action_dtype
            and reward.dtype is self._reward_dtype
            and terminated.dtype is truncated.dtype is _BOOL
            and action.shape == self._action_shape
            and reward.shape == terminated.shape == truncated.shape == self._lane_shape
        )

    def write(self, tick: int, action: Array, reward: Array, terminated: Array, truncated: Array) -> None:
        """Write arguments that fit."""
        slot = tick % self._ring_ticks
        self._action[slot] = action
        self._reward[slot] = reward
        self._terminated[slot] = terminated
        self._truncated[slot] = truncated


class FastTick:
    """Ticks whose observation is one array.

    Args:
        shape: Of a tick's observations, lanes first.
        fills_blocks: Whether they lie in segments, which may have to wait for being sealed.
    """

    def __init__(
        self,
        rows: FastRows,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        write: WriteObservation,
        fills_blocks: bool,
    ) -> None:
        self.fills_blocks = fills_blocks
        self._rows = rows
        self._shape = shape
        self._dtype = dtype
        self._write = write

    def fits(self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any) -> bool:
        """Whether every argument is as expected."""
        return (
            type(obs) is type(next_obs) is np.ndarray
            and obs.dtype is next_obs.dtype is self._dtype
            and obs.shape == next_obs.shape == self._shape
            and self._rows.fit(action, reward, terminated, truncated)
        )

    def write(
        self,
        tick: int,
        obs: Any,
        action: Array,
        reward: Array,
        next_obs: Any,
        terminated: Array,
        truncated: Array,
    ) -> None:
        """Write one tick of arguments that fit."""
        self._write(tick, obs, next_obs)
        self._rows.write(tick, action, reward, terminated, truncated)


class FastDictTick:
    """Ticks whose observation is a Dict of arrays.

    Args:
        fields: Key, shape with lanes first, and dtype of every field.
        small: Key and writer of the fields that lie in rings.
        large: Keys of the fields that lie in segments, in their order.
        write_large: Writes these.
    """

    def __init__(
        self,
        rows: FastRows,
        fields: list[tuple[str, tuple[int, ...], np.dtype[Any]]],
        small: list[tuple[str, WriteObservation]],
        large: list[str],
        write_large: Callable[[int, list[Array], list[Array]], None],
    ) -> None:
        self.fills_blocks = bool(large)
        self._rows = rows
        self._fields = fields
        self._small = small
        self._large = large
        self._write_large = write_large

    def fits(self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, truncated: Any) -> bool:
        """Whether every argument is as expected."""
        fields = self._fields
        if type(obs) is not dict or type(next_obs) is not dict or not len(obs) == len(next_obs) == len(fields):
            return False
        for key, shape, dtype in fields:
            now, after = obs.get(key), next_obs.get(key)
            if not (
                type(now) is type(after) is np.ndarray
                and now.dtype is after.dtype is dtype
                and now.shape == after.shape == shape
            ):
                return False
        return self._rows.fit(action, reward, terminated, truncated)

    def write(
        self,
        tick: int,
        obs: Any,
        action: Array,
        reward: Array,
        next_obs: Any,
        terminated: Array,
        truncated: Array,
    ) -> None:
        """Write one tick of arguments that fit."""
        for key, write in self._small:
            write(tick, obs[key], next_obs[key])
        if self._large:
            large = self._large
            self._write_large(tick, [obs[key] for key in large], [next_obs[key] for key in large])
        self._rows.write(tick, action, reward, terminated, truncated)

"""Layout: how consecutive observations of a field overlap, and how a tick must look to be written as it is.

In:  observations and next observations, as bytes, lane by lane; the arguments of an `add`.
Out: a `Window`: along which axis, in slices of what size, by how many slices they shift; a `FastTick`, which knows
the shape and dtype of every argument.
Invariant: a window is a proposal. Every later step is compared byte for byte, and a step
that does not shift as proposed is stored whole, so a wrong window costs memory, never truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Bytes, Leaf

_ENOUGH = 8
"""Informative pairs after which a window may be named."""
_PATIENCE = 32
"""Informative pairs after which the search is given up."""
_AGREEMENT = 0.75
"""Share of the pairs that a window must explain; resets and skipped steps are the rest."""
_PAIRS_PER_TICK = 4
"""Lanes looked at in one tick: more of them would say the same."""


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
        self._scouts: dict[int, WindowScout] = {}
        self._in_vain: dict[int, int] = {}
        self._rest: dict[int, int] = {}  # segments to pass before the next search

    def state(self) -> dict[str, Any]:
        """Return how far the searches are, as plain numbers."""
        return {
            "scouts": {str(field): scout.state() for field, scout in self._scouts.items()},
            "in_vain": {str(field): count for field, count in self._in_vain.items()},
            "rest": {str(field): count for field, count in self._rest.items()},
        }

    def restore(self, state: dict[str, Any], leaves: list[Leaf]) -> None:
        """Go on where `state` was returned elsewhere."""
        self._scouts = {}
        for field, leaf in enumerate(leaves):
            if str(field) in state["scouts"]:
                self.begin(field, leaf)
                self._scouts[field].restore(state["scouts"][str(field)])
        self._in_vain = {int(field): int(count) for field, count in state["in_vain"].items()}
        self._rest = {int(field): int(count) for field, count in state["rest"].items()}

    def begin(self, field: int, leaf: Leaf) -> None:
        """Look at a field from the next tick on."""
        self._scouts[field] = WindowScout(leaf)

    def consider(self, field: int, leaf: Leaf) -> None:
        """Begin a search in a field whose segment closed without a window that fits."""
        if field in self._scouts:
            return
        self._rest[field] = self._rest.get(field, 0) - 1
        if self._rest[field] <= 0:
            self.begin(field, leaf)

    @property
    def under_way(self) -> bool:
        """Whether any field is looked at."""
        return bool(self._scouts)

    def look(self, obs: list[Array], next_obs: list[Array]) -> list[int]:
        """Show a tick to the scouts; return the fields whose search is over."""
        for field, scout in self._scouts.items():
            scout.look(as_bytes(obs[field], self._lanes), as_bytes(next_obs[field], self._lanes))
        return [field for field, scout in self._scouts.items() if scout.done]

    def end(self, field: int) -> Window | None:
        """Close a search and return what it found."""
        finding = self._scouts.pop(field).finding
        self._in_vain[field] = 0 if finding else self._in_vain.get(field, 0) + 1
        self._rest[field] = 1 << min(self._in_vain[field], 16)
        return finding


WriteObservation = Callable[[int, Array, Array], None]
WriteObservations = Callable[[int, list[Array], list[Array]], None]

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
        write_large: WriteObservations,
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

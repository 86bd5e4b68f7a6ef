"""Quick ticks: the short way of checking and writing a tick that is as expected.

In:  the arguments of an `add`.  Out: whether they fit, and then the tick, written.
Invariant: what fits here is what the general way would accept, and it is written to the same rings
and segments. Whatever is not as expected goes the general way, which finds out what is wrong.

Most ticks are alike, and most observations are short: looking at every field in a Python loop
costs more than writing them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from holdall.schema import Array

WriteObservation = Callable[[int, Array, Array], None]

_BOOL = np.dtype(np.bool_)


class QuickRows:
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


class QuickTick:
    """Ticks whose observation is one array.

    Args:
        shape: Of a tick's observations, lanes first.
        fills_blocks: Whether they lie in segments, which may have to wait for being sealed.
    """

    def __init__(
        self,
        rows: QuickRows,
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


class QuickDictTick:
    """Ticks whose observation is a Dict of arrays.

    Args:
        fields: Key, shape with lanes first, and dtype of every field.
        small: Key and writer of the fields that lie in rings.
        large: Keys of the fields that lie in segments, in their order.
        write_large: Writes these.
    """

    def __init__(
        self,
        rows: QuickRows,
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

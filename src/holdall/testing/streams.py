"""Synthetic environments whose observations overlap, repeat and are interrupted like real ones.

A `Stream` is described by a `LeafPlan` for each observation leaf, by `Mishaps`, and by a seed. Its steps are the
arguments of `add`. The description determines all of them, so a failed test can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.schema import Array, Leaf, Tree
from holdall.testing.oracle import map_leaves, stack_rows

DTYPES = tuple(np.dtype(name) for name in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"))
"""Every dtype that a Box may have and that holdall stores."""

Content = Literal["noise", "table", "constant"]
Padding = Literal["zero", "first", "fresh"]
Values = Literal["any", "halves", "bits", "zeros"]

_TABLE_ROWS = 40
_NAN_BITS = {2: 0x7D01, 4: 0x7FA00001, 8: 0x7FF4000000000001}
"""Signalling NaNs with a payload, by the size of the float in bytes. A cast would make them quiet."""


def random_rows(leaf: Leaf, leading: tuple[int, ...], generator: np.random.Generator) -> Array:
    """Return rows of random bits. Floats have many NaN payloads and negative zeros."""
    dtype = leaf.dtype
    raw = generator.bit_generator.random_raw  # The generator's other methods are much slower for one row.
    count = prod(leading) * prod(leaf.shape)
    rows = raw(-(-count * dtype.itemsize // 8)).view(np.uint8)[: count * dtype.itemsize].view(dtype)
    if dtype.kind == "b":
        rows = (rows.view(np.uint8) & 1).view(dtype)
    elif dtype.kind == "f" and count:
        where = raw(count) & 15
        rows[where == 0] = -0.0
        if dtype.itemsize in _NAN_BITS:
            rows.view(f"u{dtype.itemsize}")[where == 1] = _NAN_BITS[dtype.itemsize] + (raw() & 255)
    return rows.reshape((*leading, *leaf.shape))


def make_narrow(rows: Array, values: Values) -> Array:
    """Return float32 rows with values that fit into two bytes ("halves"), one bit ("bits") or no bits ("zeros").

    Rows of another dtype are returned as they are, and all rows for "any".
    """
    if rows.dtype != np.float32 or values == "any":
        return rows
    words = rows.view(np.uint32)
    if values == "halves":
        return (words & np.uint32(0xFFFF0000)).view(np.float32)
    if values == "bits":
        return (words >> 8 & 1).astype(np.float32)
    return np.zeros_like(rows)


@dataclass(frozen=True, slots=True)
class LeafPlan:
    """Movement of one leaf of an observation from step to step.

    Args:
        axis: Axis along which observations slide. None: consecutive observations have nothing in common.
        step: Number of elements of the axis that are new in the next observation.
        content: New elements: random ("noise"), successive rows of a small table ("table"), or always the same
            ("constant").
        padding: Older elements of the first observation of an episode: zeros ("zero"), copies of its newest elements
            ("first"), or new elements ("fresh").
        repeats: Share of the steps in which the observation does not change.
        later: Plan that replaces this one at tick `later_from`.
    """

    axis: int | None = None
    step: int = 1
    content: Content = "noise"
    padding: Padding = "zero"
    repeats: float = 0.0
    later: LeafPlan | None = None
    later_from: int = 0


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Probabilities, per lane and step, of events that interrupt the flow of observations."""

    ends: float = 0.05  # An episode ends by termination or truncation.
    silent_resets: float = 0.0  # An episode ends without a flag.
    skipped_steps: float = 0.0  # The environment makes a step that is not added.
    foreign_next: float = 0.0  # `next_obs` is random, and is not the lane's observation at any tick.


@dataclass(slots=True)
class _LeafSource:
    """Generator of the observations of all lanes, for one leaf."""

    leaf: Leaf
    plan: LeafPlan
    lanes: int
    generator: np.random.Generator
    current: Array = field(init=False)  # One observation per lane.
    _table: Array = field(init=False)  # Rows of the contents "table" and "constant".
    _position: NDArray[np.int64] = field(init=False)  # First table row of the lane's observation. Wraps around.
    _tick: int = 0

    def __post_init__(self) -> None:
        self._start_plan()
        self.current = self.make_random_rows()
        self.reset(np.ones(self.lanes, np.bool_))

    def begin_tick(self) -> None:
        """Change to the later plan when it is due."""
        if self.plan.later is not None and self._tick >= self.plan.later_from:
            self.plan = self.plan.later
            self._start_plan()
        self._tick += 1

    def advance(self, lanes: NDArray[np.bool_]) -> None:
        """Make one step in the given lanes."""
        moving = lanes & (self.generator.random(self.lanes) >= self.plan.repeats)
        for lane in moving.nonzero()[0].tolist():
            self._slide(lane)

    def reset(self, lanes: NDArray[np.bool_]) -> None:
        """Begin an episode in the given lanes."""
        for lane in lanes.nonzero()[0].tolist():
            self._position[lane] = self.generator.integers(_TABLE_ROWS)
            first = self._make_observation(lane)
            axis = self.plan.axis
            if axis is None or self.plan.padding == "fresh" or first.shape[axis] == 0:
                self.current[lane] = first
                continue
            length = first.shape[axis]
            step = self.plan.step
            newest = np.take(first, np.arange(length - step, length), axis=axis)
            fill = np.zeros_like(first) if self.plan.padding == "zero" else _tile(newest, axis, length)
            kept = np.take(fill, np.arange(length - step), axis=axis)
            self.current[lane] = np.concatenate([kept, newest], axis=axis)

    def _start_plan(self) -> None:
        axis = self.plan.axis
        shape = self.leaf.shape
        element = self.leaf if axis is None else replace(self.leaf, shape=shape[:axis] + shape[axis + 1 :])
        rows = 1 if self.plan.content == "constant" else _TABLE_ROWS
        self._table = random_rows(element, (rows,), self.generator)
        self._position = np.zeros(self.lanes, np.int64)

    def make_random_rows(self) -> Array:
        """Return random observations of all lanes."""
        return random_rows(self.leaf, (self.lanes,), self.generator)

    def _make_observation(self, lane: int) -> Array:
        """Return a whole observation: a random one, or rows of the table from the lane's position on."""
        if self.plan.content == "noise":
            return random_rows(self.leaf, (), self.generator)
        if self.plan.axis is None:
            return np.asarray(self._table[self._position[lane] % len(self._table)])
        positions = self._position[lane] + np.arange(self.leaf.shape[self.plan.axis])
        return np.moveaxis(self._table[positions % len(self._table)], 0, self.plan.axis)

    def _slide(self, lane: int) -> None:
        """Make one step in a lane: drop the oldest elements along the axis, and append new ones."""
        axis = self.plan.axis
        step = self.plan.step
        self._position[lane] += step
        source = self._make_observation(lane)
        if axis is None:
            self.current[lane] = source
            return
        row = self.current[lane]
        before = (slice(None),) * axis
        kept = row.shape[axis] - step
        newest = (*before, slice(kept, None))
        row[*before, slice(kept)] = row[*before, slice(step, None)]
        row[newest] = source[newest]


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One tick of a stream: the arguments of `add`."""

    obs: Any
    action: Any
    reward: Array
    next_obs: Any
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    extras: dict[str, Any]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `add` by name, with extras only if the stream has them."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "extras" or self.extras}


class Stream:
    """Lanes of a synthetic environment. `tick()` makes one step in all of them.

    Args:
        observation_space: Space of observations. Its leaves move by `plans`, in order.
        plans: One plan per leaf. Leaves without a plan are noise.
        extra_values: Values of float32 extras, see `make_narrow`.
        extra_breaks: Share of the ticks in which float32 extras are random instead.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        num_envs: int = 1,
        *,
        plans: Sequence[LeafPlan] = (),
        mishaps: Mishaps | None = None,
        extras: Mapping[str, spaces.Space[Any]] | None = None,
        reward_dtype: Any = np.float32,
        seed: int = 0,
        extra_values: Values = "any",
        extra_breaks: float = 0.0,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.num_envs = num_envs
        self.extras = dict(extras or {})
        self._observation = Tree.of(observation_space, "observation_space")
        self._action = Tree.of(action_space, "action_space")
        self._extras = Tree.of(spaces.Dict(self.extras), "extras")
        self._reward = Leaf("reward", (), np.dtype(reward_dtype))
        self._mishaps = mishaps or Mishaps()
        self._extra_values = extra_values
        self._extra_breaks = extra_breaks
        self._settings = f"plans={list(plans)}, mishaps={mishaps}, seed={seed}"
        self._settings += f", extra_values={extra_values!r}, extra_breaks={extra_breaks}"
        self._generator = np.random.default_rng(seed)
        leaves = self._observation.leaves
        all_plans = [*plans, *[LeafPlan()] * (len(leaves) - len(plans))]
        self._sources = [
            _LeafSource(leaf, plan, num_envs, self._generator) for leaf, plan in zip(leaves, all_plans, strict=True)
        ]

    def __repr__(self) -> str:
        shown = f"{self.observation_space}, {self.action_space}, extras={self.extras}"
        return f"Stream({shown}, num_envs={self.num_envs}, reward_dtype={self._reward.dtype}, {self._settings})"

    def tick(self) -> StreamStep:
        """Make one step in every lane, and return it."""
        generator = self._generator
        lanes = self.num_envs
        chance = generator.random((4, lanes))
        ends = chance[0] < self._mishaps.ends
        silent = chance[1] < self._mishaps.silent_resets
        skipped = chance[2] < self._mishaps.skipped_steps
        foreign = chance[3] < self._mishaps.foreign_next
        truncated = ends & (generator.random(lanes) < 0.5)
        obs = [source.current.copy() for source in self._sources]
        all_lanes = np.ones(lanes, np.bool_)
        for source in self._sources:
            source.begin_tick()
            source.advance(all_lanes)
        next_obs = [source.current.copy() for source in self._sources]
        for source, rows in zip(self._sources, next_obs, strict=True):
            if foreign.any():
                rows[foreign] = source.make_random_rows()[foreign]
            source.reset(ends | silent)
            source.advance(skipped)
        return StreamStep(
            obs=self._observation.build(obs),
            action=self._draw(self._action),
            reward=random_rows(self._reward, (lanes,), generator),
            next_obs=self._observation.build(next_obs),
            terminated=ends & ~truncated,
            truncated=truncated,
            extras=self._draw_extras(),
        )

    def ticks(self, count: int) -> StreamStep:
        """Make `count` steps. Every array gets a leading time axis, as `extend` expects."""
        steps = [self.tick() for _ in range(count)]
        return stack_steps(steps) if steps else _empty_step(self.tick())

    def _draw_extras(self) -> Any:
        drawn = self._draw(self._extras)
        if self._extra_breaks > 0 and self._generator.random() < self._extra_breaks:
            return drawn
        return map_leaves(lambda rows: make_narrow(rows, self._extra_values), drawn)

    def _draw(self, tree: Tree) -> Any:
        return tree.build([random_rows(leaf, (self.num_envs,), self._generator) for leaf in tree.leaves])


def stack_steps(steps: Sequence[StreamStep]) -> StreamStep:
    """Stack ticks along a new leading time axis."""
    return StreamStep(**{name: stack_rows([getattr(step, name) for step in steps]) for name in StreamStep.__slots__})


def _empty_step(step: StreamStep) -> StreamStep:
    def no_rows(array: Array) -> Array:
        return np.empty((0, *array.shape), array.dtype)

    return StreamStep(**{name: map_leaves(no_rows, getattr(step, name)) for name in StreamStep.__slots__})


def _tile(newest: Array, axis: int, length: int) -> Array:
    """Repeat the newest elements along an axis up to `length`."""
    tiled: Array = np.take(newest, np.arange(length) % newest.shape[axis], axis=axis)
    return tiled

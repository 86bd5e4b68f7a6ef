"""Layout: how consecutive observations of a field overlap.

In:  observations and next observations, as bytes, lane by lane.
Out: a `Window`: along which axis, in slices of what size, by how many slices they shift; and which fields lie in rings.
Invariant: a window is a proposal. Every later step is compared byte for byte, and a step
that does not shift as proposed is stored whole, so a wrong window costs memory, never truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.json_state import counted
from holdall.schema import Array, Bytes, Leaf, Schema

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

    def words(self) -> list[int] | None:
        """Say along which axis it slides and by how many elements; None if it does not."""
        return None if self.count == 1 else [self.axis, self.shift * self.unit]

    @classmethod
    def of_words(cls, words: Any, leaf: Leaf) -> Window:
        """Cut a leaf as `words` said; whatever was read, the window fits the leaf."""
        if words is None:
            return cls.whole(leaf)
        axis, step = (counted(word) for word in words)
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


# ---------------------------------------------------------------- which fields lie where

TINY_BYTES = 256
"""Observation fields up to this size always lie in a flat ring: nothing beats it."""
_SMALL_BYTES = 4096
"""Fields up to this size lie in a flat ring, unless a window is found in their first steps, or a budget is small."""
CURSOR_BYTES = 4
"""What a transition of a field in segments takes beside them: where it lies there."""
_FEWEST_TICKS = 2
"""What the smallest segment has to hold."""
FLAG = Leaf("", (), np.dtype(np.bool_))
_REWARD_BYTES = 8


class FieldLayout(NamedTuple):
    """One way to share the observation fields out between rings and segments."""

    large: list[int]  # leaves that lie in segments
    optional: int  # bytes of the rings whose fields could lie in segments, too
    fixed: int  # rings and tables of the full capacity
    segment: int  # the smallest useful segment


def field_layouts(schema: Schema, ring_ticks: int, large: Collection[int] | None = None) -> list[FieldLayout]:
    """Return the ways to lay fields out, those with most rings first; the only one, if the large fields are known."""
    leaves = schema.observation.leaves
    by_size = sorted(range(len(leaves)), key=lambda i: -leaves[i].nbytes)
    must, may = (sum(leaf.nbytes > size for leaf in leaves) for size in (_SMALL_BYTES, TINY_BYTES))
    ways = [by_size[:count] for count in range(must, may + 1)] if large is None else [list(large)]
    return [_layout(schema, ring_ticks, sorted(way)) for way in ways]


def _layout(schema: Schema, ring_ticks: int, large: list[int]) -> FieldLayout:
    leaves, rows = schema.observation.leaves, ring_ticks * schema.num_envs
    small = [leaf for i, leaf in enumerate(leaves) if i not in large]
    fixed = rows * (row_bytes(schema, small) + CURSOR_BYTES * len(large))
    optional = rows * sum(leaf.nbytes for leaf in small if leaf.nbytes > TINY_BYTES)
    segment = _FEWEST_TICKS * 2 * schema.num_envs * sum(leaves[i].nbytes for i in large)
    return FieldLayout(large, optional, fixed, segment)


def row_bytes(schema: Schema, small: Iterable[Leaf]) -> int:
    """Count the bytes of a transition in rings, if each of the small fields lies there once."""
    leaves = (*schema.action.leaves, *schema.extras.leaves, *small)
    return sum(leaf.nbytes for leaf in leaves) + prod(schema.reward_shape) * _REWARD_BYTES + 3 * FLAG.nbytes

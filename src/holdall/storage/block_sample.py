"""Which slices of a block a codec is chosen by: some from everywhere, and stretches of neighbours.

In:  a block, and the order in which it will be sealed.  Out: copies of some of its slices.
Invariant: the same block gives the same samples, and they are gone from memory with the last who refers to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Bytes
from holdall.storage.blocks import reserve

if TYPE_CHECKING:
    from holdall.storage.slices import Window

_KNOWN_SLICES, KNOWN_BYTES = 512, 4 * 2**20
"""Slices that dictionaries are trained on, and those that are measured among them."""
_NEAR_SLICES, _NEAR_SAMPLE_BYTES, _STRETCH = 256, 3 * 2**20, 32
"""Neighbours that candidates compress together, in stretches."""
CHANGED, _CHANGED_SLICES, _CHANGED_SAMPLE_BYTES = (32, 64), 512, 8 * 2**20
"""How many neighbours are tried as changes of each other, and of how many in all: in stretches of the most."""
LEARNT_TOGETHER = 8
"""What such units have in common is learnt from short stretches: they come from many places, and begin with a whole
slice each."""
FEWEST_SAMPLES = 8
"""Of large slices no more are sampled than take so many bytes, but at least so many."""
_GROUPS = (4, 8, 16)
"""How many neighbours are tried together: a transition of a stack of 4 needs 5 of them. They must keep the cap on one
core: right after a trainer's own step its idle threads still spin on the others."""
_MOST_UNIT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class BlockSample:
    """Copies of some slices of a block, so that the block may be given up while a codec is chosen."""

    spread: Bytes  # over the whole block
    near: Bytes  # (stretches, length, bytes): neighbours in the order in which they are sealed
    changing: Bytes  # the same, in longer stretches
    learnt: Bytes  # the same, in short ones from more places ...
    apart: int  # ... of which so many, the first ones, have no slice of the longer ones
    stride: int  # from a slice of a transition to its next one, in a stretch

    @classmethod
    def of(cls, slices: Bytes, window: Window, lanes: int = 1, order: NDArray[np.uint32] | None = None) -> BlockSample:
        """Copy slices of a block, in the order in which lanes that advance together brought it.

        Args:
            order: The order in which it will be sealed; None: as it is.
        """
        spread = spread_over(slices, _KNOWN_SLICES, KNOWN_BYTES)
        stride = 1 if order is not None else lanes
        reach = (window.count + window.shift - 1) * stride + 1  # of a transition, in the block
        most = min(_NEAR_SLICES, _NEAR_SAMPLE_BYTES // window.slice_bytes)
        length = max(min(_STRETCH, most), reach, *groups_of(window))
        length += -length % _GROUPS[0]  # a whole number of the smallest groups
        near = _stretches(slices, order, length, most)
        # Half of the block at most, so that there is something to learn from beside it.
        long = min(len(slices) // 2, _CHANGED_SAMPLE_BYTES // window.slice_bytes, _CHANGED_SLICES)
        is_long = long >= CHANGED[-1] >= reach
        measured = _firsts(len(slices), CHANGED[-1], long) if is_long else np.zeros(0, np.int64)
        changing = _runs(slices, order, measured, CHANGED[-1])
        learnt = _firsts(len(slices), LEARNT_TOGETHER, min(_KNOWN_SLICES, KNOWN_BYTES // window.slice_bytes))
        behind, before = measured + CHANGED[-1], measured - LEARNT_TOGETHER
        is_apart = ((learnt[:, None] >= behind) | (learnt[:, None] <= before)).all(axis=1)
        runs = _runs(slices, order, learnt[np.argsort(~is_apart, kind="stable")], LEARNT_TOGETHER)
        return cls(spread, near, changing, runs, int(is_apart.sum()), stride)


def groups_of(window: Window) -> list[int]:
    """Return how many neighbours are tried together: one, and more where they are not too long."""
    return [1, *(group for group in _GROUPS if group * window.slice_bytes <= _MOST_UNIT_BYTES)]


def spread_over(slices: Bytes, most: int, most_bytes: int) -> Bytes:
    """Copy slices from everywhere, at most so many and so many bytes, but a few of large ones."""
    count = min(len(slices), max(FEWEST_SAMPLES, min(most, most_bytes // slices.shape[1])))
    return _copied(slices, np.linspace(0, len(slices) - 1, count).astype(np.int64))


def _stretches(slices: Bytes, order: NDArray[np.uint32] | None, length: int, most: int) -> Bytes:
    """Copy stretches of `length` neighbours; none if the block is too short."""
    first = _firsts(len(slices), length, most)
    return _runs(slices, order, first, length if len(first) else 1)


def _firsts(slices: int, length: int, most: int) -> NDArray[np.int64]:
    """Return where stretches begin."""
    count = max(1, min(most // length, slices // length)) if slices >= length else 0
    return np.linspace(0, slices - length, count).astype(np.int64)


def _runs(slices: Bytes, order: NDArray[np.uint32] | None, first: NDArray[np.int64], length: int) -> Bytes:
    picked = first[:, None] + np.arange(length)
    return _copied(slices, picked if order is None else order[picked].astype(np.int64))


def _copied(slices: Bytes, numbers: NDArray[np.int64]) -> Bytes:
    """Copy slices to memory that goes back to the system with them: a heap would keep megabytes of it."""
    shape = (*numbers.shape, slices.shape[1])
    room = reserve(numbers.size * slices.shape[1]).reshape(shape)
    return np.take(slices, numbers, axis=0, out=room, mode="clip")


def flat(stretches: Bytes) -> Bytes:
    """Return the slices of all stretches, one after another."""
    return np.ascontiguousarray(stretches).reshape(-1, stretches.shape[-1])


def transitions_in(window: Window, count: int, length: int, stride: int) -> NDArray[np.int64]:
    """Draw transitions from stretches and return the slices of each."""
    in_one = window.count + window.shift
    draws = max(1, min(8, _NEAR_SLICES // (count * in_one)))
    starts = np.random.default_rng(0).integers(0, length - (in_one - 1) * stride, (draws, count))
    starts = (starts + length * np.arange(count)).reshape(-1, 1)
    return (starts + stride * np.arange(in_one)).astype(np.int64)

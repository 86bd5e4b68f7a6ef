"""Other lanes: the transitions of a memory, laid out for another number of lanes.

In:  the ticks held, and both numbers of lanes.  Out: for every tick of the new memory the ids that it takes, in order.
Invariant: every transition comes once, and those of an episode stay in one lane, in their order, unless the episode is
cut: each lane's stream is cut into as few pieces of equal length as fit the new lanes, and older pieces come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.schema import Schema, Tree

_TICKS_AT_ONCE = 64


class Ticks(NamedTuple):
    """Some ticks of the new memory, (ticks, lanes)."""

    ids: NDArray[np.int64]  # in the old memory
    is_held: NDArray[np.bool_]  # False where nothing is left for a lane; the id is then any
    is_last: NDArray[np.bool_]  # of a piece: what follows in the lane is of another time


def steps_of(batch: Batch, ticks: Ticks, valid: NDArray[np.bool_], schema: Schema) -> tuple[Any, ...]:
    """Return the arguments with which a memory is extended by ticks that were gathered elsewhere."""

    def shaped(tree: Tree, value: Any) -> Any:
        leaves = tree.flatten(value, (ticks.ids.size,), "a batch")
        return tree.build([leaf.reshape(*ticks.ids.shape, *leaf.shape[1:]) for leaf in leaves])

    reward, terminated, truncated, is_valid = (
        flat.reshape(ticks.ids.shape) for flat in (batch.reward, batch.terminated, batch.truncated, valid)
    )
    return (
        shaped(schema.observation, batch.obs),
        shaped(schema.action, batch.action),
        reward,
        shaped(schema.observation, batch.next_obs),
        terminated,
        truncated | (ticks.is_last & ~terminated),
        shaped(schema.extras, batch.extras),
        None if is_valid.all() and ticks.is_held.all() else is_valid & ticks.is_held,
    )


@dataclass(frozen=True, slots=True)
class Relaning:
    """How the ticks [first_tick, next_tick) of `lanes` lanes lie in `new_lanes`."""

    first_tick: int
    next_tick: int
    lanes: int
    new_lanes: int

    @property
    def piece_ticks(self) -> int:
        """Ticks of a piece."""
        pieces = self.new_lanes // gcd(self.lanes, self.new_lanes)
        return -(-(self.next_tick - self.first_tick) // pieces)

    @property
    def ticks(self) -> int:
        """Ticks that the new memory gets."""
        return self.piece_ticks * (self.lanes // gcd(self.lanes, self.new_lanes))

    def __iter__(self) -> Iterator[Ticks]:
        length = self.piece_ticks
        for start in range(0, self.ticks, _TICKS_AT_ONCE):
            new_tick = np.arange(start, min(start + _TICKS_AT_ONCE, self.ticks))[:, None]
            piece = new_tick // length * self.new_lanes + np.arange(self.new_lanes)
            part, lane = np.divmod(piece, self.lanes)
            tick = self.first_tick + part * length + new_tick % length
            is_held = tick < self.next_tick
            is_last = is_held & ((new_tick % length == length - 1) | (tick == self.next_tick - 1))
            yield Ticks(np.where(is_held, tick * self.lanes + lane, self.first_tick * self.lanes), is_held, is_last)

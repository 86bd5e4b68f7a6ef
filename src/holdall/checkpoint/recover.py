"""Recovery: what is left of a checkpoint of which a record is damaged.

In:  the errors that reading it gave.  Out: which ticks are lost with it, and stand-ins for what cannot be read.
Invariant: no tick that touches a damaged byte is ever returned: its transitions count as none. All others are as they
were saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Batch
from holdall.schema import Leaf, Schema, Tree
from holdall.storage.blocks import KeptBlock
from holdall.storage.layout import Window
from holdall.storage.records import Like
from holdall.storage.slices import ClosedPart
from holdall.storage.snapshot import RowChunk

_INVALID = "invalid.0"

_LOG = logging.getLogger("holdall")


@dataclass(slots=True)
class Losses:
    """Runs of ticks that are lost, and why."""

    runs: list[tuple[int, int, str]] = field(default_factory=list)  # first tick, ticks, reason

    def lose(self, first_tick: int, ticks: int, reason: str) -> None:
        """Note a run."""
        self.runs.append((first_tick, ticks, reason))

    def tell(self, url: str, number: int) -> None:
        """Say in the log what is lost."""
        for first, ticks, reason in self.runs:
            _LOG.warning(
                "%s, checkpoint %d: ticks %d to %d are lost (%s)", url, number, first, first + ticks - 1, reason
            )

    def marked(self, chunk: RowChunk, lanes: int) -> RowChunk:
        """Mark the ticks of a chunk that are lost as holding no transition."""
        columns = dict(chunk.columns)
        invalid = columns.get(_INVALID, np.zeros((chunk.ticks, lanes), np.bool_)).copy()
        for first, ticks, _ in self.runs:
            start = max(0, first - chunk.first_tick)
            invalid[start : max(start, first + ticks - chunk.first_tick)] = True
        columns[_INVALID] = invalid
        return RowChunk(chunk.first_tick, chunk.ticks, columns, chunk.apart)


def blank_rows(first_tick: int, ticks: int, like: Like) -> RowChunk:
    """Stand in for rows that cannot be read."""
    return RowChunk(
        first_tick, ticks, {name: np.zeros((ticks, *shape), dtype) for name, (shape, dtype) in like.items()}, {}
    )


def blank_parts(leaves: Sequence[Leaf], lanes: int) -> list[ClosedPart]:
    """Stand in for a segment that cannot be read."""
    parts = []
    for leaf in leaves:
        block = KeptBlock(leaf.nbytes, 1, np.zeros(leaf.nbytes, np.uint8))
        parts.append(ClosedPart(Window.whole(leaf), np.zeros((1, lanes), np.uint16), 1, block, 1, 0, 0))
    return parts


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
class LaneChange:
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

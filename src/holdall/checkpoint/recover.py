"""Recovery: what is left of a checkpoint of which a record is damaged.

In:  the errors that reading it gave.  Out: which ticks are lost with it, and stand-ins for what cannot be read.
Invariant: no tick that touches a damaged byte is ever returned: its transitions count as none. All others are as they
were saved.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdall.schema import Leaf
from holdall.storage.blocks import KeptBlock
from holdall.storage.layout import Window
from holdall.storage.records import Like
from holdall.storage.slices import ClosedPart
from holdall.storage.snapshot import RowChunk

_INVALID = "invalid.0"

_LOG = logging.getLogger("holdall")


@dataclass(slots=True)
class LostTicks:
    """Runs of ticks that are lost, and why."""

    runs: list[tuple[int, int, str]] = field(default_factory=list)  # first tick, ticks, reason

    def lose(self, first_tick: int, ticks: int, reason: str) -> None:
        """Note a run."""
        self.runs.append((first_tick, ticks, reason))

    def report(self, url: str, number: int) -> None:
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

"""Batches in one call: what a batch consists of, and where it is read from, for who draws and copies it at once.

In:  where the fields of a memory lie.  Out: a function that draws rows and returns new arrays.
Invariant: what is drawn and returned is what the general way draws and returns. Whatever changes where fields lie ends
this way, or is seen by it; it is offered again with the next batch that goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from holdall.schema import Array
from holdall.storage.layout import RowSources

if TYPE_CHECKING:
    from holdall.storage.rings import Rings
    from holdall.storage.ticks import TickWriter


class BatchArray(NamedTuple):
    """An array of a batch: a column of the rows that are copied from rings, or a large field."""

    shape: tuple[int, ...]  # of one row
    dtype: np.dtype[Any]
    column: int  # -1: a large field, ...
    field: int  # ... this one, ...
    is_next: bool  # ... its next observations


class BatchSource(NamedTuple):
    """Where the fields of a memory lie now, and what a batch of them consists of."""

    rows: RowSources
    writer: Any  # the `TickWriter` that counts ticks
    first_tick: int  # no older one is held
    capacity_ticks: int
    lanes: int
    large_bytes: list[int]  # of an observation of each large field
    arrays: list[BatchArray]

    @classmethod
    def of(cls, rows: RowSources, rings: Rings, writer: TickWriter, ticks: tuple[int, int]) -> BatchSource:
        """Name the arrays in the order of `BatchReader.draw`; those of numbers have rows of length one.

        Args:
            ticks: The oldest tick that may be held, and the capacity.
        """
        spans, leaves = rows.table.spans(1)[3], rings.schema.observation.leaves
        columns: Any = range(len(spans))
        named: Any = rings.rows(columns, rows.large, None)  # each column's number, in its place

        def short(column: int) -> BatchArray:
            return BatchArray(spans[column][0][1:] or (1,), spans[column][1], column, -1, is_next=False)

        arrays = [short(column) for column in (named.action[0], named.ended, named.reward)]
        for i, leaf in enumerate(leaves):
            if i in named.small:
                arrays += [short(column) for column in named.small[i]]
            else:
                field, shape = rows.large.index(i), leaf.shape or (1,)
                arrays += [BatchArray(shape, leaf.dtype, -1, field, is_next=is_next) for is_next in (False, True)]
        return cls(rows, writer, *ticks, rings.lanes, [leaves[i].nbytes for i in rows.large], arrays)


class BatchReader:
    """Draws and copies batches in one call; this one never does.

    `draw(generator, rows, filled, slots)` draws rows as `draw_slots` does, and returns a tuple of new arrays: actions,
    ends, rewards, and observations and next observations, leaf by leaf. It returns 0, and nothing was drawn, if batches
    cannot be made this way now; and the ids that were drawn, if what lies under one of them is damaged.
    """

    nbytes = 0  # kept for the next batches

    def __init__(self) -> None:
        self.draw: Callable[..., Any] = _nothing

    def needs(self, _rows: int) -> bool:
        """Whether it has to be told where fields lie before it draws so many rows."""
        return False

    def offer(self, _source: BatchSource, _rows: int) -> None:
        """Draw batches of up to so many rows from these fields from now on."""

    def end(self) -> None:
        """Draw no more until it is told again where fields lie."""

    def close(self) -> None:
        """Draw no more, end the threads, and let go of everything."""

    def arrays(self) -> list[Array]:
        """Return what is kept for the next batches."""
        return []


def _nothing(*_: Any) -> int:
    return 0

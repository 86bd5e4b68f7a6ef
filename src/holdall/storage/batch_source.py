"""Reading: rows under their ids; and what a batch consists of and is read from, for who draws and copies it at once.

In:  where the fields of a memory lie.  Out: a function that draws rows and returns new arrays.
Invariant: what is drawn and returned is what the general way draws and returns. Whatever changes where fields lie ends
this way, or is seen by it; it is offered again with the next batch that goes the general way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.schema import Array, Bytes
from holdall.storage.layout import RowSources, RowTable, fresh_bytes

if TYPE_CHECKING:
    from holdall.storage.rings import Rings, Rows
    from holdall.storage.segment import Segments
    from holdall.storage.slices import Kernels
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


class StoredRows(ABC):
    """The part of a `Store` that reads."""

    large_segments: Segments
    batch_reader: BatchReader
    _kernels: Kernels
    _rings: Rings
    _writer: TickWriter
    _large: list[int]
    _lanes: int
    _ring_ticks: int
    _capacity_ticks: int
    _not_before: int

    @property
    @abstractmethod
    def next_tick(self) -> int:
        """Number of the tick that is written next."""

    @property
    @abstractmethod
    def first_tick(self) -> int:
        """Oldest tick held."""

    @property
    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""

    @property
    def held(self) -> tuple[int, int]:
        """The first id that is held, and the one behind the last."""
        return self.first_tick * self._lanes, self.next_tick * self._lanes

    @property
    def row_table(self) -> RowTable:
        """How rows are copied from rings: another object when fields lie elsewhere."""
        return self._rings.table(self.large_segments.cursors)

    def read(self, ids: NDArray[np.int64], take: Callable[[int], Bytes] = fresh_bytes) -> Rows:
        """Copy the small fields of `ids`, all of them held, and find the large ones.

        Args:
            take: Returns memory for the copies, from an aligned address on; see `BlockPool.take`.
        """
        held, large = self.held, tuple(self._large)
        segments, wanted = self.large_segments, ids if ids.flags.carray else ids.copy()
        columns = self._rings.read(self._kernels, wanted, held, segments.cursors, take)
        places = segments.places(wanted, columns[-len(large) :]) if large else None
        return self._rings.rows(columns, large, places)

    def offer_batches(self, rows: int) -> None:
        """Have batches of up to so many rows drawn in one call from now on, if there is such a way."""
        reader, oldest = self.batch_reader, self.large_segments.first_tick if self._large else 0
        if reader.needs(rows) and self._rings.reward is not None and not self.disk_bytes:
            ticks = max(self._not_before, oldest), self._capacity_ticks
            reader.offer(BatchSource.of(self.sources(), self._rings, self._writer, ticks), rows)

    def sources(self) -> RowSources:
        """Return what batches are read from, as it is now."""
        held, segments, table = self.held, self.large_segments, self.row_table
        cursors, index = segments.cursors, segments.index
        rows, large, kept = self._ring_ticks * self._lanes, tuple(self._large), tuple(index.held)
        return RowSources(table, held, rows, large, cursors, index.first_ticks, index.records, kept)

    def are_valid(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell real transitions from lanes that made none."""
        return self._rings.are_valid(ids)

    def are_ends(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell the last transitions of episodes."""
        return np.asarray(np.logical_or(*self._rings.flags(ids)))

    def rewards(self, ids: NDArray[np.int64]) -> Array:
        """Copy the rewards of `ids`, of any shape."""
        return self._rings.rewards(ids)

    def outcomes(self, ids: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_], NDArray[np.bool_]]:
        """Copy rewards and flags of `ids`, of any shape."""
        return self._rings.rewards(ids), *self._rings.flags(ids)

    def extra(self, number: int, ids: NDArray[np.int64]) -> Array:
        """Copy one extra of `ids`, of any shape."""
        return self._rings.extra(number, ids)

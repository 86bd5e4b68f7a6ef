"""PositionMap: which transitions of a memory the positions of a storage have."""

from __future__ import annotations

import zlib
from math import prod
from typing import Any

import numpy as np

from holdall.torchrl.fields import Ids


class PositionMap:
    """The transition id of every cell of a storage. Not thread-safe.

    A position is an index of the first dimension, and a cell is one transition of a position. All cells of a position
    are recorded together, and their ids follow each other. Later records have higher ids.

    Args:
        shape: Shape of the storage: the number of positions, then the shape of one position.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._numbers: Ids = np.zeros(shape, np.int64)  # For every cell, its id plus 1. 0: not written yet.
        self._min_number = 0  # Lower bound of the numbers of written cells.

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of positions, then the shape of one position."""
        return self._numbers.shape

    @property
    def rows(self) -> int:
        """Number of cells of one position."""
        return prod(self.shape[1:])

    @property
    def cells(self) -> Ids:
        """The flat index of every cell, in the shape of the storage."""
        return np.arange(self._numbers.size).reshape(self.shape)

    def is_written(self, index: Any) -> bool:
        """Return whether all cells that a NumPy index selects were written."""
        return bool(self._numbers[index].all())

    def find_ids(self, index: Any, positions: int | None = None) -> Ids:
        """Return the ids of the cells that a NumPy index selects. Raise IndexError if one was not written yet.

        `positions` is the number of positions that the index may select from. None: all of them.
        """
        return _require_written(np.asarray(self._numbers[:positions][index]))

    def find_ids_of_cells(self, cells: Ids) -> Ids:
        """Return the ids of cells that are given by their flat indices. Raise IndexError as `find_ids` does."""
        return _require_written(self._numbers.reshape(-1)[cells])

    def record(self, positions: Ids, first_id: int) -> None:
        """Record that `positions` have the transitions from `first_id` on, one position after another."""
        numbers = np.arange(first_id + 1, first_id + 1 + len(positions) * self.rows)
        self._numbers[positions] = numbers.reshape(-1, *self.shape[1:])

    def has_id_before(self, first_id: int) -> bool:
        """Return whether a written cell has an id below `first_id`."""
        if first_id < self._min_number:
            return False
        written = self._first_numbers()
        written = written[written > 0]
        if not len(written):
            return False
        self._min_number = int(written.min())
        return self._min_number <= first_id

    def list_by_age(self, max_ids: int | None = None) -> Ids:
        """Return the written positions, lowest ids first.

        With `max_ids`, return only those within the first `max_ids` ids from the lowest one on.
        """
        numbers = self._first_numbers()
        positions = numbers.nonzero()[0]
        if max_ids is not None and len(positions):
            lowest = numbers[positions].min()
            positions = positions[numbers[positions] < lowest + max_ids]
        return positions[np.argsort(numbers[positions])]

    def order_by_age(self, positions: Ids) -> Ids:
        """Return the indices that sort `positions`: those not written yet, then those with the lowest ids."""
        return np.argsort(self._first_numbers()[positions], kind="stable")

    def _first_numbers(self) -> Ids:
        """Return the number of the first cell of every position."""
        return self._numbers.reshape(len(self._numbers), -1)[:, 0]

    # ---------------------------------------------------------------- checkpoints

    def pack(self) -> bytes:
        """Return all ids, compressed."""
        steps = np.diff(self._numbers.reshape(-1), prepend=0)
        return zlib.compress(steps.astype("<i8").tobytes(), level=1)

    @classmethod
    def unpack(cls, packed: bytes, shape: tuple[int, ...]) -> PositionMap:
        """Return the map that `pack` packed. Raise ValueError if it has another shape."""
        nbytes = 8 * prod(shape)
        # A damaged file must not decompress to more bytes than the shape says.
        steps = zlib.decompressobj().decompress(packed, nbytes + 1)
        if len(steps) != nbytes:
            raise ValueError(f"a map of shape {shape} needs {nbytes} bytes")
        restored = cls(shape)
        restored._numbers = np.cumsum(np.frombuffer(steps, "<i8")).astype(np.int64).reshape(shape)
        return restored

    def has_only_ids_within(self, first_id: int, next_id: int) -> bool:
        """Return whether the ids of all written cells are at least `first_id` and below `next_id`."""
        is_written = self._numbers != 0
        is_within = (self._numbers > first_id) & (self._numbers <= next_id)
        return not bool((is_written & ~is_within).any())


def _require_written(numbers: Ids) -> Ids:
    """Return the ids of numbers of cells. Raise IndexError if a cell was not written yet."""
    if not np.all(numbers):
        raise IndexError(f"index selects {int((numbers == 0).sum())} positions that were not written yet")
    return np.asarray(numbers - 1)

"""Transition ids over shards.

    bits 48 to 62: shard    bits 36 to 47: life    bits 0 to 35: index of the row in its life

The lower 48 bits are the number of the row in its shard. A shard that lost its rows starts a new life, so that no id
names two transitions. The ids of shard 0 in its first life are those of a local memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_SHARD_SHIFT = 48
_LIFE_SHIFT = 36
_ROW_MASK = np.int64((1 << _SHARD_SHIFT) - 1)
_INDEX_MASK = (1 << _LIFE_SHIFT) - 1
MAX_SHARDS = 1 << 15
MAX_LIVES = 1 << 12


def first_row_of_life(life: int) -> int:
    """Return the number of the first row of a shard's life. Numbers repeat after `MAX_LIVES` lives."""
    return (life % MAX_LIVES) << _LIFE_SHIFT


def life_of_row(row: int) -> int:
    """Return the life in which `row` was accepted."""
    return row >> _LIFE_SHIFT


def index_in_life(row: int) -> int:
    """Return how many rows the shard accepted before `row` in the same life."""
    return row & _INDEX_MASK


def lives_of_rows(rows: Ids) -> Ids:
    """Return the life in which each row was accepted."""
    return rows >> _LIFE_SHIFT


def make_ids(shard: int, rows: Ids) -> Ids:
    """Return the transition ids of rows of a shard."""
    return rows | np.int64(shard << _SHARD_SHIFT)


def shards_of_ids(ids: Ids) -> Ids:
    """Return the shard of every id."""
    return ids >> _SHARD_SHIFT


def rows_of_ids(ids: Ids) -> Ids:
    """Return the number of every id's row in its shard."""
    return ids & _ROW_MASK

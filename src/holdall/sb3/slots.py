"""Slots: a memory seen as the arrays that Stable-Baselines3 keeps, (slots, environments, ...).

In:  NumPy-style keys.  Out: the rows they name, gathered; slots never written to read as zeros.
Invariant: tick t stands in slot t modulo the number of slots, as in Stable-Baselines3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError

Read = Callable[[NDArray[np.int64]], NDArray[Any]]
Write = Callable[[NDArray[np.int64], NDArray[Any]], None]


class SlotArray:
    """One field as an array of (slots, environments, *shape) that exists only when it is read.

    Args:
        shape: Shape of the whole, slots and environments first.
        dtype: Of what is read.
        id_of_place: Transition id by flat (slot, environment) place; -1 where nothing stands.
        read: Rows of given ids.
        rows_at_once: Most ids that are read in one go: reading takes memory for all fields, not this one alone.
        write: Takes ids and their new rows; None if the field cannot be written to.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        id_of_place: Callable[[NDArray[np.int64]], NDArray[np.int64]],
        read: Read,
        rows_at_once: int,
        write: Write | None = None,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._id_of_place = id_of_place
        self._read = read
        self._rows_at_once = rows_at_once
        self._write = write

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        """Axes, slots and environments among them."""
        return len(self.shape)

    def __getitem__(self, key: Any) -> Any:
        outer, inner = self._split(key)
        places = self._places()[outer]
        return self._rows(places)[(*[slice(None)] * np.ndim(places), *inner)]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._write is None:
            raise ArgumentError(
                f"{self.name}[...] = ... was tried; a stored {self.name} cannot be changed, only "
                "dones and timeouts can: call reset() and add the transitions again"
            )
        outer, _ = self._split(key)
        places = self._places()[outer]
        ids = self._id_of_place(np.atleast_1d(places).reshape(-1))
        rows = np.broadcast_to(np.asarray(value), np.shape(places)).reshape(-1)
        held = ids >= 0
        self._write(ids[held], rows[held])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.name} is gathered when it is read, so it is always a copy")
        whole = self._rows(self._places())
        return whole if dtype is None else whole.astype(dtype)

    def _places(self) -> NDArray[np.int64]:
        return np.arange(self.shape[0] * self.shape[1]).reshape(self.shape[:2])

    def _split(self, key: Any) -> tuple[Any, tuple[Any, ...]]:
        """Part a key into what picks slots and environments, and what picks inside a row."""
        keys = key if isinstance(key, tuple) else (key,)
        outer, inner = keys[:2], keys[2:]
        plain = all(part is ... or isinstance(part, slice | int | np.integer) for part in inner)
        leading = inner and (outer[0] is ... or outer[1] is ...)
        # There NumPy moves the axes of arrays to the front, past a slice that comes before them.
        moved = inner and isinstance(outer[0], slice) and not isinstance(outer[1], slice | int | np.integer)
        if any(part is None for part in keys) or leading or moved or not plain:
            raise ArgumentError(
                f"{self.name}[{key!r}]: new axes, leading ellipses and arrays of elements are not understood; read "
                f"np.asarray(buffer.{self.name}) first, or the rows and then their elements"
            )
        return outer, inner

    def _rows(self, places: Any) -> NDArray[Any]:
        """Gather rows for an array of places of any shape."""
        flat = np.atleast_1d(places).reshape(-1)
        ids = self._id_of_place(flat)
        rows = np.zeros((len(flat), *self.shape[2:]), self.dtype)
        held = np.flatnonzero(ids >= 0)
        for begin in range(0, len(held), self._rows_at_once):
            some = held[begin : begin + self._rows_at_once]
            rows[some] = self._read(ids[some]).reshape(len(some), *self.shape[2:])
        return rows.reshape((*np.shape(places), *self.shape[2:]))

"""SlotArray: one field of a buffer as a NumPy array whose rows are gathered when they are read.

Stable-Baselines3's buffers show their fields as plain arrays, and code around them indexes, compares and averages these
arrays. A SlotArray returns the same values as the plain array, for every key that NumPy accepts. Gathered rows are
copies. Where NumPy would return a view, the copy is read-only: writing to it would not change the buffer, so it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from holdall.errors import ArgumentError

FindIds = Callable[[NDArray[np.int64]], NDArray[np.int64]]
ReadRows = Callable[[NDArray[np.int64]], NDArray[Any]]
WriteRows = Callable[[NDArray[np.int64], NDArray[Any]], None]
KeyParts = tuple[tuple[Any, ...], tuple[Any, ...], bool]
"""Parts of a key that select rows, parts that select inside a row, and whether NumPy would return a view."""

_COMBINE: dict[str, Any] = {"min": np.minimum, "max": np.maximum, "any": np.logical_or, "all": np.logical_and}
"""Reductions that can be computed piece by piece, exactly. Sums of integers are a further one."""
_MAX_ELEMENTS = 2**20
"""Maximum number of elements that `_read_elements` reads in one step."""


class SlotArray(NDArrayOperatorsMixin):
    """One field of a buffer, read like an array of (slots, environments, *shape).

    Args:
        name: Name of the field, for errors.
        shape: Shape of the whole array. The first `row_axes` axes count rows.
        dtype: Dtype of the elements.
        find_ids: Returns the transition ids of flat positions over the row axes, and -1 for a position without one.
        read: Returns the rows of ids.
        max_rows: Maximum number of ids that one call of `read` gets, which bounds the memory that reading takes.
        write: Writes new rows of ids. None if the field cannot be written to.
        row_axes: Number of leading axes that count rows: 2 for slots and environments, 1 if both are in one axis.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        find_ids: FindIds,
        read: ReadRows,
        max_rows: int,
        write: WriteRows | None = None,
        row_axes: int = 2,
    ) -> None:
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._find_ids = find_ids
        self._read = read
        self._write = write
        self._max_rows = max_rows
        self._row_axes = row_axes

    def flattened(self) -> SlotArray:
        """Return the same field with slots and environments in one axis, environment by environment."""
        slots, lanes, *inner = self.shape

        def find_ids(positions: NDArray[np.int64]) -> NDArray[np.int64]:
            lane, slot = np.divmod(positions, slots)
            return self._find_ids(slot * lanes + lane)

        shape = (slots * lanes, *inner)
        return SlotArray(self.name, shape, self.dtype, find_ids, self._read, self._max_rows, row_axes=1)

    @property
    def ndim(self) -> int:
        """Number of axes, those of the rows included."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that a plain array would take. The buffer's `report()` has the bytes that it really takes."""
        return self.size * self.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        step = max(1, self._max_rows // prod(self.shape[1 : self._row_axes]))
        for begin in range(0, len(self), step):
            yield from self[begin : begin + step]

    def __contains__(self, value: Any) -> bool:
        return bool(np.any(self == value))

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        if any(part is None for part in parts) and all(
            part is None or part is ... or _is_basic(part) for part in parts
        ):
            return self._read_with_new_axes(parts)
        split = self._split_key(parts)
        if split is None:
            return self._read_elements(key)
        outer, inner, is_view = split
        positions = self._select_positions(outer)
        rows = self._read_rows(positions)
        rows.flags.writeable = not is_view
        # NumPy returns a single element as an array if the key has an ellipsis, and as a scalar if it has none.
        row_axes = [...] if any(part is ... for part in parts) else [slice(None)] * np.ndim(positions)
        return rows[(*row_axes, *inner)]

    def __setitem__(self, key: Any, value: Any) -> None:
        if self._write is None:
            raise ArgumentError(
                f"{self.name}[...] = ... was tried, and stored {self.name} cannot be changed. Only dones and timeouts "
                "of a replay buffer can be. Call reset() and add the steps again."
            )
        if not np.isin(np.asarray(value), (0, 1)).all():
            raise ArgumentError(f"{self.name}[...] = {value!r} was tried, and {self.name} are flags. Write 0 or 1.")
        written = np.full(self.shape, -1, self.dtype)
        written[key] = value
        positions = np.flatnonzero(written >= 0)
        ids = self._find_ids(positions)
        rows = written.reshape(-1)[positions]
        is_held = ids >= 0
        if rows[~is_held].any():
            raise ArgumentError(
                f"{self.name}[{key!r}] = {value!r} was tried, and {int(np.count_nonzero(~is_held))} of these slots "
                "have no transition. Add transitions first."
            )
        self._write(ids[is_held], rows[is_held])

    def copy(self, order: Any = "C") -> NDArray[Any]:
        """Return the plain array."""
        return np.array(self, order=order)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.name} is gathered when it is read, so it is always a copy")
        whole = self._read_rows(self._number_rows())
        if dtype is not None:
            whole = whole.astype(dtype, copy=False)
        whole.flags.writeable = bool(copy)
        return whole

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **settings: Any) -> Any:
        plain = [np.asarray(value) if isinstance(value, SlotArray) else value for value in inputs]
        call = getattr(ufunc, method)
        if not any(isinstance(value, SlotArray) for value in out):
            if out:
                settings["out"] = out
            return call(*plain, **settings)
        target: SlotArray = out[0]
        target[...] = call(*plain, **settings)
        return target

    def __getattr__(self, name: str) -> Any:
        attribute = None if name.startswith("__") else getattr(np.ndarray, name, None)
        if attribute is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if callable(attribute):
            return partial(self._call, name)
        return getattr(np.asarray(self), name)

    def __dlpack__(self, **settings: Any) -> Any:
        """Export the plain array. Without this method, torch would read the field row by row."""
        return np.array(self).__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return np.empty(0).__dlpack_device__()

    def __reduce__(self) -> Any:
        """Return the plain array as the result of copying and unpickling."""
        return np.asarray, (np.array(self),)

    def __repr__(self) -> str:
        return f"SlotArray({self.name}, shape={self.shape}, dtype={self.dtype})"

    def _call(self, name: str, *args: Any, **settings: Any) -> Any:
        """Call a method of the plain array. Compute exact reductions piece by piece, to save memory."""
        given = {key: value for key, value in settings.items() if value is not None}
        is_integer_sum = self.dtype.kind in "biu" and name in {"sum", "mean"}
        if (name in _COMBINE or is_integer_sum) and not args and not given and self.size:
            return self._reduce(name)
        return getattr(np.asarray(self), name)(*args, **settings)

    def _reduce(self, name: str) -> Any:
        """Reduce the whole array, piece by piece."""
        rows = prod(self.shape[: self._row_axes])
        pieces = (range(rows)[begin : begin + self._max_rows] for begin in range(0, rows, self._max_rows))
        method = "sum" if name == "mean" else name
        results = [getattr(self._read_rows(np.array(piece)), method)() for piece in pieces]
        if name in _COMBINE:
            return _COMBINE[name].reduce(results)
        total = np.add.reduce(results)
        if name == "sum":
            return total
        return np.float64(total) / self.size

    def _number_rows(self) -> NDArray[np.int64]:
        """Return the flat position of every row, in the shape of the row axes."""
        rows = self.shape[: self._row_axes]
        return np.arange(prod(rows)).reshape(rows)

    def _select_positions(self, outer: tuple[Any, ...]) -> Any:
        """Return the flat positions that `outer`, the parts of a key for the row axes, selects."""
        if not all(isinstance(part, slice | int | np.integer) for part in outer):
            return self._number_rows()[outer]
        selected: Any = np.int64(0)
        for count, part in zip(self.shape[: self._row_axes], outer, strict=True):
            along = range(count)[part]
            selected = np.add.outer(selected * count, np.array(along, np.int64))
        return selected

    def _split_key(self, key: tuple[Any, ...]) -> KeyParts | None:
        """Split a key into a selection of rows and a selection inside of rows.

        Return None if the second selection cannot be applied to the result of the first one.
        """
        parts = self._expand_key(key)
        if parts is None:
            return None
        outer: list[Any] = []
        axes = 0
        while axes < self._row_axes:
            part = parts.pop(0)
            outer.append(part)
            axes += _count_axes(part)
        has_arrays = not all(_is_basic(part) for part in outer)
        # If an integer follows an array, NumPy may move the array's axes to the front, before a slice that precedes it.
        may_move = has_arrays and isinstance(outer[0], slice) and not all(isinstance(part, slice) for part in parts)
        if axes > self._row_axes or may_move or not all(_is_basic(part) for part in parts):
            return None
        return tuple(outer), tuple(parts), not has_arrays

    def _expand_key(self, parts: tuple[Any, ...]) -> list[Any] | None:
        """Return a key with parts for all axes, and no ellipsis. Return None if only NumPy can interpret the key."""
        if any(part is None or _count_axes(part) == 0 for part in parts if part is not ...):
            return None
        missing = self.ndim - sum(_count_axes(part) for part in parts if part is not ...)
        dots = [number for number, part in enumerate(parts) if part is ...]
        if missing < 0 or len(dots) > 1:
            return None
        at = dots[0] if dots else len(parts)
        return [*parts[:at], *[slice(None)] * missing, *parts[at + 1 :]]

    def _read_with_new_axes(self, parts: tuple[Any, ...]) -> NDArray[Any]:
        """Read with a key that also inserts new axes. Read without them, and insert them afterwards."""
        rest = tuple(part for part in parts if part is not None)
        along = tuple(slice(None) if isinstance(part, slice) else part for part in parts if not _is_integer(part))
        widened: NDArray[Any] = np.asarray(self[rest])[along]
        widened.flags.writeable = False
        return widened

    def _read_elements(self, key: Any) -> Any:
        """Read element by element. NumPy applies the key to arrays of row numbers and of positions inside rows."""
        inner = self.shape[self._row_axes :]
        row_numbers = self._number_rows().reshape(*self.shape[: self._row_axes], *[1] * len(inner))
        rows = np.asarray(np.broadcast_to(row_numbers, self.shape)[key])
        places = np.asarray(np.broadcast_to(np.arange(prod(inner)).reshape(inner), self.shape)[key])
        elements: NDArray[Any] = np.empty(np.shape(rows), self.dtype)
        flat = elements.reshape(-1)
        for begin in range(0, flat.size, _MAX_ELEMENTS):
            some = slice(begin, begin + _MAX_ELEMENTS)
            wanted, which = np.unique(rows.flat[some], return_inverse=True)
            flat[some] = self._read_rows(wanted).reshape(len(wanted), -1)[which, places.flat[some]]
        return elements[()]

    def _read_rows(self, positions: Any) -> NDArray[Any]:
        """Gather the rows at an array of positions of any shape. Positions without a transition are zeros."""
        flat = np.atleast_1d(positions).reshape(-1)
        ids = self._find_ids(flat)
        inner = self.shape[self._row_axes :]
        rows = np.zeros((len(flat), *inner), self.dtype)
        held = np.flatnonzero(ids >= 0)
        for begin in range(0, len(held), self._max_rows):
            some = held[begin : begin + self._max_rows]
            rows[some] = self._read(ids[some]).reshape(len(some), *inner)
        return rows.reshape((*np.shape(positions), *inner))


def _is_integer(part: Any) -> bool:
    return isinstance(part, int | np.integer) and not isinstance(part, bool)


def _is_basic(part: Any) -> bool:
    return isinstance(part, slice) or _is_integer(part)


def _count_axes(part: Any) -> int:
    """Return the number of axes that a part of a key indexes, or 0 if only NumPy can tell."""
    if part is None or isinstance(part, bool | np.bool_) or (isinstance(part, np.ndarray) and part.ndim == 0):
        return 0
    if _is_basic(part):
        return 1
    try:
        array = np.asarray(part)
    except ValueError:
        return 0
    return array.ndim if array.dtype.kind == "b" else min(array.ndim, 1)


class SlotField:
    """Descriptor that exposes one field of a buffer as a SlotArray, or as a dict of SlotArrays.

    The buffer's method `view_field(name)` makes the array whenever the attribute is read. Assigning to the attribute
    writes to the array.
    """

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, buffer: Any, _: type | None = None) -> Any:
        if buffer is None:
            return self
        return buffer.view_field(self._name)

    def __set__(self, buffer: Any, value: Any) -> None:
        array = buffer.view_field(self._name)
        if isinstance(array, dict):
            raise ArgumentError(
                f"{self._name} = ... was tried, and stored {self._name} cannot be changed. Call reset() and add the "
                "steps again."
            )
        array[...] = value

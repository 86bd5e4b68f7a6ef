"""Conversion of the arguments of `add`, with the casts that assigning to Stable-Baselines3's arrays makes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError

_TIME_LIMIT_KEY = "TimeLimit.truncated"
_FLOAT32 = np.dtype(np.float32)


def cast(
    array: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, *, reshapes: bool = False
) -> NDArray[Any]:
    """Return `array` with `shape` and `dtype`, as assigning it to an array of Stable-Baselines3 would store it.

    Axes of length 1 may be added or removed. Axes in another order are refused, as Stable-Baselines3 refuses them.

    Args:
        name: Name of the argument, for errors.
        reshapes: Whether any shape with the same number of elements is accepted, as for actions.
    """
    if type(array) is np.ndarray and array.dtype == dtype and array.shape == shape:
        return array
    try:
        rows: NDArray[Any] = np.asarray(array)
        rows = rows.astype(dtype, copy=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{name} is a {type(array).__name__} that cannot be stored as {dtype} ({error}). Pass an array."
        ) from error
    if rows.shape == shape:
        return rows
    has_same_axes = [axis for axis in rows.shape if axis != 1] == [axis for axis in shape if axis != 1]
    try:
        if has_same_axes or reshapes:
            return rows.reshape(shape)
        return np.broadcast_to(rows, shape)
    except ValueError as error:
        raise ArgumentError(
            f"{name} has shape {rows.shape}, expected {shape}: {shape[0]} environments, then the shape of the space. "
            "Pass an array of that shape."
        ) from error


def cast_flags(given: Any, shape: tuple[int, ...], name: str) -> NDArray[np.bool_]:
    """Return one bool per environment. `given` may be bools, or numbers that are 0 or 1."""
    if type(given) is np.ndarray and given.dtype == np.bool_ and given.shape == shape:
        return given
    flags = cast(given, shape, _FLOAT32, name)
    if getattr(given, "dtype", None) != np.bool_ and not np.isin(flags, (0, 1)).all():
        raise ArgumentError(f"{name} is {given}, and flags are 0 or 1. Pass True or False for each environment.")
    return np.asarray(flags != 0)


def read_time_limits(infos: Any, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Return for each environment whether a time limit ended its episode. Return None if no time limit did."""
    try:
        given = [info.get(_TIME_LIMIT_KEY, False) for info in infos]
    except (AttributeError, TypeError) as error:
        raise ArgumentError(
            f"infos is a {type(infos).__name__} without a dict for each environment ({error}). Pass a list of dicts, "
            "or make the buffer with handle_timeout_termination=False."
        ) from error
    if not any(given):
        return None
    flags = [0 if flag is None else flag for flag in given]
    return cast_flags(flags, shape, f'infos[...]["{_TIME_LIMIT_KEY}"]')

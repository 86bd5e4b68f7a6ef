"""Conversion between gymnasium spaces and flat lists of named leaves.

`flatten_space` refuses every space that cannot be stored bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import SpaceError

Structure = int | dict[str, "Structure"] | tuple["Structure", ...]
"""Nesting of a space: the number of a leaf, or nested structures by key or by position."""
LeafForm = tuple[str, tuple[int, ...], np.dtype[Any]]
"""Name, shape and dtype of a leaf."""
STORABLE_KINDS = "biuf"


def join_path(path: str, key: str) -> str:
    """Return the name of the leaf `key` below `path`."""
    return f"{path}.{key}" if path else key


def flatten_space(space: spaces.Space[Any] | None, path: str, argument: str, leaves: list[LeafForm]) -> Structure:
    """Append the leaves of a space to `leaves`, and return their nesting.

    Raise SpaceError, which names `argument`, if the space cannot be stored bit for bit.
    """
    where = f"{argument}[{path!r}]" if path else argument
    if isinstance(space, spaces.Dict):
        return {
            key: flatten_space(child, join_path(path, str(key)), argument, leaves)
            for key, child in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            flatten_space(child, join_path(path, str(index)), argument, leaves)
            for index, child in enumerate(space.spaces)
        )
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        raise SpaceError(
            f"{where} is a {type(space).__name__}. holdall stores Box, Discrete, MultiBinary, MultiDiscrete, Dict and "
            "Tuple spaces. Encode it as one of these."
        )
    if space.shape is None or space.dtype is None:
        raise SpaceError(f"{where} needs a fixed shape and dtype. Make the space with both.")
    dtype = np.dtype(space.dtype)
    if dtype.kind not in STORABLE_KINDS:
        remedy = "Use a bool, integer or floating point dtype."
        if dtype.kind == "c":
            remedy = "Store the real and the imaginary part in a last axis of two."
        raise SpaceError(f"{where} has dtype {dtype}, which holdall does not store. {remedy}")
    if not dtype.isnative:
        raise SpaceError(f"{where} has dtype {dtype}, which has the byte order of other machines. Use np.{dtype.name}.")
    # np.dtype(dtype.str) has the usual one of several C types of the same size, see `holdall.schema.unify_type`.
    leaves.append((path, tuple(int(n) for n in space.shape), np.dtype(dtype.str)))
    return len(leaves) - 1


def stored_space(shape: tuple[int, ...], dtype: np.dtype[Any]) -> spaces.Box:
    """Return a space for stored arrays of a shape and dtype. Its bounds allow every value."""
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(int(limits.min), int(limits.max), shape, dtype.type)

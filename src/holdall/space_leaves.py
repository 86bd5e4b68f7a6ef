"""The leaves of gymnasium's spaces, and the space of a stored array.

`flatten_space` returns name, shape and dtype of every leaf of a space, and how the leaves are nested. It refuses spaces
whose values cannot be stored bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.errors import SpaceError

Structure = int | dict[str, "Structure"] | tuple["Structure", ...]
"""The number of a leaf, or the structures that are nested below it."""
LeafForm = tuple[str, tuple[int, ...], np.dtype[Any]]
"""The name of a leaf, its shape and its dtype."""
STORABLE_KINDS = "biuf"


def joined(path: str, key: str) -> str:
    """Return the name of the child `key` of `path`."""
    return f"{path}.{key}" if path else key


def flatten_space(space: spaces.Space[Any] | None, path: str, argument: str, leaves: list[LeafForm]) -> Structure:
    """Append the leaves of `space` to `leaves`. Return how they are nested.

    Raise SpaceError, which names `argument` and `path`, if the space cannot be stored.
    """
    where = f"{argument}[{path!r}]" if path else argument
    if isinstance(space, spaces.Dict):
        return {
            key: flatten_space(child, joined(path, str(key)), argument, leaves) for key, child in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            flatten_space(child, joined(path, str(index)), argument, leaves) for index, child in enumerate(space.spaces)
        )
    if not isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete):
        raise SpaceError(
            f"{where} is a {type(space).__name__}; holdall stores Box, Discrete, MultiBinary, "
            "MultiDiscrete, Dict and Tuple spaces, so encode it as one of these"
        )
    if space.shape is None or space.dtype is None:
        raise SpaceError(f"{where} has no fixed shape and dtype; give it both")
    dtype = np.dtype(space.dtype)
    if dtype.kind not in STORABLE_KINDS:
        remedy = "use a bool, integer or floating point dtype"
        if dtype.kind == "c":
            remedy = "store real and imaginary part as a last axis of two"
        raise SpaceError(f"{where} has dtype {dtype}, which holdall does not store; {remedy}")
    if not dtype.isnative:
        raise SpaceError(
            f"{where} has dtype {dtype}, with bytes in the order of other machines; holdall stores this machine's, "
            f"so use np.{dtype.name}"
        )
    leaves.append((path, tuple(int(n) for n in space.shape), dtype))
    return len(leaves) - 1


def stored_space(shape: tuple[int, ...], dtype: np.dtype[Any]) -> spaces.Box:
    """Return a space for a stored array. Its bounds are those of the dtype, because values are never checked."""
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(int(limits.min), int(limits.max), shape, dtype.type)

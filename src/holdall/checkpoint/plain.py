"""Plain trees: nested dicts, lists, numbers and arrays as JSON and parts of a record, and back.

In:  what samplers and generators say of themselves.  Out: the same, without pickle.
Invariant: every number comes back as it was. JSON's readers cut whole numbers beyond 53 bits, and know no NaN, so
these are written in hexadecimal; arrays are written as bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import CheckpointError, DamageError

_SAFE = 2**53
_MOST_DEPTH = 32
_DTYPE = re.compile(r"(\|b1|[<|][iuf](1|2|4|8|16))")


def encode(value: Any, arrays: list[NDArray[Any]], what: str, depth: int = 0) -> Any:
    """Return what JSON can hold; arrays are appended to `arrays` and named by their place there."""
    if depth > _MOST_DEPTH:
        raise CheckpointError(f"{what} is nested deeper than {_MOST_DEPTH}; make it flatter")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise CheckpointError(f"{what} has keys that are no text, or begin with $; name them otherwise")
        return {key: encode(child, arrays, f"{what}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [encode(child, arrays, what, depth + 1) for child in value]
    if isinstance(value, np.ndarray):
        return _array_words(value, arrays, "$array", what)
    if isinstance(value, bytes):
        return _array_words(np.frombuffer(value, np.uint8), arrays, "$bytes", what)
    return _scalar_words(value.item() if isinstance(value, np.generic) else value, what)


def _array_words(value: NDArray[Any], arrays: list[NDArray[Any]], kind: str, what: str) -> Any:
    if value.dtype.kind not in "biuf":
        raise CheckpointError(f"{what} holds an array of {value.dtype}; only numbers can be saved")
    arrays.append(value)
    return {kind: len(arrays) - 1, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}


def _scalar_words(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_SAFE < value < _SAFE else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": value.hex()}
    raise CheckpointError(f"{what} holds a {type(value).__name__}; numbers, text, arrays, dicts and lists can be saved")


def decode(value: Any, arrays: Mapping[int, bytes], depth: int = 0) -> Any:
    """Return what `encode` was given; lists stand for tuples too."""
    if depth > _MOST_DEPTH:
        raise DamageError("a saved state is nested too deeply to be one of holdall's")
    if isinstance(value, list):
        return [decode(child, arrays, depth + 1) for child in value]
    if not isinstance(value, dict):
        return value
    if "$int" in value:
        return int(value["$int"], 16)
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$bytes" in value:
        return arrays[value["$bytes"]]
    if "$array" in value:
        rows = np.frombuffer(arrays[value["$array"]], dtype_of(value["dtype"]))
        return rows.reshape([int(length) for length in value["shape"]]).copy()
    return {key: decode(child, arrays, depth + 1) for key, child in value.items()}


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a name, if it is one of numbers in little-endian order."""
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise DamageError(f"a checkpoint names the dtype {text!r}, which holdall does not store")
    return np.dtype(text)


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name a dtype, in little-endian order."""
    return str(dtype.newbyteorder("<").str)

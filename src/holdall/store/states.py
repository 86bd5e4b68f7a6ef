"""States: trees of numbers, text, bytes and arrays, as a record.

A memory saves the states that its sampler, its generator and its store need to continue. Every number is restored
exactly: integers of more than 53 bits, infinities and NaN are written as text, because JSON readers round or refuse
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.checks import read_count, refuse_malformed
from holdall.errors import CheckpointError, DamageError
from holdall.schema_json import dtype_from_json, dtype_to_json
from holdall.store.records import MAX_RECORD_BYTES, Buffer, Read, Record, dump_json, pack_record, parse_json

STATE = "state"

_MAX_JSON_INTEGER = 2**53
_MAX_DEPTH = 32


def encode_state(value: Any, arrays: list[NDArray[Any]], what: str, depth: int = 0) -> Any:
    """Return `value` as types that JSON has. Arrays are appended to `arrays` and referred to by their index.

    `what` names the value in errors.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{what} is nested more than {_MAX_DEPTH} levels deep. Make it flatter.")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) and not key.startswith("$") for key in value):
            raise CheckpointError(f"{what} has a key that is not text or starts with '$'. Use other keys.")
        return {key: encode_state(child, arrays, f"{what}[{key!r}]", depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [encode_state(child, arrays, what, depth + 1) for child in value]
    if isinstance(value, np.ndarray):
        return _encode_array(value, arrays, "$array", what)
    if isinstance(value, bytes):
        return _encode_array(np.frombuffer(value, np.uint8), arrays, "$bytes", what)
    return _encode_scalar(value.item() if isinstance(value, np.generic) else value, what)


def _encode_array(value: NDArray[Any], arrays: list[NDArray[Any]], kind: str, what: str) -> Any:
    if value.dtype.kind not in "biuf":
        raise CheckpointError(f"{what} has an array of dtype {value.dtype}. Only arrays of numbers can be saved.")
    arrays.append(np.asarray(value, value.dtype.newbyteorder("<")))
    return {kind: len(arrays) - 1, "dtype": dtype_to_json(value.dtype), "shape": list(value.shape)}


def _encode_scalar(value: Any, what: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -_MAX_JSON_INTEGER < value < _MAX_JSON_INTEGER else {"$int": hex(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": value.hex()}
    raise CheckpointError(
        f"{what} has a {type(value).__name__}. Only numbers, text, bytes, arrays, dicts and lists can be saved."
    )


def decode_state(value: Any, arrays: Mapping[int, bytes | NDArray[np.uint8]], depth: int = 0) -> Any:
    """Return the value that was passed to `encode_state`. Tuples have become lists."""
    if depth > _MAX_DEPTH:
        raise DamageError(f"A saved state is nested more than {_MAX_DEPTH} levels deep.")
    if isinstance(value, list):
        return [decode_state(child, arrays, depth + 1) for child in value]
    if not isinstance(value, dict):
        return value
    if "$int" in value:
        return int(value["$int"], 16)
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$bytes" in value:
        return bytes(arrays[value["$bytes"]])
    if "$array" in value:
        rows = np.frombuffer(arrays[value["$array"]], dtype_from_json(value["dtype"]))
        return rows.reshape([int(length) for length in value["shape"]]).copy()
    return {key: decode_state(child, arrays, depth + 1) for key, child in value.items()}


def pack_state(state: Mapping[str, Any]) -> list[Buffer]:
    """Return a state as a record."""
    arrays: list[NDArray[Any]] = []
    tree = dump_json(encode_state(state, arrays, "the memory's state"))
    contents: dict[str, Buffer | NDArray[Any]] = {str(number): array for number, array in enumerate(arrays)}
    contents["tree"] = tree
    return pack_record(STATE, {"count": len(arrays)}, contents)


def read_state(record: Record, read: Read) -> dict[str, Any]:
    """Return the state of a record. Raise DamageError if the record does not have one."""
    record.require_kind(STATE)
    with refuse_malformed(f"The state {record.place}"):
        count = read_count(record.head["count"], len(record.arrays))
        arrays = {number: record.read_bytes(str(number), read, MAX_RECORD_BYTES) for number in range(count)}
        tree = decode_state(parse_json(record.read_bytes("tree", read, MAX_RECORD_BYTES)), arrays)
        if not isinstance(tree, dict):
            raise TypeError("it is not an object")
        return tree

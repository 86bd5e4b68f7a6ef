"""Infos: the dictionaries that environments hand out, kept as JSON and arrays.

In:  dicts of JSON values, tuples, NumPy arrays and scalars.  Out: equal ones, new every time.
Invariant: what is kept is text and numbers; nothing of it can run code when it is read back.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError

_TAG = "~holdall"
_KINDS = "biuf"
_JSON = (bool, int, float, str)


def pack_info(info: dict[str, Any]) -> bytes:
    """Write an info as one line of JSON, followed by the bytes of its arrays."""
    arrays: list[bytes] = []
    plain = _plain(info, "infos", arrays)
    return json.dumps(plain, separators=(",", ":")).encode() + b"\n" + b"".join(arrays)


def unpack_info(packed: bytes) -> dict[str, Any]:
    """Read an info back."""
    text, _, rows = packed.partition(b"\n")
    info: dict[str, Any] = _restored(json.loads(text), rows)
    return info


class InfoSlots:
    """Infos as an array of (slots, environments) that exists only when it is read."""

    def __init__(self, slots: int, lanes: int) -> None:
        self.shape = (slots, lanes)
        self._packed: list[bytes | None] = [None] * (slots * lanes)

    def write(self, slot: int, packed: list[bytes]) -> None:
        """Keep one tick's infos, packed."""
        lanes = self.shape[1]
        self._packed[slot * lanes : (slot + 1) * lanes] = packed

    def state(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return all infos as bytes, one after another, and their lengths; -1 where there is none."""
        lengths = [-1 if packed is None else len(packed) for packed in self._packed]
        joined = b"".join(packed for packed in self._packed if packed is not None)
        return np.frombuffer(joined, np.uint8), np.array(lengths, np.int64)

    def restore(self, joined: NDArray[np.uint8], lengths: NDArray[np.int64]) -> None:
        """Take over what `state` returned elsewhere."""
        if lengths.shape != (len(self._packed),) or np.maximum(lengths, 0).sum() != joined.size:
            raise DamageError(f"{lengths.size} infos of {joined.size} bytes were saved, {len(self._packed)} are kept")
        ends = np.cumsum(np.maximum(lengths, 0))
        raw = joined.tobytes()
        self._packed = [
            None if length < 0 else raw[end - length : end]
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]

    def __getitem__(self, key: Any) -> Any:
        places = np.arange(self.shape[0] * self.shape[1]).reshape(self.shape)[key]
        flat = [self._packed[place] for place in np.atleast_1d(places).reshape(-1).tolist()]
        found: NDArray[Any] = np.empty(len(flat), object)
        found[:] = [{} if packed is None else unpack_info(packed) for packed in flat]
        return found[0] if np.ndim(places) == 0 else found.reshape(np.shape(places))


def _plain(value: Any, path: str, arrays: list[bytes]) -> Any:
    """Turn a value into JSON; arrays are put aside and named by their place."""
    if value is None or type(value) in _JSON:
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
        rows = np.asarray(value)
        arrays.append(rows.tobytes())
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_TAG: kind, "dtype": rows.dtype.str, "shape": rows.shape, "at": sum(map(len, arrays[:-1]))}
    if isinstance(value, dict) and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _plain(child, f"{path}[{key!r}]", arrays) for key, child in value.items()}
    if isinstance(value, tuple | list):
        items = [_plain(child, f"{path}[{index}]", arrays) for index, child in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    raise ArgumentError(
        f"{path} is a {type(value).__name__}; copy_info_dict keeps infos as JSON and arrays: None, bool, int, float, "
        "str, lists, tuples, dicts with string keys, and NumPy arrays of numbers. Leave it out in a wrapper, or use "
        "copy_info_dict=False"
    )


def _restored(value: Any, rows: bytes) -> Any:
    if isinstance(value, list):
        return [_restored(child, rows) for child in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _restored(child, rows) for key, child in value.items()}
    if kind == "tuple":
        return tuple(_restored(child, rows) for child in value["items"])
    dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(rows, dtype, count, value["at"]).reshape(shape).copy()
    return array if kind == "array" else array[()]

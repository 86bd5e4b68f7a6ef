"""Layout of a compressed block: places of slices, units, and the bytes of one unit. C does the same for batches.

A block is cut into units of neighbouring slices. With several lanes, neighbours are slices of one lane: the slices are
sorted by lane before they are cut, and a table has the place of every slice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.errors import DamageError

if TYPE_CHECKING:
    from holdall.storage.blocks import Coded

Order = NDArray[np.uint32]
"""The number of the slice in every place."""
SlicePlaces = NDArray[np.uint16] | NDArray[np.uint32]
"""The place of every slice among those of the units: the inverse of an order."""


def places_in(order: Order) -> SlicePlaces | None:
    """Invert an order; None if slices keep the order of their numbers."""
    count = len(order)
    numbers = np.arange(count)
    if np.array_equal(order, numbers):
        return None
    places: SlicePlaces = np.empty(count, place_dtype(count))
    require_permutation(order)
    places[order] = numbers
    return places


def place_dtype(count: int) -> np.dtype[Any]:
    """Return the dtype of the places of `count` slices."""
    return np.dtype(np.uint16 if count <= 1 << 16 else np.uint32)


def require_permutation(places: NDArray[Any]) -> None:
    """Raise a DamageError if two slices share a place, or a place is empty."""
    if not np.array_equal(np.sort(places), np.arange(len(places))):
        raise DamageError("two slices of a block share a place; nothing of the block is used")


def order_by_lanes(log: NDArray[Any], count: int) -> Order | None:
    """Sort `count` slices by the lane that showed them first; None if `log` names a slice that does not exist.

    Args:
        log: The numbers of slices, (rows, lanes). Slices that are not in it come last.
    """
    lanes = log.shape[1]
    seen, first = np.unique(log, return_index=True)
    if seen.size and seen[-1] >= count:
        return None
    lane_of = np.full(count, lanes)
    lane_of[seen] = first % lanes
    return lane_of.argsort(kind="stable").astype(np.uint32)


def places_of(coded: Coded, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the places of slices among those of the units; a DamageError names one that does not exist."""
    outside = numbers[(numbers < 0) | (numbers >= coded.count)]
    if outside.size:
        raise DamageError(f"slice {int(outside[0])} is not in its block; nothing of it is returned")
    if coded.places is None:
        return numbers
    places: NDArray[np.int64] = coded.places[numbers].astype(np.int64)
    if (places >= coded.count).any():
        raise DamageError("a slice has a place outside of its block; nothing of it is returned")
    return places


def units_for(coded: Coded, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the units that hold the slices in `places`, in ascending order."""
    return np.unique(places // coded.codec.group)


def unpacked_bytes(coded: Coded, units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes that come of units: the last one may have fewer slices."""
    group = coded.codec.group
    unpacked: NDArray[np.int64] = np.minimum(group, coded.count - units * group) * coded.codec.transform.coded_bytes
    return unpacked


def in_memory(coded: Coded) -> Coded:
    """Return the same with its units in memory; they are read from their file and checked if they lie in one."""
    if isinstance(coded.data, np.ndarray):
        return coded
    coded.data.bring()
    units = b"".join(unit_of(coded, number) for number in range(len(coded.offsets) - 1))
    return replace(coded, data=np.frombuffer(units, np.uint8))


def unit_of(coded: Coded, number: int) -> bytes:
    """Return the compressed bytes of one unit."""
    start, end = int(coded.offsets[number]), int(coded.offsets[number + 1])
    if not start <= end <= coded.data.nbytes:
        raise DamageError(f"unit {number} is damaged; nothing of it is returned")
    if isinstance(coded.data, np.ndarray):
        return coded.data[start:end].tobytes()
    content = coded.data.read(start, end)
    if xxhash.xxh64_intdigest(content) & 0xFFFFFFFF != coded.data.checks[number]:
        raise DamageError(f"unit {number} in {coded.data.file.path} is damaged; nothing of it is returned")
    return content

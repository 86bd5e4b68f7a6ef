"""What lies where in a coded block: places of slices, units, and the bytes of one unit. C does the same for batches.

In:  a coded block; the lane that brought each slice.  Out: places, lane after lane; units, checked if they were read.
Invariant: whatever the lanes are, every slice has a place of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.schema import Bytes

if TYPE_CHECKING:
    from holdall.storage.blocks import Coded

Order = NDArray[np.uint32]


MOST_LANES = 256


_IN_HALF_BYTES = 16


_RUNS = 256, 512
"""Slices from one count to the next, of up to 16 lanes and of more; as in decode.c."""


@dataclass(frozen=True, slots=True, eq=False)
class SlicePlaces:
    """Where the slices of a block stand in its units: lane after lane, those of a lane in the order of their numbers.

    Whatever the lanes are, every slice has a place of its own. To find it, C counts the slices of its lane in a run.
    """

    lanes: Bytes  # that brought each slice; two in a byte where there are no more than 16
    firsts: NDArray[np.uint16] | NDArray[np.uint32]  # (runs, lanes): where the first slice of a lane in a run stands

    @classmethod
    def of(cls, order: Order) -> SlicePlaces | None:
        """Find lanes in an order, which says what slice stands in every place; None: they stand by their numbers."""
        if np.array_equal(order, np.arange(len(order))):
            return None
        if not np.array_equal(np.sort(order), np.arange(len(order))):
            raise DamageError("two slices stand in one place, or one in none; nothing of their block is used")
        passed = np.cumsum(order[1:] < order[:-1])
        if passed[-1] >= MOST_LANES:
            raise DamageError(f"slices stand in {passed[-1] + 1} lanes, and {MOST_LANES} are the most; report this")
        lanes = np.zeros(len(order), np.uint8)
        lanes[order[1:]] = passed
        return cls.counted(lanes)

    @classmethod
    def counted(cls, lanes: Bytes) -> SlicePlaces:
        """Count the slices of each lane."""
        count, most = len(lanes), int(lanes.max(initial=0)) + 1
        in_halves, dtype = most <= _IN_HALF_BYTES, "u2" if count <= 1 << 16 else "u4"
        run = _RUNS[not in_halves]
        runs = -(-count // run)
        within = np.bincount(np.arange(count) // run * most + lanes, minlength=runs * most).reshape(runs, most)
        total = within.sum(axis=0)
        firsts = (total.cumsum() - total + within.cumsum(axis=0) - within).astype(dtype)
        even = np.append(lanes, np.zeros(count % 2, np.uint8))
        halves: Bytes = even[::2] | even[1::2] << np.uint8(4)
        return cls(halves if in_halves else lanes, firsts)

    @classmethod
    def stored(cls, lanes: Bytes, count: int) -> SlicePlaces:
        """Count lanes as they were stored; a DamageError if they are those of another number of slices."""
        if len(lanes) == -(-count // 2):
            lanes = _apart(lanes)[:count]
        if len(lanes) != count:
            raise DamageError(f"{len(lanes)} lanes are said to have brought {count} slices; nothing of them is used")
        return cls.counted(lanes)

    def are_of(self, count: int) -> bool:
        """Whether they can be the places of so many slices."""
        in_halves = self.firsts.shape[1] <= _IN_HALF_BYTES
        runs = -(-count // _RUNS[not in_halves])
        return len(self.lanes) == (-(-count // 2) if in_halves else count) and len(self.firsts) == runs

    def find(self, numbers: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the places of some of `count` slices."""
        lanes = _apart(self.lanes)[:count] if self.firsts.shape[1] <= _IN_HALF_BYTES else self.lanes
        places = np.empty(count, np.int64)
        places[lanes.argsort(kind="stable")] = np.arange(count)
        return places[numbers]


def order_by_lanes(log: NDArray[Any], count: int) -> Order | None:
    """Order slices as lane after lane brought them, by the rows of their numbers; None if these name others."""
    lanes = log.shape[1]
    seen, first = np.unique(log, return_index=True)
    if seen.size and seen[-1] >= count:
        return None
    brought = np.full(count, MOST_LANES)  # what nothing names comes last
    brought[seen] = first % lanes * (MOST_LANES - 1) // max(lanes, MOST_LANES - 1)
    return brought.argsort(kind="stable").astype(np.uint32)


def _apart(halves: Bytes) -> Bytes:
    return np.column_stack([halves & 15, halves >> 4]).reshape(-1)


def places_of(coded: Coded, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where slices stand among those of the units; a DamageError names one that is not there."""
    outside = numbers[(numbers < 0) | (numbers >= coded.count)]
    if outside.size:
        raise DamageError(f"slice {int(outside[0])} is not in its block; nothing of it is returned")
    return numbers if coded.places is None else coded.places.find(numbers, coded.count)


def units_for(coded: Coded, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the units that are read for slices in some places: theirs, and the keys of those."""
    units = np.unique(places // coded.codec.group)
    return np.union1d(units, units - units % coded.codec.key) if coded.codec.key else units


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

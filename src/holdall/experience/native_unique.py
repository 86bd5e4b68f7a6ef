"""Names for the slices of a batch: unique.c through ctypes.

In:  places.  Out: for every observation the names of its slices, and their bytes in the order of names.
Invariant: a slice that several observations show has one name, and is copied or decoded once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.experience.arena import Bytes, address
from holdall.experience.crew import Crew
from holdall.experience.part import RECORD_FIELDS, Places

Names = NDArray[np.int32]
Cut = tuple[int, int, int]
"""Runs of a slice, bytes of a run, slices of a window."""

_PIECE_BYTES = 2 << 20
"""Large enough that telling of a piece, which starts its copy to a device, costs little beside it."""

_CUT = slice(RECORD_FIELDS.index("outer"), RECORD_FIELDS.index("shift") + 1)
_SEALED = RECORD_FIELDS.index("sealed")


class _Names(ctypes.Structure):
    _fields_ = (
        ("part", ctypes.c_void_p),
        ("number", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("mask", ctypes.c_int64),
        ("room", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


class SliceNamer:
    """Names slices for one field after the other; used by one thread at a time.

    Args:
        library: The compiled loops.
        reading: Returns the calling thread's decoder, for C; None where sealed slices cannot be decoded there.
    """

    def __init__(self, library: ctypes.CDLL, reading: Callable[[int], int] | None) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._name = library.holdall_name
        self._name.argtypes = [pointer, number, *[pointer] * 3, *[number] * 4, *[pointer] * 4]
        self._name.restype = number
        self._fetch = library.holdall_fetch
        self._fetch.argtypes = [pointer, pointer, *[number] * 3, *[pointer] * 2]
        self._fetch.restype = number
        self._reading = reading
        self._memory: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32]] | None = None
        self._struct = _Names()
        self._cuts: dict[int, tuple[NDArray[np.int64], Cut | None]] = {}

    def cut(self, places: Places, field: int) -> Cut | None:
        """Return how a field is cut, if all of its segments are cut alike and can be read here."""
        records = places.records[field]
        known = self._cuts.get(field)
        if known is not None and known[0] is records:  # a table never changes
            return known[1]
        cut = self._looked_up(records)
        self._cuts[field] = (records, cut)
        return cut

    def _looked_up(self, records: NDArray[np.int64]) -> Cut | None:
        if not (records[:, _CUT] == records[0, _CUT]).all() or (self._reading is None and records[:, _SEALED].any()):
            return None
        outer, run_bytes, window, _ = records[0, _CUT].tolist()
        return outer, run_bytes, window

    def begin(self, most: int) -> None:
        """Forget all names; there will be `most` new ones at most."""
        slots = 1 << (2 * most).bit_length()
        if self._memory is None or len(self._memory[0]) < most or len(self._memory[2]) < slots:
            self._memory = (np.empty(most, np.int32), np.empty(most, np.int32), np.empty(slots, np.uint32))
        part, number, table = self._memory
        table[:slots] = 0
        self._struct = _Names(address(part), address(number), address(table), slots - 1, most, 0)

    def name(
        self,
        places: Places,
        field: int,
        cut: Cut,
        obs: Names | None,
        next_obs: Names | None,
        base: NDArray[np.int64] | None = None,
    ) -> int:
        """Fill in the names of the slices of every observation, (rows, window); return how many there are.

        Args:
            base: Where the slices of each segment begin in one large array; names are then places in it.
        """
        outer, run_bytes, window = cut
        records = places.records[field]
        failed = self._name(
            address(records), len(records), address(places.segment), address(places.cursors[field]),
            address(places.lane), places.lanes, len(places.segment), window, outer * run_bytes,
            *(0 if names is None else address(names) for names in (obs, next_obs)),
            0 if base is None else address(base), ctypes.addressof(self._struct),
        )  # fmt: skip
        if failed >= 0:
            raise _damaged(failed)
        return int(self._struct.count)

    def where(self, starts: NDArray[np.int64], slice_bytes: int) -> NDArray[np.int64] | None:
        """Return the byte at which each slice named begins, given where those of each segment do; None if -1 is among.

        Args:
            starts: By segment.
        """
        if self._memory is None:
            return None
        count = int(self._struct.count)
        of_part = starts.take(self._memory[0][:count])
        if count and of_part.min() < 0:
            return None
        return np.asarray(of_part + self._memory[1][:count].astype(np.int64) * slice_bytes)

    def fetch(self, places: Places, field: int, out: Bytes, crew: Crew, done: Callable[[int, int], None]) -> None:
        """Bring all slices named to their rows of `out`; `done(first, end)` is told of every piece that is there.

        Pieces are copied, and told of, by several threads.
        """
        records, count, slice_bytes = places.records[field], int(self._struct.count), out.shape[1]

        def bring(first: int, end: int) -> None:
            decoder = 0 if self._reading is None else self._reading(3 * slice_bytes)
            failed = self._fetch(
                address(records), ctypes.addressof(self._struct), first, end, slice_bytes, address(out), decoder
            )
            if failed >= 0:
                raise _damaged(failed)
            done(first, end)

        crew.share(bring, count, count * slice_bytes, _PIECE_BYTES)


def _damaged(row: int) -> DamageError:
    return DamageError(
        f"row {row} of the batch points outside its segment, or its bytes are damaged; nothing of the batch is "
        "returned. Load the last checkpoint, and report this"
    )

"""Names for the slices of a batch: unique.c through ctypes.

In:  places.  Out: for every observation the names of its slices, and their bytes in the order of names.
Invariant: a slice that several observations show has one name, and is copied or decoded once.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError, HoldallError
from holdall.native.codec import NativeCoder
from holdall.schema import Bytes
from holdall.storage.blocks import address
from holdall.storage.slices import RECORD_FIELDS, Places
from holdall.threads import CopyThreads

Names = NDArray[np.int32]
Cut = tuple[int, int, int]
"""Runs of a slice, bytes of a run, slices of a window."""

_PIECE_BYTES = 1 << 18
"""What a hand takes at once: little enough that all of them end together."""
_BYTES_PER_HAND = 1 << 19
"""A hand is woken only for at least this much to move."""
_WAVE_BYTES = 6 << 20
"""Long enough that starting its copy to a device costs nothing beside it, short enough that the next one overlaps."""

_MOST_HANDS = 12
"""The bus takes more than a few hands can bring."""

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


class CopyPlan(NamedTuple):
    """How C starts a copy to a device: a function like cuMemcpyHtoDAsync, where to, and over which stream."""

    sender: int  # the function's address; 0: nothing is sent
    there: int
    stream: int


class SliceNamer:
    """Names slices for one field after the other, and brings them; used by one thread at a time.

    Args:
        library: The compiled loops.
        coder: Decodes sealed slices in C; None where it cannot.
        most_hands: Threads that bring slices, on as many cores.
    """

    def __init__(self, library: ctypes.CDLL, coder: NativeCoder | None, most_hands: int = _MOST_HANDS) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._name = library.holdall_name
        self._name.argtypes = [pointer, number, *[pointer] * 3, *[number] * 4, *[pointer] * 4]
        self._name.restype = number
        self._bring = library.holdall_bring
        self._bring.argtypes = [
            pointer, pointer, number, pointer, pointer, number, number, pointer, number,
            pointer, ctypes.c_uint64, pointer, pointer,
        ]  # fmt: skip
        self._bring.restype = number
        self._locate = library.holdall_locate
        self._locate.argtypes = [pointer, pointer, number, number, pointer]
        self._locate.restype = number
        self._coder = coder
        self._readings: list[Any] = []
        self.hands = CopyThreads(library, most_hands)
        self.send_here = ctypes.cast(library.holdall_send_here, pointer).value or 0
        self._memory: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32]] | None = None
        self._struct = _Names()
        self._sent = ctypes.c_int64()
        self._cuts: dict[int, tuple[NDArray[np.int64], Cut | None, bool]] = {}

    def cut(self, places: Places, field: int) -> Cut | None:
        """Return how a field is cut, if all of its segments are cut alike and can be read here."""
        return self._known(places.records[field], field)[0]

    def _known(self, records: NDArray[np.int64], field: int) -> tuple[Cut | None, bool]:
        """Return how a field is cut, and whether slices of it are sealed; tables of records never change."""
        seen, cut, is_sealed = self._cuts.get(field, (None, None, False))
        if seen is not records:
            is_sealed = bool(records[:, _SEALED].any())
            alike = bool((records[:, _CUT] == records[0, _CUT]).all())
            outer, run_bytes, window, _ = records[0, _CUT].tolist()
            cut = (outer, run_bytes, window) if alike and not (is_sealed and self._coder is None) else None
            self._cuts[field] = (records, cut, is_sealed)
        return cut, is_sealed

    def begin(self, most: int) -> None:
        """Forget all names; there will be `most` new ones at most."""
        slots = 1 << max(0, 2 * most - 1).bit_length()  # twice the names, at least
        if self._memory is None or len(self._memory[0]) < most or len(self._memory[2]) < slots:
            self._memory = (np.empty(most, np.int32), np.empty(most, np.int32), np.empty(slots, np.uint32))
            self._struct = _Names(*(address(array) for array in self._memory))
        self._memory[2][:slots] = 0
        self._struct.mask, self._struct.room, self._struct.count = slots - 1, most, 0

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

    def where(self, starts: NDArray[np.int64], slice_bytes: int, unit: int, out: NDArray[np.int64]) -> bool:
        """Fill in where each slice named begins, counted in units of so many bytes; False if that of one is not known.

        Args:
            starts: By segment, the byte at which its slices begin, or -1.
            out: One place a name, or more.
        """
        found = self._locate(ctypes.addressof(self._struct), address(starts), slice_bytes, unit, address(out))
        return int(found) < 0

    def bring(self, places: Places, field: int, out: Bytes, way: CopyPlan) -> int:
        """Bring all slices named to their rows of `out`; return how many were sent on, in waves, meanwhile.

        The last wave never is. All of it is one call outside the GIL; several hands share it where it is worth their
        while.
        """
        records, count, slice_bytes = places.records[field], int(self._struct.count), out.shape[1]
        nbytes = count * slice_bytes
        helpers = min(self.hands.helpers, nbytes // _BYTES_PER_HAND - 1)
        decoders = 0
        if self._coder is not None and self._known(records, field)[1]:
            pointers = self._coder.decoders(self._readings, self.hands.helpers + 1, 3 * slice_bytes)
            decoders = address(pointers)
        with self.hands.at_work() as hands:
            failed = self._bring(
                address(records), ctypes.addressof(self._struct), slice_bytes, address(out), decoders,
                max(1, _PIECE_BYTES // slice_bytes), 1 + nbytes // _WAVE_BYTES, hands, helpers, *way,
                ctypes.addressof(self._sent),
            )  # fmt: skip
        if failed >= 0:
            raise _damaged(failed)
        if failed < -1:
            raise HoldallError(f"the GPU's driver refused a copy of a batch (CUDA error {-2 - failed}); see its manual")
        return int(self._sent.value)


def _damaged(row: int) -> DamageError:
    return DamageError(
        f"row {row} of the batch points outside its segment, or its bytes are damaged; nothing of the batch is "
        "returned. Load the last checkpoint, and report this"
    )

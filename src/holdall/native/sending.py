"""Sending: slices and trajectories are brought together for a device by assemble.c and rollout.c, without the GIL.

In:  places, or arrays whose sizes their callers have checked.  Out: every slice of a batch named once, and copied once.
Invariant: nothing outside the blocks that the places hold is read: C checks every index, and one that is wrong is a
`DamageError`.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError, HoldallError
from holdall.machine import pool_threads
from holdall.native.library import BatchRequestStruct, NamesStruct, native_library
from holdall.native.reading import NativeDecoder, ThreadPool
from holdall.schema import Bytes
from holdall.storage import RECORD_FIELDS, Places, address

_PIECE_BYTES = 1 << 18
"""What a thread takes at once: little enough that all of them end together."""
_BYTES_PER_COLLECTING_THREAD = 1 << 19
"""Bytes of slices that are worth waking a thread for: the device does nothing until they are there."""
_BYTES_PER_THREAD = 2**20
"""Bytes of trajectories that are worth it."""
_WAVE_BYTES = 6 << 20
"""Long enough that starting its copy to a device costs nothing beside it, short enough that the next one overlaps."""
_MOST_THREADS = 16
"""Threads that copy: to fill memory as fast as the bus empties it takes many."""
_CUT = slice(RECORD_FIELDS.index("outer"), RECORD_FIELDS.index("shift") + 1)
_SEALED = RECORD_FIELDS.index("sealed")
_pointer: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer  # as in reading.py

Names = NDArray[np.int32]
Cut = tuple[int, int, int]
"""Runs of a slice, bytes of a run, slices of a window."""


class CopyPlan(NamedTuple):
    """How C starts a copy to a device: a function like cuMemcpyHtoDAsync, where to, and over which stream."""

    sender: int  # the function's address; 0: nothing is sent
    there: int
    stream: int


class Refusal(enum.IntEnum):
    """Why a batch cannot be put together in one call, as assemble.c says it."""

    NONE, NOT_HELD, DAMAGED, NOT_THERE, BY_DRIVER = range(5)


class SliceNamer:
    """Names the slices of a batch, field after field, and copies each of them once; used by one thread at a time.

    Args:
        library: The compiled loops.
        decoder: Decodes sealed slices.
    """

    def __init__(self, library: ctypes.CDLL, decoder: NativeDecoder) -> None:
        self._library = library
        self._decoder = decoder
        self.pool = ThreadPool(pool_threads(_MOST_THREADS))
        self.send_here, self.launch_here = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (library.holdall_send_here, library.holdall_launch_here)
        )
        self._memory: tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint32]] | None = None
        self._struct = NamesStruct()
        self._cuts: dict[int, tuple[NDArray[np.int64], Cut | None, bool]] = {}

    def cut(self, records: NDArray[np.int64], field: int) -> Cut | None:
        """Return how a field is cut, if all of its segments are cut alike and can be read here."""
        return self._known(records, field)[0]

    def _known(self, records: NDArray[np.int64], field: int) -> tuple[Cut | None, bool]:
        """Return how a field is cut, and whether slices of it are sealed; tables of records never change."""
        seen, cut, is_sealed = self._cuts.get(field, (None, None, False))
        if seen is not records:
            is_sealed = bool(records[:, _SEALED].any())
            alike = bool((records[:, _CUT] == records[0, _CUT]).all())
            outer, run_bytes, window, _ = records[0, _CUT].tolist()
            cut = (outer, run_bytes, window) if alike else None
            self._cuts[field] = (records, cut, is_sealed)
        return cut, is_sealed

    def begin(self, most: int) -> None:
        """Forget all names; there will be `most` new ones at most."""
        slots = 1 << max(0, 2 * most - 1).bit_length()  # twice the names, at least
        if self._memory is None or len(self._memory[0]) < most or len(self._memory[2]) < slots:
            self._memory = (np.empty(most, np.int32), np.empty(most, np.int32), np.empty(slots, np.uint32))
            self._struct = NamesStruct(*(address(array) for array in self._memory))
        self._memory[2][:slots] = 0
        self._struct.mask, self._struct.room, self._struct.count = slots - 1, most, 0

    def name(self, places: Places, field: int, cut: Cut, obs: Names | None, next_obs: Names | None) -> int:
        """Fill in the names of the slices of every observation, (rows, window); return how many there are."""
        outer, run_bytes, window = cut
        records = places.records[field]
        failed = self._library.holdall_name(
            _pointer(records), len(records), _pointer(places.segment), _pointer(places.cursors[field]),
            _pointer(places.lane), places.lanes, len(places.segment), window, outer * run_bytes,
            *(None if names is None else _pointer(names) for names in (obs, next_obs)),
            ctypes.addressof(self._struct),
        )  # fmt: skip
        if failed >= 0:
            raise _damaged(failed)
        return int(self._struct.count)

    def assemble(self, request: BatchRequestStruct) -> Refusal:
        """Have a device put a batch together; return why it cannot."""
        number = self._library.holdall_assemble(ctypes.addressof(request))
        if not number:
            return Refusal.NONE
        refused = Refusal(number)
        if refused is Refusal.DAMAGED:
            raise _damaged(request.wrong)
        return refused

    def collect(self, places: Places, field: int, out: Bytes, way: CopyPlan) -> int:
        """Copy all slices named to their rows of `out`; return how many were sent on, in waves, meanwhile.

        The last wave is never sent. All of it is one call outside the GIL; several threads share it where it is worth
        waking them.
        """
        records, count, slice_bytes = places.records[field], int(self._struct.count), out.shape[1]
        nbytes = count * slice_bytes
        sent = ctypes.c_int64()
        with self.pool.helping(self._library, nbytes // _BYTES_PER_COLLECTING_THREAD - 1) as (threads, helpers):
            decoders, kept = None, list[Any]()
            if self._known(records, field)[1]:
                decoders, kept = self._decoder.decoders(self.pool, helpers, 3 * slice_bytes)
            failed = self._library.holdall_collect(
                _pointer(records), ctypes.addressof(self._struct), slice_bytes, _pointer(out), decoders,
                max(1, _PIECE_BYTES // slice_bytes), 1 + nbytes // _WAVE_BYTES, threads, helpers, *way,
                ctypes.byref(sent),
            )  # fmt: skip
            del kept
        if failed >= 0:
            raise _damaged(failed)
        if failed < -1:
            raise HoldallError(f"the GPU's driver refused a copy of a batch (CUDA error {-2 - failed}); see its manual")
        return int(sent.value)


def _damaged(row: int) -> DamageError:
    return DamageError(
        f"row {row} of the batch points outside its segment, or its bytes are damaged; nothing of the batch is "
        "returned. Load the last checkpoint, and report this"
    )


class SlotSender:
    """Copies arrays into pinned slots, several threads at once, and has each slot sent to a device when it is filled.

    Args:
        slots: Where they begin, how long each is, and how many there are.
        functions: Addresses: what sends, what records an event, and what asks for one; 0 if there are no events.
        events: As the driver names them, one a slot.
    """

    def __init__(self, slots: tuple[int, int, int], functions: tuple[int, int, int], events: list[int]) -> None:
        self._slots, self._functions = slots, functions
        self._events = np.array(events, np.uint64)
        self._pool = ThreadPool(pool_threads(_MOST_THREADS))

    @classmethod
    def send_here(cls) -> int | None:
        """Return the address of what sends where the device is the host."""
        return ctypes.cast(native_library().holdall_send_here, ctypes.c_void_p).value

    def send(
        self, pieces: NDArray[np.int64], loads: NDArray[np.int64], sources: list[int], there: int, stream: int
    ) -> int:
        """Send loads; return 0, or the driver's error.

        Args:
            pieces: Source, first byte of it, bytes, first byte in the slots, load; one after another.
            loads: The piece behind the last one, first byte on the device, bytes.
            sources: Where the sources begin.
            there: Where bytes on the device are counted from.
        """
        library, (send, record, query) = native_library(), self._functions
        done, begins = np.zeros(len(loads), np.int64), np.array(sources, np.uint64)
        wanted = int(pieces[:, 2].sum()) // _BYTES_PER_THREAD - 1
        with self._pool.helping(library, wanted) as (pool, helpers):
            error: int = library.holdall_send_slots(
                address(pieces), len(pieces), address(loads), len(loads), address(begins), *self._slots, address(done),
                pool, helpers, send, there, stream, record, query, address(self._events),
            )  # fmt: skip
        return error

"""Reading: batches are filled with observations by gather.c, and slices decoded by decode.c, without the GIL.

In:  places, or numbers of slices.  Out: rows of bytes. Ids of slots are drawn here, too, and arrays whose axes were
transposed are described to C.
Invariant: every thread decodes with a context and scratch memory of its own. Nothing outside the blocks that the
places hold is read: C checks every index, and one that is wrong is a `DamageError`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall import _native
from holdall.background import left
from holdall.errors import DamageError
from holdall.machine import pool_threads
from holdall.native.library import (
    MOST_DIMENSIONS,
    DecodedSliceStruct,
    DecoderStruct,
    LayoutStruct,
    native_library,
)
from holdall.schema import Array, Bytes
from holdall.storage import (
    COLOUR_PALETTE_BYTES,
    RECORD_FIELDS,
    Places,
    SealedSlices,
    Transform,
    address,
    bring_slices,
)

_DECODED_PLACES = 4096
_MOST_READ_AT_ONCE = 1 << 20
_LOOK_BACK_BYTES = 1 << 16
"""Of a dictionary for LZ4 so many bytes are used: room for them is in front of the memory for units. As in decode.c."""
_PIECE_BYTES = 1 << 18
"""What a thread takes at once: little enough that all of them end together."""
_BYTES_PER_THREAD = 1 << 20
"""A thread is woken only for at least this much to move."""
_RAW_THREADS = 4
"""They use up the bandwidth of memory: more copy raw slices no faster. Decoding gains from more."""

_MOST_DRAWN = (1 << 32) - 1
"""NumPy draws numbers beyond in another way."""

_pointer: Callable[[Any], ctypes.Array[ctypes.c_char]] = (ctypes.c_char * 0).from_buffer
"""Makes the pointer to an array that can be written to; it costs less than the address."""

_SEALED = RECORD_FIELDS.index("sealed")


# ---------------------------------------------------------------- threads


class OwnCall(threading.local):
    """Says whether a thread is still in a call that it made of something, or was interrupted in it.

    It is in two at once if a signal handler, or a finalizer that the collector runs, makes the second one.
    """

    def __init__(self) -> None:
        self._last: Callable[[], object] = lambda: None

    def begin(self) -> object:
        """Return what must live for as long as the call that begins."""
        call = {self}
        self._last = weakref.ref(call)
        return call

    @property
    def is_under_way(self) -> bool:
        """Whether the call that this thread began last has not ended."""
        return self._last() is not None


class ThreadPool:
    """Threads that wait in C and share the loops of one memory; they start when they are first needed.

    NumPy's loops use none of them. A forked child starts its own.

    Args:
        threads: How many, the caller among them; None: see `pool_threads`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or pool_threads()
        self.workspaces: list[Any] = []  # what the loops keep for each helper; belongs to the call that has `helping`
        self._lock: Any = threading.RLock()
        self._call = OwnCall()
        self._process = 0
        self._address = 0
        self._end: weakref.finalize[Any, Any] | None = None

    @contextmanager
    def helping(self, library: ctypes.CDLL, wanted: int) -> Iterator[tuple[int, int]]:
        """Yield the pool's address, for C, and how many helpers may begin; meanwhile nobody else has them.

        Both are 0 if no helper is wanted, or another call has them: then the calling thread works alone, instead of
        waiting.
        """
        helpers = min(wanted, self.threads - 1)
        self._forget_parent()
        if self._lock._is_owned() and self._call.is_under_way:
            helpers = 0
        elif self._lock._is_owned():  # this thread was interrupted in it
            left(self._lock)
        if helpers < 1:
            yield 0, 0
            return
        call = self._call.begin()
        try:
            if not self._lock.acquire(blocking=False):
                yield 0, 0
                return
            if not self._address:
                self._start(library)
            yield self._address, helpers
        finally:
            if self._lock._is_owned():
                self._lock.release()
            del call

    def started(self, library: ctypes.CDLL) -> int:
        """Start the threads, if they are not, and return the pool's address, for C; for who has the pool alone."""
        self._forget_parent()
        with left(self._lock):
            if not self._address:
                self._start(library)
            return self._address

    def dismiss(self) -> None:
        """End the threads, after the call that they help with; the pool may be used again."""
        self._forget_parent()
        with left(self._lock):
            if self._end is not None:
                self._end()
            self._address, self._end, self.workspaces = 0, None, []

    def _forget_parent(self) -> None:
        """In a forked child, leave the parent's threads: they are not here, and the lock may be held by one of them."""
        if self._process not in {0, os.getpid()}:
            self._lock, self._process, self._address, self.workspaces = threading.RLock(), 0, 0, []
            if self._end is not None:
                self._end.detach()
                self._end = None

    def _start(self, library: ctypes.CDLL) -> None:
        address = library.holdall_threads_new()
        if not address:
            raise MemoryError("there is no memory for the threads that fill batches")
        threads = [
            threading.Thread(
                target=library.holdall_threads_help,
                args=(address,),
                name=f"holdall-pool-{number}",
                daemon=True,  # a thread that waits in C must not keep the process from ending
            )
            for number in range(1, self.threads)
        ]
        self._address, self._process = address, os.getpid()
        self._end = weakref.finalize(self, _end_threads, library, address, threads)
        self._end.atexit = False  # a daemon may be in a call that they help with
        with suppress(RuntimeError):  # where no more can be started, those that were share the work with the caller
            for thread in threads:
                thread.start()


def _end_threads(library: ctypes.CDLL, address: int, threads: list[threading.Thread]) -> None:
    started = [thread for thread in threads if thread.ident is not None]
    if not all(thread.is_alive() for thread in started):
        return  # a forked child's copies: nobody waits there
    library.holdall_threads_dismiss(address)
    for thread in started:
        thread.join()
    library.holdall_threads_free(address)


# ---------------------------------------------------------------- decoding


class NativeDecoder:
    """Decodes slices of sealed blocks; used by any number of threads."""

    def __init__(self) -> None:
        self._library = native_library()
        self._thread = threading.local()
        self._unit_bytes = {0}  # of all codecs that came; several memories add to it at once, each in one step

    def decode(self, sealed: SealedSlices, numbers: NDArray[np.int64], out: Bytes) -> None:
        """See `Coder.decode`."""
        bring_slices(sealed, numbers)
        memory = self._own_memory(_scratch_bytes(sealed.codec.transform))
        failed = self._library.holdall_decode(
            memory.address, sealed.address, address(numbers), len(numbers), address(out)
        )
        if failed >= 0:
            raise DamageError(f"slice {int(numbers[failed])} is damaged; nothing of it is returned")

    def count_work(self, sealed: SealedSlices, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Coder.count_work`."""
        units, work = np.ascontiguousarray(units), np.zeros((len(units), 3), np.int64)
        self._library.holdall_count_work(sealed.address, address(units), len(units), address(work))
        return work

    def decoders(
        self, pool: ThreadPool | None, helpers: int, scratch_bytes: int
    ) -> tuple[ctypes.Array[Any], list[_DecoderMemory]]:
        """Return decoders for C: the calling thread's, and one for every thread of the pool if some of them help.

        And their memory, which the caller keeps: when Python ends, it takes away what is a thread's own, and lets a
        daemon that is in a call go on.
        """
        own = self._own_memory(scratch_bytes)
        if pool is None or helpers < 1:
            return own.alone, [own]
        kept = pool.workspaces = self.more_decoders(pool.workspaces, pool.threads - 1, scratch_bytes)
        for memory in kept:
            memory.forget()
        return (ctypes.c_void_p * pool.threads)(own.address, *(memory.address for memory in kept)), [own, *kept]

    def more_decoders(self, kept: list[_DecoderMemory], threads: int, scratch_bytes: int) -> list[_DecoderMemory]:
        """Return memory for so many threads that decode, with what of `kept` is large enough for that."""
        unit_bytes = max(self._unit_bytes)
        enough = [memory for memory in kept if memory.suffices(scratch_bytes, unit_bytes)][:threads]
        missing = threads - len(enough)
        return enough + [_DecoderMemory(scratch_bytes, unit_bytes) for _ in range(missing)]

    def _own_memory(self, scratch_bytes: int) -> _DecoderMemory:
        memory: _DecoderMemory | None = getattr(self._thread, "memory", None)
        unit_bytes = max(self._unit_bytes)
        if memory is None or not memory.suffices(scratch_bytes, unit_bytes):
            memory = self._thread.memory = _DecoderMemory(scratch_bytes, unit_bytes)
        memory.forget()
        return memory


class _DecoderMemory:
    """One thread's context, scratch memory and table of decoded slices."""

    def __init__(self, scratch_bytes: int, unit_bytes: int) -> None:
        self._arrays = (
            np.empty(scratch_bytes, np.uint8),
            np.empty(_LOOK_BACK_BYTES + unit_bytes, np.uint8),
            np.empty(max(unit_bytes, min(scratch_bytes, _MOST_READ_AT_ONCE)), np.uint8),
            np.zeros(_DECODED_PLACES * ctypes.sizeof(DecodedSliceStruct), np.uint8),
            np.empty(COLOUR_PALETTE_BYTES, np.uint8),
        )
        scratch, unit, read, decoded, colours = self._arrays
        self._context = _native.new_decompressor()
        self._struct = DecoderStruct(
            dctx=self._context.address,
            scratch=address(scratch),
            scratch_bytes=scratch.size,
            unit=address(unit) + _LOOK_BACK_BYTES,
            unit_bytes=unit_bytes,
            read=address(read),
            read_bytes=read.size,
            colours=address(colours),
            decoded_places=_DECODED_PLACES,
            decoded=address(decoded),
        )

        self.address = ctypes.addressof(self._struct)
        self.alone = (ctypes.c_void_p * 1)(self.address)
        self._scratch_bytes, self._unit_bytes = scratch_bytes, unit_bytes

    def suffices(self, scratch_bytes: int, unit_bytes: int) -> bool:
        """Whether slices and units of such sizes can be decoded."""
        return self._scratch_bytes >= scratch_bytes and self._unit_bytes >= unit_bytes

    def forget(self) -> None:
        """Forget what slices were read from before, which may be freed by now."""
        struct = self._struct
        struct.unit_behind = struct.unit_of = struct.read_of = None
        struct.error = 0


def _scratch_bytes(transform: Transform) -> int:
    return 2 * transform.coded_bytes + transform.slice_bytes


# ---------------------------------------------------------------- batches


class NativeReading:
    """The half of `NativeKernels` that fills batches."""

    _library: ctypes.CDLL
    _decoder: NativeDecoder

    def new_pool(self, threads: int | None = None) -> ThreadPool:
        """See `Kernels.new_pool`."""
        return ThreadPool(threads)

    def read_rows(
        self,
        columns: NDArray[np.int64],
        ids: NDArray[np.int64],
        held: tuple[int, int],
        ring_rows: int,
        blocks: tuple[Bytes, Bytes],
    ) -> bool:
        """See `RowReader`."""
        first, rest = blocks
        wrong = self._library.holdall_read_rows(
            _pointer(columns), len(columns), _pointer(ids), len(ids), *held, ring_rows, _pointer(first), _pointer(rest)
        )
        return bool(wrong < 0)

    def find(
        self, first_ticks: NDArray[np.int64], ids: NDArray[np.int64], lanes: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """See `Kernels.find`."""
        rows = len(ids)
        segment, lane = np.empty(rows, np.int32), np.empty(rows, np.int32)
        self._library.holdall_find(
            _pointer(first_ticks), len(first_ticks), _pointer(ids), rows, lanes, _pointer(segment), _pointer(lane)
        )
        return segment, lane

    def gather(
        self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None, pool: ThreadPool | None = None
    ) -> None:
        """See `Kernels.gather`."""
        records = places.records[field]
        rows, wanted = len(places.segment), [side for side in (obs, next_obs) if side is not None]
        row_bytes, nbytes = wanted[0].shape[1], rows * sum(side.shape[1] for side in wanted)
        where = (
            _pointer(records), len(records), _pointer(places.segment),
            _pointer(places.cursors[field]), _pointer(places.lane), places.lanes, rows,
        )  # fmt: skip
        sides = [None if side is None else _pointer(side) for side in (obs, next_obs)]
        order = (None, rows) if places.rows is None else (_pointer(places.rows), min(map(len, wanted)))
        error = ctypes.c_int64()

        def fill(pieces: int, threads: int, helpers: int) -> int:
            # Two coded slices and a decoded one: an observation is at least as large as its slices.
            decoders, kept = self._decoder.decoders(pool, helpers, 3 * row_bytes)
            failed = int(
                self._library.holdall_gather(
                    *where, *order, row_bytes, *sides, decoders, pieces, threads, helpers, ctypes.byref(error)
                )
            )
            del kept
            return failed

        if places.reads_files:
            self._library.holdall_expect(*where)
        most = nbytes // _BYTES_PER_THREAD
        most = most if records[:, _SEALED].any() else min(most, _RAW_THREADS)
        helpers = 0 if pool is None else min(pool.threads, most) - 1
        if pool is None or helpers < 1:
            failed = fill(1, 0, 0)
        else:
            with pool.helping(self._library, helpers) as (threads, helpers):
                failed = fill(min(nbytes // _PIECE_BYTES, rows), threads, helpers)
        if failed >= 0:
            raise places.damage(field, failed, error.value)


# ---------------------------------------------------------------- drawing

global_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]  # NumPy documents it


def draw_slots(rows: int, filled: int, slots: int, newest: int, lanes: int) -> NDArray[np.int64]:
    """Draw transitions from NumPy's global generator: slots as `randint(filled)` does, then lanes as `randint(lanes)`.

    Tick t stands in slot t modulo `slots`, and the newest tick is `newest`. Ids are returned, those of slots that were
    not written to yet below 0.
    """
    if not (0 < filled <= _MOST_DRAWN and 0 < lanes <= _MOST_DRAWN):
        ticks = newest - (newest - np.random.randint(0, filled, size=rows)) % slots  # noqa: NPY002  as they ask for
        return ticks * lanes + np.random.randint(0, high=lanes, size=rows)  # noqa: NPY002  likewise
    generator = global_generator()
    ids = np.empty(rows, np.int64)
    lane = None if lanes == 1 else np.empty(rows, np.int64)
    with generator.lock:
        native_library().holdall_draw(
            *number_function(generator), filled, slots, newest, lanes, rows, _pointer(ids),
            None if lane is None else _pointer(lane),
        )  # fmt: skip
    return ids


@functools.lru_cache(maxsize=1)
def number_function(generator: Any) -> tuple[int, int]:
    """Return what C calls for the next number, and with which argument."""
    interface = generator.ctypes
    return ctypes.cast(interface.next_uint32, ctypes.c_void_p).value or 0, interface.state_address


# ---------------------------------------------------------------- arrays that are transposed


class DenseLayout:
    """How C walks through an array whose elements fill its memory, but in another order.

    `order` is the permutation of axes that makes it contiguous, or None if none does.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        self.order = tuple(axes) if array.transpose(axes).flags.c_contiguous else None
        lengths: list[int] = []
        strides: list[int] = []
        for length, stride in zip(array.shape, array.strides, strict=True):
            if lengths and strides[-1] == length * stride:
                lengths[-1], strides[-1] = lengths[-1] * length, stride
            elif length > 1 or not lengths:
                lengths.append(length)
                strides.append(stride)
        if len(lengths) > MOST_DIMENSIONS:
            self.order = None
            return
        numbers = ctypes.c_int64 * MOST_DIMENSIONS
        self._struct = LayoutStruct(len(lengths), numbers(*lengths), numbers(*strides), array.itemsize)
        self._strides = numbers(*array.strides)
        self.address, self.strides_address = ctypes.addressof(self._struct), ctypes.addressof(self._strides)


_MOST_LAYOUTS = 8
"""Layouts that a part remembers; a caller has one or two."""


def as_they_lie(
    obs: Array, next_obs: Array, known: dict[tuple[int, ...], DenseLayout]
) -> tuple[Array, Array, DenseLayout | None]:
    """Return both arrays in the order of their memory, and the layout that leads back, if that is another one.

    Images often come with transposed axes; C then puts them in order while it writes them.
    Arrays that differ in layout, or do not fill their memory, are copied.

    Args:
        known: Layouts by strides, which are remembered here.
    """
    strides = obs.strides
    if strides == next_obs.strides:
        dense = known.get(strides)
        if dense is None and len(known) < _MOST_LAYOUTS:
            dense = known[strides] = DenseLayout(obs)
        if dense is not None and dense.order is not None:
            raw, next_raw = obs.transpose(dense.order), next_obs.transpose(dense.order)
            return raw, next_raw, dense
    return np.ascontiguousarray(obs), np.ascontiguousarray(next_obs), None

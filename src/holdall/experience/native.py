"""The compiled loops: kernels.c through ctypes, outside the GIL.

In:  contiguous arrays, whose sizes are checked here.  Out: parts and batches.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.experience.crew import Crew
from holdall.experience.part import Cursors, OpenPart, Places
from holdall.experience.slices import Bytes, SliceBlock
from holdall.experience.window import Window

_VERSION = 1
"""What holdall_kernels_version must answer; raised with every change of a signature."""


class _Block(ctypes.Structure):
    _fields_ = (
        ("arena", ctypes.c_void_p),
        ("hashes", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("mask", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("used", ctypes.c_int64),
        ("slice_bytes", ctypes.c_int64),
    )


class _OpenPart(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_void_p),
        ("direct", ctypes.c_void_p),
        ("log", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("log_rows", ctypes.c_int64),
        ("lanes", ctypes.c_int64),
        ("outer", ctypes.c_int64),
        ("run_bytes", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("longest", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("broken_steps", ctypes.c_int64),
        ("pushed", ctypes.c_int64),
    )


class NativeKernels:
    """Makes parts and fills batches with the compiled loops."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.append_tick = library.holdall_append
        self.append_tick.argtypes = [pointer] * 4
        self.append_tick.restype = number
        self._gather = library.holdall_gather
        self._gather.argtypes = [
            pointer, number, pointer, pointer, pointer, *[number] * 4, pointer, pointer,
        ]  # fmt: skip
        self._gather.restype = number

    def new_block(self, slice_bytes: int, arena_bytes: int) -> SliceBlock:
        """Make an empty block."""
        return NativeBlock(slice_bytes, arena_bytes)

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""
        return NativePart(self, window, lanes, block, arena_bytes)

    def gather(self, places: Places, field: int, obs: Bytes, next_obs: Bytes, crew: Crew) -> None:
        """Fill `obs` and `next_obs`, rows of bytes, with one field of the places."""
        records = places.records[field]
        before = (
            address(records), len(records), address(places.segment),
            address(places.cursors[field]), address(places.lane), places.lanes,
        )  # fmt: skip
        after = (obs.shape[1], address(obs), address(next_obs))

        def fill(first: int, end: int) -> None:
            failed = self._gather(*before, first, end, *after)
            if failed >= 0:
                raise DamageError(
                    f"row {failed} of the batch points outside its segment; nothing of the batch "
                    "is returned. Load the last checkpoint, and report this"
                )

        crew.share(fill, len(places.segment), 2 * obs.size)


class NativeBlock(SliceBlock):
    """Unique slices behind an open-addressing table."""

    def __init__(self, slice_bytes: int, arena_bytes: int) -> None:
        super().__init__(slice_bytes, arena_bytes)
        slots = 1 << max(4, (2 * self.capacity).bit_length())
        self._index: tuple[NDArray[Any], ...] = (
            np.empty(self.capacity, np.uint64),
            np.zeros(slots, np.uint32),
        )
        self.struct = _Block(
            arena=address(self.arena),
            hashes=address(self._index[0]),
            slots=address(self._index[1]),
            mask=slots - 1,
            capacity=self.capacity,
            used=0,
            slice_bytes=slice_bytes,
        )

    @property
    def used(self) -> int:
        """Slices held."""
        return int(self.struct.used)

    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""
        self.struct.capacity = self.struct.used
        self._index = ()


class NativePart(OpenPart):
    """A part whose ticks are written by kernels.c."""

    def __init__(
        self,
        kernels: NativeKernels,
        window: Window,
        lanes: int,
        block: SliceBlock | None,
        arena_bytes: int,
    ) -> None:
        super().__init__(window, lanes, block, arena_bytes)
        self._append_tick = kernels.append_tick
        self._memory = (
            np.empty(lanes * self.obs_bytes, np.uint8),
            np.zeros(lanes, np.int64),
            np.empty(window.slice_bytes, np.uint8),
        )
        last, end, scratch = self._memory
        self._struct = _OpenPart(
            block=ctypes.addressof(block.struct) if isinstance(block, NativeBlock) else None,
            direct=address(self.slices),
            log=None if self.log is None else address(self.log),
            last=address(last),
            end=address(end),
            scratch=address(scratch),
            log_rows=self.log_rows,
            lanes=lanes,
            outer=window.outer,
            run_bytes=window.run_bytes,
            window=window.count,
            shift=window.shift,
        )
        self._struct_address = ctypes.addressof(self._struct)

    def append(self, obs: Bytes, next_obs: Bytes, cursors: Cursors) -> None:
        """See `OpenPart.append`."""
        self._require_tick(obs, next_obs, cursors)
        log = self.log
        self._make_log_room()
        if self.log is not None and self.log is not log:
            self._struct.log, self._struct.log_rows = address(self.log), self.log_rows
        written = self._append_tick(self._struct_address, address(obs), address(next_obs), address(cursors))
        if written != 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    @property
    def longest(self) -> int:
        """See `OpenPart.longest`."""
        return int(self._struct.longest)

    @property
    def steps(self) -> int:
        """See `OpenPart.steps`."""
        return int(self._struct.steps)

    @property
    def broken_steps(self) -> int:
        """See `OpenPart.broken_steps`."""
        return int(self._struct.broken_steps)

    @property
    def pushed(self) -> int:
        """See `OpenPart.pushed`."""
        return int(self._struct.pushed)


def address(array: NDArray[Any]) -> int:
    """Return where a contiguous array's first byte lies; the caller keeps the array alive."""
    try:
        # A third of the cost of array.ctypes.
        buffer: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    except (TypeError, ValueError):  # read-only or empty
        return int(array.ctypes.data)


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled loops, or None if no library of this version was built."""
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_kernels" + suffix)))
        library.holdall_kernels_version.restype = ctypes.c_int64
        current = library.holdall_kernels_version() == _VERSION
    except (OSError, AttributeError):
        return None
    return NativeKernels(library) if current else None

"""The compiled loops: kernels.c through ctypes, outside the GIL.

In:  contiguous arrays, whose sizes are checked here.  Out: parts and batches.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import ArgumentError, DamageError
from holdall.native.codec import NativeCoder
from holdall.native.library import system_libraries
from holdall.native.numpy_codec import PortableCoder
from holdall.native.numpy_kernels import PortableKernels
from holdall.native.slice_names import SliceNamer
from holdall.schema import Array, Bytes
from holdall.storage.blocks import Coder, SliceBlock, address, release_tail
from holdall.storage.layout import Window
from holdall.storage.slices import RECORD_FIELDS, Cursors, Kernels, OpenPart, Places
from holdall.threads import ThreadPool

_VERSION = 8
"""What holdall_kernels_version must answer; raised with every change of a signature."""

_LOG = logging.getLogger("holdall")
_SEALED = RECORD_FIELDS.index("sealed")
_MOST_DIMENSIONS = 8
_MOST_LAYOUTS = 8
"""Layouts that a part remembers; a caller has one or two."""


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


class _Layout(ctypes.Structure):
    _fields_ = (
        ("dimensions", ctypes.c_int64),
        ("lengths", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("strides", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("run_bytes", ctypes.c_int64),
    )


class _OpenPart(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_void_p),
        ("direct", ctypes.c_void_p),
        ("log", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("last_raw", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("last_layout", ctypes.c_void_p),
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
        self._library = library
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.append_tick = library.holdall_append
        self.append_tick.argtypes = [pointer] * 5
        self.append_tick.restype = number
        self._gather = library.holdall_gather
        self._gather.argtypes = [
            pointer, number, pointer, pointer, pointer, *[number] * 4, *[pointer] * 4,
        ]  # fmt: skip
        self._gather.restype = number
        self._expect = library.holdall_expect
        self._expect.argtypes = [pointer, number, pointer, pointer, pointer, number, number]
        self._expect.restype = None
        libraries = system_libraries()
        self.coder: Coder = PortableCoder() if libraries is None else NativeCoder(library, libraries)

    def new_block(self, slice_bytes: int, arena: Bytes) -> SliceBlock:
        """Make an empty block in `arena`."""
        return NativeBlock(slice_bytes, arena)

    def new_part(self, window: Window, lanes: int, block: SliceBlock | None, arena_bytes: int) -> OpenPart:
        """Make an empty part that writes to `block`."""
        return NativePart(self, window, lanes, block, arena_bytes)

    def namer(self) -> SliceNamer | None:
        """See `Kernels.namer`."""
        return SliceNamer(self._library, self.coder if isinstance(self.coder, NativeCoder) else None)

    def gather(self, places: Places, field: int, obs: Bytes | None, next_obs: Bytes | None, crew: ThreadPool) -> None:
        """See `Kernels.gather`."""
        records = places.records[field]
        coder = self.coder
        if not isinstance(coder, NativeCoder) and records[:, _SEALED].any():
            PortableKernels().gather(places, field, obs, next_obs, crew)
            return
        before = (
            address(records), len(records), address(places.segment),
            address(places.cursors[field]), address(places.lane), places.lanes,
        )  # fmt: skip
        wanted = [rows for rows in (obs, next_obs) if rows is not None]
        row_bytes = wanted[0].shape[1]
        after = (row_bytes, *(0 if rows is None else address(rows) for rows in (obs, next_obs)))
        # Two coded slices and a decoded one: an observation is at least as large as its slices.
        scratch_bytes = 3 * row_bytes
        batch = coder.next_batch() if isinstance(coder, NativeCoder) else 0
        if places.reads_files:
            self._expect(*before, len(places.segment))

        def fill(first: int, end: int) -> None:
            reading = (0, 0)
            if isinstance(coder, NativeCoder):
                reading = coder.reading(scratch_bytes, batch)
            failed = self._gather(*before, first, end, *after, *reading)
            if failed >= 0:
                raise places.damage(field, failed, coder.read_error if isinstance(coder, NativeCoder) else 0)

        crew.share(fill, len(places.segment), sum(rows.size for rows in wanted))


class NativeBlock(SliceBlock):
    """Unique slices behind an open-addressing table."""

    def __init__(self, slice_bytes: int, arena: Bytes) -> None:
        super().__init__(slice_bytes, arena)
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

    def clear(self) -> None:
        """Forget every slice and keep the memory."""
        self.struct.used = 0
        self._index[1].fill(0)

    def freeze(self) -> None:
        """Drop the index: nothing more will be added."""
        self.struct.capacity = self.struct.used
        self._index = ()
        release_tail(self.arena, self.used_bytes)


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
        self._memory: tuple[NDArray[Any], ...] = (
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
        self._layouts: dict[tuple[int, ...], _DenseLayout] = {}

    def append(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """See `OpenPart.append`."""
        self._require_tick(obs, next_obs, cursors)
        if self.log is not None and self._struct.longest + 2 * self.window.count > self.log_rows:
            self._lengthen_log(1)
        layout = 0
        if not (obs.flags.c_contiguous and next_obs.flags.c_contiguous):
            obs, next_obs, layout = self._as_they_lie(obs, next_obs)
        written = self._append_tick(self._struct_address, address(obs), address(next_obs), layout, address(cursors))
        if written != 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def append_run(self, obs: Array, next_obs: Array, cursors: Cursors) -> None:
        """See `OpenPart.append_run`: nothing is done for every tick but the call itself."""
        first, next_first, ticks = obs[0], next_obs[0], len(obs)
        self._require_tick(first, next_first, cursors[0])
        is_plain = first.flags.c_contiguous and next_first.flags.c_contiguous and cursors.flags.c_contiguous
        if not (is_plain and len(next_obs) == len(cursors) == ticks):
            super().append_run(obs, next_obs, cursors)
            return
        self._lengthen_log(ticks)
        now, after, places = address(first), address(next_first), address(cursors)
        step, next_step, width = obs.strides[0], next_obs.strides[0], cursors.strides[0]
        write, part = self._append_tick, self._struct_address
        for t in range(ticks):
            if write(part, now + t * step, after + t * next_step, 0, places + t * width) != 0:
                raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def _lengthen_log(self, ticks: int) -> None:
        self._make_log_room(ticks)
        if self.log is not None:
            self._struct.log, self._struct.log_rows = address(self.log), self.log_rows

    def clear(self) -> None:
        """See `OpenPart.clear`."""
        if isinstance(self.block, NativeBlock):
            self.block.clear()
        self._memory[1].fill(0)  # the lanes' ends
        struct = self._struct
        struct.longest = struct.steps = struct.broken_steps = struct.pushed = 0
        self._used_before = 0

    def _as_they_lie(self, obs: Array, next_obs: Array) -> tuple[Array, Array, int]:
        """Return both arrays in the order of their memory, and the layout that leads back.

        Images often come with transposed axes; C then puts them in order while it writes them.
        Arrays that differ in layout, or do not fill their memory, are copied.
        """
        strides = obs.strides
        if strides == next_obs.strides:
            dense = self._layouts.get(strides)
            if dense is None and len(self._layouts) < _MOST_LAYOUTS:
                dense = self._layouts[strides] = _DenseLayout(obs)
                self._make_layout_room()
            if dense is not None and dense.order is not None:
                raw, next_raw = obs.transpose(dense.order), next_obs.transpose(dense.order)
                return raw, next_raw, dense.address
        return np.ascontiguousarray(obs), np.ascontiguousarray(next_obs), 0

    def _make_layout_room(self) -> None:
        """Give C memory to put ticks in order in, when a first one needs it."""
        if not self._struct.packed:
            tick_bytes = self.lanes * self.obs_bytes
            raw, packed = np.empty(tick_bytes, np.uint8), np.empty(2 * tick_bytes, np.uint8)
            self._memory = (*self._memory, raw, packed)
            self._struct.last_raw, self._struct.packed = address(raw), address(packed)

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


class _DenseLayout:
    """How C walks through an array whose elements fill its memory, but in another order.

    `order` is the permutation of axes that makes it contiguous, or None if none does.
    """

    def __init__(self, array: Array) -> None:
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
        if len(lengths) > _MOST_DIMENSIONS:
            self.order = None
            return
        numbers = ctypes.c_int64 * _MOST_DIMENSIONS
        self._struct = _Layout(len(lengths), numbers(*lengths), numbers(*strides), array.itemsize)
        self.address = ctypes.addressof(self._struct)


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
    if not current:
        _LOG.warning(
            "the compiled loops are of another version of holdall; NumPy does their work until it is reinstalled"
        )
        return None
    return NativeKernels(library)


def chosen_kernels() -> Kernels:
    """Return the compiled loops if they were built, else the portable ones.

    HOLDALL_KERNELS=portable or native asks for one of the two.
    """
    wish = os.environ.get("HOLDALL_KERNELS", "")
    if wish not in {"", "portable", "native"}:
        raise ArgumentError(f"HOLDALL_KERNELS ({wish}) is neither portable nor native; unset it")
    native = None if wish == "portable" else native_kernels()
    if wish == "native" and native is None:
        raise ArgumentError(
            "HOLDALL_KERNELS is native, but no compiled library of this version was built; "
            "install a C compiler and run 'pip install --force-reinstall holdall'"
        )
    return native or PortableKernels()

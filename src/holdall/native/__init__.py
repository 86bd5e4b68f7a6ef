"""The compiled loops, their one loader, and the NumPy twins, which do the same work where nothing was compiled.

Which of the two are used is decided here, and said where the fast ones are missing. The loops of rollouts, which
belong to no store, are here, too.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.errors import DamageError
from holdall.native.library import (
    MOST_DEVICE_FIELDS,
    BatchRequestStruct,
    RowPlaceStruct,
    chosen_library,
    compiled_library,
    library_problem,
    linked_libraries,
    open_library,
    system_libraries,
)
from holdall.native.numpy_codec import PortableCoder
from holdall.native.numpy_kernels import PortableKernels
from holdall.native.one_call import NativeBatchReader, NativeFastTick, has_expected_objects, makes_arrays
from holdall.native.reading import NativeDecoder, NativeReading, OwnCall, ThreadPool, draw_slots, number_function
from holdall.native.sending import CopyPlan, Cut, Names, Refusal, SliceNamer, SlotSender
from holdall.native.writing import NativeCoder, NativeWriting
from holdall.schema import Array, Bytes
from holdall.storage import (
    BatchReader,
    Coder,
    Cursors,
    FastTick,
    FlatField,
    Kernels,
    Repair,
    SegmentIndex,
    TickWriter,
    address,
    release_tail,
)

# Measured by benchmarks/fallback.py; docs/troubleshooting.md has its table.
_WITHOUT_LOOPS = "add and sample take up to 2.9 times as long, and compressed data as much memory as with it"
_WITHOUT_COMPRESSION = "sampling compressed data takes 2.9 times as long, and the data as much memory as with it"


class NativeKernels(NativeWriting, NativeReading):
    """Makes parts and fills batches with the compiled loops."""

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        libraries = linked_libraries(library) or system_libraries()
        self._library, self._append_next = library, library.holdall_append_next
        self.packs_columns = bool(library.holdall_release(0, 0))
        self.coder: Coder = PortableCoder() if libraries is None else NativeCoder(library, libraries)

    def pack_columns(
        self,
        run: NDArray[np.int64],
        rings: NDArray[np.int64],
        ring_ticks: int,
        lanes: int,
        out: Bytes,
        scratch: tuple[NDArray[np.uint32], Bytes],
    ) -> int:
        """See `Kernels.pack_columns`."""
        room, (numbers, row) = (address(out), out.size), scratch
        used = self._library.holdall_pack_columns(
            address(run), address(rings), ring_ticks, lanes, *room, address(numbers), address(row)
        )
        return int(used)

    def append_next(self, part: Any, ticks: Array, obs: Array, cursors: Cursors) -> None:
        """See `Kernels.append_next`."""
        if not (ticks.nbytes == 2 * obs.nbytes == 2 * part.lanes * part.obs_bytes and len(cursors) == part.lanes):
            raise DamageError(f"a tick of {obs.nbytes} bytes came to a part of {part.obs_bytes} a lane; report this")
        part.lengthen_log()
        part.link_log()
        channels = 0
        if not obs.flags.c_contiguous:
            pixels = obs.transpose(0, 2, 3, 1) if obs.ndim == 4 and obs.itemsize == 1 else obs
            if pixels.flags.c_contiguous:  # images that lie pixel by pixel
                obs, channels = pixels, obs.shape[1]
            else:
                np.copyto(ticks[part.steps // part.lanes % 2], obs)
                obs = ticks[part.steps // part.lanes % 2]
        if self._append_next(part.address, address(ticks), address(obs), channels, address(cursors)) != 0:
            raise DamageError("a segment ran over; nothing of the tick was written. Report this")

    def release(self, first: int, nbytes: int) -> None:
        """See `Kernels.release`."""
        self._library.holdall_release(first, nbytes)

    def new_fast_tick(self, lock: Any, repair: Repair) -> FastTick:
        """Make a short way to write ticks, for a memory with this lock."""
        return NativeFastTick(self._library, lock, repair) if has_expected_objects(lock) else FastTick()

    def namer(self) -> SliceNamer | None:
        """See `Kernels.namer`."""
        return SliceNamer(self._library, self.coder if isinstance(self.coder, NativeDecoder) else None)

    def new_batch_reader(
        self, lock: Any, repair: Repair, index: SegmentIndex, most_kept_bytes: int, threads: int
    ) -> BatchReader:
        """See `Kernels.new_batch_reader`."""
        if not (has_expected_objects(lock) and makes_arrays()):
            return BatchReader()
        decoder = self.coder if isinstance(self.coder, NativeDecoder) else None
        return NativeBatchReader(self._library, decoder, lock, repair, index, most_kept_bytes, threads)


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled loops, or None if no library of this version was built."""
    library = compiled_library()
    return None if library is None else NativeKernels(library)


def _named(wish: str) -> Kernels:
    native = native_kernels() if not wish or chosen_library() is not None else None
    return native or PortableKernels()


@functools.cache
def kernels_for(wish: str) -> Kernels:
    """Return the compiled loops if they can be used, else the portable ones; found once a process for every wish.

    Args:
        wish: What HOLDALL_KERNELS says: the name of one of the two, or nothing.
    """
    if wish != "portable":
        _warn_once()
    return _named(wish)


def chosen_kernels() -> Kernels:
    """Return the kernels that HOLDALL_KERNELS names, see `kernels_for`."""
    wish = os.environ.get("HOLDALL_KERNELS", "")
    if wish != "portable":
        _warn_once()  # here, so that the warning names the caller's caller
    return kernels_for(wish)


def fallback() -> str:
    """Say what is done without compiled code, why, and how much slower it is; empty if nothing is."""
    kernels = _named(os.environ.get("HOLDALL_KERNELS", ""))
    if isinstance(kernels, PortableKernels):
        return f"NumPy does the work of the compiled loops ({library_problem()}): {_WITHOUT_LOOPS}"
    if isinstance(kernels.coder, PortableCoder):
        return f"Python packages compress (libzstd or liblz4 was not found on this system): {_WITHOUT_COMPRESSION}"
    return ""


@functools.cache
def _warn_once() -> None:
    if reason := fallback():
        warnings.warn(
            f"{reason}. Results are the same. Install a wheel of holdall for this platform, or a C compiler, libzstd "
            "and liblz4, and run 'pip install --force-reinstall --no-deps holdall'; HOLDALL_KERNELS=portable silences "
            "this",
            RuntimeWarning,
            stacklevel=4,
        )


# ---------------------------------------------------------------- rollouts


Floats = NDArray[np.float32]


def estimate_advantages(
    rewards: Floats,
    values: Floats,
    ends: Floats,
    last_values: Floats,
    gamma: float,
    gae_lambda: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Fill `advantages` and `returns`; all arrays are contiguous float32 of one shape.

    Args:
        ends: 1 where the episode ended with the step, else 0.
        last_values: Of the observations behind the last step, one per lane.
        advantages: May be `rewards` itself.
    """
    decay = gamma * gae_lambda
    library = chosen_library()
    if library is None:
        _estimate_portably(rewards, values, ends, last_values, gamma, decay, advantages, returns)
        return
    steps, lanes = values.shape
    library.holdall_advantages(
        address(rewards), address(values), address(ends), address(last_values), gamma, decay,
        steps, lanes, address(advantages), address(returns),
    )  # fmt: skip


def _estimate_portably(
    rewards: Floats,
    values: Floats,
    ends: Floats,
    last_values: Floats,
    gamma: float,
    decay: float,
    advantages: Floats,
    returns: Floats,
) -> None:
    """Do what rollout.c does, a row of lanes at a time."""
    going = np.float32(1) - ends
    gamma_, decay_ = np.float32(gamma), np.float32(decay)
    next_values, later = last_values, np.zeros_like(last_values)
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma_ * next_values * going[t] - values[t]
        later = delta + decay_ * going[t] * later
        advantages[t] = later
        next_values = values[t]
    np.add(advantages, values, out=returns)

"""The loops of `holdall._native` that are still called through ctypes, behind the contract of `Kernels`.

The loops of rollouts, which belong to no store, are here, too.
"""

from __future__ import annotations

import ctypes
import functools
import threading
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
    native_library,
    open_library,
)
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


class NativeKernels(NativeWriting, NativeReading):
    """Makes parts and fills batches.

    Args:
        coder: Compresses and decompresses blocks.
    """

    def __init__(self, coder: NativeCoder | None = None) -> None:
        self._library = native_library()
        self._append_next = self._library.holdall_append_next
        self.packs_columns = bool(self._library.holdall_release(0, 0))
        self._decoder = coder or NativeCoder()
        self.coder: Coder = self._decoder

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

    def namer(self) -> SliceNamer:
        """See `Kernels.namer`."""
        return SliceNamer(self._library, self._decoder)

    def new_batch_reader(
        self, lock: Any, repair: Repair, index: SegmentIndex, most_kept_bytes: int, threads: int
    ) -> BatchReader:
        """See `Kernels.new_batch_reader`."""
        if not (has_expected_objects(lock) and makes_arrays()):
            return BatchReader()
        return NativeBatchReader(self._library, self._decoder, lock, repair, index, most_kept_bytes, threads)


@functools.cache
def chosen_kernels() -> Kernels:
    """Return the loops. All memories of a process share them."""
    return NativeKernels()


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
    steps, lanes = values.shape
    native_library().holdall_advantages(
        address(rewards), address(values), address(ends), address(last_values), gamma, decay,
        steps, lanes, address(advantages), address(returns),
    )  # fmt: skip

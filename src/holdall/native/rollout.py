"""Loops of rollouts: rollout.c puts images in order, estimates advantages and sends trajectories, without the GIL.

In:  arrays, whose sizes their callers have checked.  Out: the same arrays, filled.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from holdall.native.library import chosen_library
from holdall.native.reading import ThreadPool
from holdall.schema import Array
from holdall.storage import address
from holdall.threads import pool_threads

_BYTES_PER_THREAD = 2**20
"""Bytes that are worth waking a thread for."""
_MOST_THREADS = 16
"""Threads that copy: to fill memory as fast as the bus empties it takes many."""
_FEWEST_CHANNELS = 4
"""From this many channels on, C separates them faster than NumPy copies them."""


def copy_in_order(to: Array, source: Array) -> None:
    """Copy to an array of (lanes, ...) in C order; images with channels first may lie pixel by pixel in `source`."""
    if not source.flags.c_contiguous and _lies_pixel_by_pixel(source) and (library := chosen_library()) is not None:
        lanes, channels, height, width = source.shape
        library.holdall_part_channels(source.ctypes.data, address(to), lanes, height * width, channels)
    else:
        np.copyto(to, source)


def _lies_pixel_by_pixel(images: Array) -> bool:
    if images.ndim != 4 or images.itemsize != 1 or images.shape[1] < _FEWEST_CHANNELS:
        return False
    _, channels, height, width = images.shape
    return images.strides == (channels * height * width, 1, width * channels, channels)


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
        """Return the address of what sends where the device is the host; None where nothing is compiled."""
        library = chosen_library()
        return None if library is None else ctypes.cast(library.holdall_send_here, ctypes.c_void_p).value

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
        library, (send, record, query) = chosen_library(), self._functions
        if library is None:
            return -1
        done, begins = np.zeros(len(loads), np.int64), np.array(sources, np.uint64)
        wanted = int(pieces[:, 2].sum()) // _BYTES_PER_THREAD - 1
        with self._pool.helping(library, wanted) as (pool, helpers):
            error: int = library.holdall_send_slots(
                address(pieces), len(pieces), address(loads), len(loads), address(begins), *self._slots, address(done),
                pool, helpers, send, there, stream, record, query, address(self._events),
            )  # fmt: skip
        return error


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

"""The compiled loops of rollouts, outside the GIL: planes.c puts images in order, advantage.c estimates advantages.

In:  arrays, whose sizes their callers have checked.  Out: the same arrays, filled.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.native.kernels import chosen_kernels
from holdall.schema import Array
from holdall.storage.blocks import address

_POINTER, _NUMBER, _SINGLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class RolloutLoops:
    """The functions of the library, with their signatures."""

    def __init__(self, library: Any) -> None:
        self.advantages = library.holdall_advantages
        self.advantages.argtypes = [
            *[_POINTER] * 4, _SINGLE, _SINGLE, _NUMBER, _NUMBER, _POINTER, _POINTER,
        ]  # fmt: skip
        self.advantages.restype = None
        self.part_channels = library.holdall_part_channels
        self.part_channels.argtypes = [_POINTER, _POINTER, _NUMBER, _NUMBER, _NUMBER]
        self.part_channels.restype = None


def rollout_loops() -> RolloutLoops | None:
    """Return the compiled loops where the memory's own kernels are compiled too, else None."""
    return _loaded() if chosen_kernels().name == "native" else None


@functools.cache
def _loaded() -> RolloutLoops | None:
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    try:
        return RolloutLoops(ctypes.CDLL(str(Path(__file__).with_name(f"_kernels{suffix}"))))
    except (OSError, AttributeError):  # not built, or built before rollouts were
        return None


_FEWEST_CHANNELS = 4
"""From this many channels on, C separates them faster than NumPy copies them."""


def copy_in_order(to: Array, source: Array) -> None:
    """Copy to an array of (lanes, ...) in C order; images with channels first may lie pixel by pixel in `source`."""
    if not source.flags.c_contiguous and _lies_pixel_by_pixel(source) and (loops := rollout_loops()) is not None:
        lanes, channels, height, width = source.shape
        loops.part_channels(source.ctypes.data, address(to), lanes, height * width, channels)
    else:
        np.copyto(to, source)


def _lies_pixel_by_pixel(images: Array) -> bool:
    if images.ndim != 4 or images.itemsize != 1 or images.shape[1] < _FEWEST_CHANNELS:
        return False
    _, channels, height, width = images.shape
    return images.strides == (channels * height * width, 1, width * channels, channels)


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
    loops = rollout_loops()
    if loops is None:
        _estimate_portably(rewards, values, ends, last_values, gamma, decay, advantages, returns)
        return
    steps, lanes = values.shape
    loops.advantages(
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
    """Do what advantage.c does, a row of lanes at a time."""
    going = np.float32(1) - ends
    gamma_, decay_ = np.float32(gamma), np.float32(decay)
    next_values, later = last_values, np.zeros_like(last_values)
    for t in range(len(values) - 1, -1, -1):
        delta = rewards[t] + gamma_ * next_values * going[t] - values[t]
        later = delta + decay_ * going[t] * later
        advantages[t] = later
        next_values = values[t]
    np.add(advantages, values, out=returns)

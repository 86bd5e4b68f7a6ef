"""Loops of rollouts: rollout.c puts images in order and estimates advantages, without the GIL.

In:  arrays, whose sizes their callers have checked.  Out: the same arrays, filled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from holdall.native.library import chosen_library
from holdall.schema import Array
from holdall.storage import address

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

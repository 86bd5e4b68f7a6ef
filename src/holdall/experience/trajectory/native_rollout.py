"""The compiled loops of rollouts: track.c, planes.c and advantage.c through ctypes, outside the GIL.

In:  contiguous arrays, whose sizes their callers have checked.  Out: the same arrays, filled.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

from holdall.experience.kernels import chosen_kernels

_POINTER, _NUMBER, _SINGLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class TrackStruct(ctypes.Structure):
    """One field of a rollout, as track.c reads it."""

    _fields_ = (
        ("reels", _POINTER),
        ("reel_count", _NUMBER),
        ("reel_by_tick", _POINTER),
        ("cursors", _POINTER),
        ("ticks", _NUMBER),
        ("lanes", _NUMBER),
        ("outer", _NUMBER),
        ("run_bytes", _NUMBER),
        ("window", _NUMBER),
        ("shift", _NUMBER),
    )


class RolloutLoops:
    """The functions of the library, with their signatures."""

    def __init__(self, library: Any) -> None:
        self.gather_track = library.holdall_gather_track
        self.gather_track.argtypes = [_POINTER, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER]
        self.gather_track.restype = _NUMBER
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
        return RolloutLoops(ctypes.CDLL(str(Path(__file__).parents[1] / f"_kernels{suffix}")))
    except (OSError, AttributeError):  # not built, or built before rollouts were
        return None

"""Settings of the C library's allocator in this process."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import psutil

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def map_blocks_from(nbytes: int) -> bool:
    """Let the C library map every block of at least `nbytes` on its own. Return False where it cannot."""
    try:
        set_option: Any = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(set_option(_M_MMAP_THRESHOLD, nbytes)) and bool(set_option(_M_TRIM_THRESHOLD, 2 * nbytes))


def return_free_heap() -> None:
    """Return free pages of the C library's heap to the system, where the library can do that."""
    with contextlib.suppress(AttributeError, NotImplementedError, OSError):
        psutil.heap_trim()

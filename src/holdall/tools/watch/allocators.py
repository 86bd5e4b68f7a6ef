"""The heap of the C library in this process, through psutil."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import psutil


class HeapUse(NamedTuple):
    """Live bytes of the C library's allocator."""

    used: int  # In the heap, over all arenas.
    mapped: int  # In large blocks, which are mapped one by one.


def read_heap_use() -> HeapUse | None:
    """Return the live bytes. None where psutil cannot count them, such as with musl."""
    try:
        heap = psutil.heap_info()
    except (AttributeError, NotImplementedError, OSError):
        return None
    return HeapUse(int(heap.heap_used), int(heap.mmap_used))


def return_free_heap() -> None:
    """Return free pages of the C library's heap to the system, where the library can do that."""
    with contextlib.suppress(AttributeError, NotImplementedError, OSError):
        psutil.heap_trim()

"""What the allocators of this process count: the heap of the C library, and Python's arenas for small objects.

psutil reads the heap. Python's figures are parsed from the report that `sys._debugmallocstats` prints. Where an
allocator provides no figures (musl, macOS, Windows), the answer is None.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import NamedTuple

import psutil

_USED = re.compile(rb"# bytes in allocated blocks\s*=\s*([\d,]+)")
_ARENAS = re.compile(rb"\d+ arenas \* \d+ bytes/arena\s*=\s*([\d,]+)")


class HeapUse(NamedTuple):
    """Live bytes of the C library's allocator."""

    used: int  # In the heap, over all arenas.
    mapped: int  # In large blocks, which are mapped one by one.


class PythonUse(NamedTuple):
    """Bytes of Python's own allocator, for objects of up to 512 bytes."""

    taken: int
    used: int


def read_heap_use() -> HeapUse | None:
    """Ask the C library."""
    try:
        found = psutil.heap_info()
    except (AttributeError, NotImplementedError, OSError):
        return None
    return HeapUse(int(found.heap_used), int(found.mmap_used))


def return_free_heap() -> None:
    """Return free pages of the C library's heap to the system, where the library can do that."""
    with contextlib.suppress(AttributeError, NotImplementedError, OSError):
        psutil.heap_trim()


def read_python_use() -> PythonUse | None:
    """Ask Python's allocator. It visits every pool of 16 KiB, which takes some microseconds per megabyte."""
    text = _describe_python_heap()
    arenas = _ARENAS.search(text)
    used = _USED.search(text)
    if arenas is None or used is None:  # Allocations are traced, or Python was built without this allocator.
        return None
    return PythonUse(int(arenas[1].replace(b",", b"")), int(used[1].replace(b",", b"")))


def _describe_python_heap() -> bytes:
    """Return the report of Python's allocator, which is empty while it is unknown.

    The native module imports NumPy, and a script may still set how many threads NumPy gets. So the report is unknown
    until the script itself has imported NumPy.
    """
    spec = getattr(sys.modules.get("numpy"), "__spec__", None)
    if spec is None or getattr(spec, "_initializing", False):
        return b""
    from holdall._native import describe_python_heap  # noqa: PLC0415  It imports NumPy.

    return describe_python_heap() or b""

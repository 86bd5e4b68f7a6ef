"""What the allocators of this process count: the heap of the C library, and Python's arenas for small objects.

psutil reads the heap. Python's figures come from the report that `sys._debugmallocstats` prints, which is caught in
memory here. Where an allocator provides no figures (musl, macOS, Windows), the answer is None.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any, NamedTuple

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


def read_python_use() -> PythonUse | None:
    """Ask Python's allocator. It visits every pool of 16 KiB, which takes some microseconds per megabyte."""
    functions = _find_functions()
    if functions is None:
        return None
    text = _catch_report(functions)
    arenas = _ARENAS.search(text)
    used = _USED.search(text)
    if arenas is None or used is None:  # Allocations are traced, or Python was built without this allocator.
        return None
    return PythonUse(int(arenas[1].replace(b",", b"")), int(used[1].replace(b",", b"")))


def _catch_report(functions: Any) -> bytes:
    describe, open_stream, close_stream, free = functions
    text = ctypes.c_void_p()
    size = ctypes.c_size_t()
    stream = open_stream(ctypes.byref(text), ctypes.byref(size))
    if not stream:
        return b""
    try:
        describe(stream)
    finally:
        close_stream(stream)
    try:
        return ctypes.string_at(text.value, size.value) if text.value else b""
    finally:
        free(text)


@cache
def _find_functions() -> tuple[Any, Any, Any, Any] | None:
    try:
        library: Any = ctypes.CDLL(None)
        # This one keeps the GIL: objects must not be freed while pools are counted.
        describe: Any = ctypes.pythonapi["_PyObject_DebugMallocStats"]
        functions = (describe, library.open_memstream, library.fclose, library.free)
    except (AttributeError, TypeError, OSError):
        return None
    describe.argtypes = (ctypes.c_void_p,)
    library.open_memstream.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.open_memstream.restype = ctypes.c_void_p
    library.fclose.argtypes = (ctypes.c_void_p,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.free.restype = None
    return functions

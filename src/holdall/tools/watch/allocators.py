"""What the allocators of this process report: the C library's heap and Python's own arenas.

In:  nothing; called in the watched process.  Out: bytes in live objects, and bytes kept for later ones.
Both are read through functions that the libraries export. Where there are none (musl, macOS, Windows, other Pythons),
the answer is None, and a watch uses the kernel's figures alone.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any, NamedTuple

_IN_USE = re.compile(rb"# bytes in allocated blocks\s*=\s*([\d,]+)")
_ARENAS = re.compile(rb"\d+ arenas \* \d+ bytes/arena\s*=\s*([\d,]+)")


class Heap(NamedTuple):
    """The C library's heap, over all of its arenas."""

    taken: int  # from the system, without what is mapped on its own
    in_use: int
    free: int  # kept; pages that were given back to the system may be among them
    mapped: int  # large blocks, each mapped on its own and given back when it is freed


class PythonObjects(NamedTuple):
    """Python's own allocator, for objects of up to 512 bytes."""

    taken: int
    in_use: int


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of the GNU C library."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    ))  # fmt: skip


def heap() -> Heap | None:
    """Ask the C library; microseconds, or as long as it takes to count what is free."""
    ask = _mallinfo()
    if ask is None:
        return None
    found = ask()
    return Heap(int(found.arena), int(found.uordblks), int(found.fordblks), int(found.hblkhd))


def python_objects() -> PythonObjects | None:
    """Ask Python's allocator, which visits every pool of 16 KiB: some microseconds a megabyte."""
    report = _pymalloc_report()
    arenas, in_use = _ARENAS.search(report), _IN_USE.search(report)
    if arenas is None or in_use is None:
        return None
    return PythonObjects(_parsed_number(arenas[1]), _parsed_number(in_use[1]))


def return_free_heap() -> bool:
    """Let the C library return free pages to the system; False where it cannot."""
    library = _c_library()
    trim = getattr(library, "malloc_trim", None)
    if trim is None:
        return False
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)
    return True


def _pymalloc_report() -> bytes:
    asked = _pymalloc()
    if asked is None:
        return b""
    describe, open_stream, close_stream, free = asked
    text, size = ctypes.c_void_p(), ctypes.c_size_t()
    stream = open_stream(ctypes.byref(text), ctypes.byref(size))
    if not stream:
        return b""
    try:
        describe(stream)
    finally:
        close_stream(stream)
    try:
        return ctypes.string_at(text.value or 0, size.value) if text.value else b""
    finally:
        free(text)


@cache
def _c_library() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such thing
        return None


@cache
def _mallinfo() -> Any:
    ask = getattr(_c_library(), "mallinfo2", None)
    if ask is not None:
        ask.argtypes, ask.restype = (), _MallInfo
    return ask


@cache
def _pymalloc() -> tuple[Any, Any, Any, Any] | None:
    library = _c_library()
    try:
        # The one that holds the GIL: objects must not come and go while pools are counted.
        describe = ctypes.pythonapi["_PyObject_DebugMallocStats"]
        open_stream, close_stream, free = library.open_memstream, library.fclose, library.free
    except (AttributeError, TypeError):
        return None
    describe.argtypes, describe.restype = (ctypes.c_void_p,), ctypes.c_int
    open_stream.argtypes, open_stream.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_void_p
    close_stream.argtypes, close_stream.restype = (ctypes.c_void_p,), ctypes.c_int
    free.argtypes, free.restype = (ctypes.c_void_p,), None
    return describe, open_stream, close_stream, free


def _parsed_number(digits: bytes) -> int:
    return int(digits.replace(b",", b""))

"""What the allocators of this process report: the C library's heap, Python's own arenas, and lines that allocate.

In:  nothing; called in the watched process.  Out: bytes in live objects, bytes kept for later ones, and after a trace
of some seconds the lines of the program whose objects stay.
Heaps are read through functions that the libraries export. Where there are none (musl, macOS, Windows, other Pythons),
the answer is None, and a watch uses the kernel's figures alone. Lines are found with Python's `tracemalloc`, which
slows the program down until the trace ends (docs/watch.md has the figures). Torch reports no memory of tensors to it,
so for these a line is found by their Python objects.
"""

from __future__ import annotations

import ctypes
import linecache
import re
import sysconfig
import threading
import tracemalloc
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import holdall

_IN_USE = re.compile(rb"# bytes in allocated blocks\s*=\s*([\d,]+)")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
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


class GrowingLine(NamedTuple):
    """A line of the program whose objects stay, by a trace of some seconds."""

    file: str
    number: int
    code: str
    nbytes: int  # that stayed
    blocks: int
    seconds: float


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


def map_blocks_from(nbytes: int) -> bool:
    """Let the C library map every block of so many bytes on its own, in place of a threshold that moves.

    False where it cannot. As with the threshold that moves, twice as much stays free at the end of the heap.
    """
    option = getattr(_c_library(), "mallopt", None)
    if option is None:
        return False
    option.argtypes, option.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(option(_M_MMAP_THRESHOLD, nbytes)) and bool(option(_M_TRIM_THRESHOLD, 2 * nbytes))


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


LEG_S = 2.0
"""A trace has three legs of this length. What grows in the second and in the third stays."""
_CALLERS = 12
"""Frames that are kept of every block where a library allocates: each of them costs time."""
_MOST_LINES = 5
_OWN = str(Path(holdall.__file__).parent)
_LIBRARIES = ("<", *dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))

_Line = tuple[str, int]


def trace_growth(ended: threading.Event, leg_s: float = LEG_S) -> tuple[GrowingLine, ...]:
    """Trace what this process allocates for three legs, or until `ended` is set; return the lines that grow.

    A fourth leg looks for the callers if these are lines of a library. A trace that the user started goes on as it was.
    """
    held = [_by_line(snapshot) for snapshot in _held_blocks(ended, leg_s, 3, 1)]
    if len(held) < 3:
        return ()
    (first, before), (middle, _), (last, blocks) = held
    grown = {line: last[line] - first[line] for line in last if last[line] > middle[line] > first[line]}
    largest = sorted(grown, key=lambda line: -grown[line])[:_MOST_LINES]
    callers: dict[_Line, _Line] = {}
    if any(file.startswith(_LIBRARIES) for file, _ in largest[:1]):
        callers = _callers(_held_blocks(ended, leg_s, 1, _CALLERS))
    return tuple(
        GrowingLine(
            *(caller := callers.get(line, line)),
            linecache.getline(*caller).strip()[:120],
            grown[line],
            max(blocks[line] - before[line], 0),
            2 * leg_s,
        )
        for line in largest
    )


def _held_blocks(ended: threading.Event, leg_s: float, legs: int, frames: int) -> list[tracemalloc.Snapshot]:
    """Trace for some legs, and return what is held at the end of each; fewer if `ended` is set."""
    is_own = not tracemalloc.is_tracing()
    if is_own:
        tracemalloc.start(frames)
    try:
        held: list[tracemalloc.Snapshot] = []
        while len(held) < legs and not ended.wait(leg_s):
            held.append(tracemalloc.take_snapshot())
        return held
    finally:
        if is_own:
            tracemalloc.stop()


def _by_line(snapshot: tracemalloc.Snapshot) -> tuple[Counter[_Line], Counter[_Line]]:
    """Return bytes and blocks by the line that allocated them, without those of holdall's memories."""
    sizes: Counter[_Line] = Counter()
    blocks: Counter[_Line] = Counter()
    for trace in snapshot.traces:
        frame = trace.traceback[-1]
        if not frame.filename.startswith(_OWN):
            sizes[frame.filename, frame.lineno] += trace.size
            blocks[frame.filename, frame.lineno] += 1
    return sizes, blocks


def _callers(held: list[tracemalloc.Snapshot]) -> dict[_Line, _Line]:
    """Return by line of a library the newest line of the user's own code that most of its blocks come from."""
    found: dict[_Line, Counter[_Line]] = {}
    for trace in (trace for snapshot in held for trace in snapshot.traces):
        frames = [(frame.filename, frame.lineno) for frame in reversed(trace.traceback)]
        own = next((frame for frame in frames if not frame[0].startswith(_LIBRARIES)), None)
        if own is not None and own != frames[0] and not own[0].startswith(_OWN):
            found.setdefault(frames[0], Counter())[own] += trace.size
    return {line: callers.most_common(1)[0][0] for line, callers in found.items()}

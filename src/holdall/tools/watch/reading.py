"""Readings: where the memory of a process tree is at one moment, their history, and trends; what its allocators report.

In:  the parts of a process tree's memory.  Out: one reading, a bounded list of them, robust slopes with an interval.
Invariants: the parts of a reading add up to the tree's proportional set size, to the byte. The history is bounded; when
it is full, every other reading of the older half is dropped. Slopes are medians over all pairs of points (Theil, Sen).

The allocators of this process are the C library's heap and Python's own arenas: bytes in live objects, bytes kept for
later ones, and after a trace of some seconds the lines of the program whose objects stay. Heaps are read through
functions that the libraries export. Where there are none (musl, macOS, Windows, other Pythons), the answer is None, and
a watch uses the kernel's figures alone. Lines are found with Python's `tracemalloc`, which slows the program down until
the trace ends (docs/watch.md has the figures). Torch reports no memory of tensors to it, so for these a line is found
by their Python objects.
"""

from __future__ import annotations

import ctypes
import linecache
import math
import re
import sysconfig
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import holdall

GROUPS = (
    "buffers", "torch", "python", "heap_retained", "stacks", "libraries", "shared", "workers", "other", "unattributed",
)  # fmt: skip
"""In the order in which they are stacked, shown and recorded."""
IMPORT_PHASE = "import"
"""What a process without steps reports while its main thread imports something."""
_MOST_READINGS = 720
_LEAST_SECONDS = 60.0
"""A process that reports no steps is judged after this time without imports: it may be reading a data set."""
_BINS = 48
_FEWEST_BINS = 12
_DEVIATIONS = 3.0
"""Standard deviations of Kendall's statistic: one clean series in 370 would lie outside, if it were all of the test."""
_EVEN_SHARE = 0.4
"""What each quarter of a window has to contribute of its share: one jump is no steady growth."""
_TIMES_NOISE = 6.0
"""Least growth, over how far readings lie from the line: a level that wanders ends somewhere else, too."""


@dataclass(frozen=True, slots=True)
class AttributedPart:
    """Some memory that has a name."""

    group: str
    name: str
    resident: int  # its share of the tree's proportional set size
    allocated: int  # addresses, touched or not
    fill: float | None = None
    grows: bool = False  # whether more is allocated for it as it fills


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What is held on a GPU; None where that is unknown."""

    requested: int | None  # by tensors
    allocated: int | None  # rounded up to blocks
    reserved: int | None  # by torch, from the driver
    fragmented: int | None  # reserved, free, and in pieces
    other: int | None  # of this process, but not torch's: the context, libraries
    limit: int | None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """A process tree, at one moment."""

    time: float
    pss: int
    peak: int  # most that the tree had at a reading, or the process itself at any time
    parts: tuple[AttributedPart, ...]
    step: int | None = None
    goal: int | None = None
    phase: str | None = None
    gpu: GpuMemory | None = None
    steps_per_second: float | None = None
    pressure: float | None = None  # share of the last 10 s in which something waited for memory, in per cent
    threads: int = 0
    torch_threads: int | None = None
    cores: int = 1
    page_cache: int | None = None  # of the control group
    headroom: dict[str, int] | None = None  # bytes left, by what limits them
    spilled: int = 0  # bytes on disk
    disk_free: int | None = None  # where these are
    exact: bool = True  # False where the system reports only sums

    def of(self, group: str) -> int:
        """Return what one group takes."""
        return sum(part.resident for part in self.parts if part.group == group)

    @property
    def attributed(self) -> float:
        """Share of the memory that has a name."""
        return 1.0 - self.of("unattributed") / self.pss if self.pss else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and text, as they are recorded."""
        return {"kind": "reading", **asdict(self), "attributed": round(self.attributed, 4)}


class LiveObjects(NamedTuple):
    """What live objects took at one moment, by the process's own allocators; there are more of them than readings."""

    time: float
    step: int | None
    phase: str | None
    heap: int  # of all kinds, without named buffers
    python: int  # of that, Python's objects of up to 512 bytes


ItemT = TypeVar("ItemT", MemoryReading, LiveObjects)


class ReadingHistory:
    """Readings, and live objects between them, in order of time."""

    def __init__(self, most: int = _MOST_READINGS) -> None:
        self.readings: list[MemoryReading] = []
        self.live: list[LiveObjects] = []
        self.growing: tuple[GrowingLine, ...] = ()  # lines of the program that allocate what stays
        self._most = most

    def add(self, reading: MemoryReading) -> None:
        """Remember a reading."""
        self.readings = self._thinned([*self.readings, reading])

    def add_live(self, live: LiveObjects) -> None:
        """Remember what the process reported about its live objects."""
        self.live = self._thinned([*self.live, live])

    def _thinned(self, items: list[ItemT]) -> list[ItemT]:
        half = len(items) // 2
        return items if len(items) <= self._most else items[:half:2] + items[half:]

    @property
    def newest(self) -> MemoryReading:
        """The last reading."""
        return self.readings[-1]

    @property
    def counts_steps(self) -> bool:
        """Whether the process reports its steps; if not, time is used instead."""
        return self.newest.step is not None

    def position(self, reading: MemoryReading | LiveObjects) -> float:
        """Return the step of a reading, or its time."""
        return reading.time if not self.counts_steps else float(reading.step or 0)

    def of_training(self, items: list[ItemT]) -> list[ItemT]:
        """Return those after the first step: until then a process imports, and allocates what it will need."""
        if self.counts_steps:
            return [item for item in items if item.step]
        last = max((at for at, item in enumerate(items) if item.phase == IMPORT_PHASE), default=-1)
        later = items[last + 1 :]
        return later if later and later[-1].time - later[0].time >= _LEAST_SECONDS else []

    def series(
        self, value: Callable[[MemoryReading], float | None], readings: list[MemoryReading] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return positions and values of the readings that have one."""
        found = [(self.position(one), value(one)) for one in (self.readings if readings is None else readings)]
        known = [(position, number) for position, number in found if number is not None]
        return [position for position, _ in known], [number for _, number in known]


def in_common_phase(items: list[ItemT]) -> list[ItemT]:
    """Return the readings or live objects of the most frequent phase: what another phase takes is no trend."""
    phases = [item.phase for item in items]
    common = max(set(phases), key=phases.count, default=None)
    return [item for item in items if item.phase == common]


def buffers_of(reading: MemoryReading) -> dict[str, list[AttributedPart]]:
    """Return the buffers of a reading by what they are parts of: `replay.rewards` is of `replay`."""
    found: dict[str, list[AttributedPart]] = {}
    for part in reading.parts:
        if part.group == "buffers":
            found.setdefault(part.name.partition(".")[0], []).append(part)
    return found


class Trend(NamedTuple):
    """A slope and the interval around it."""

    slope: float
    low: float
    high: float
    first: float  # where the series was looked at from
    last: float


def trend(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """Return the slope of a series; None if there are too few points, or all at one position.

    The slope is the median over all pairs of points (Theil 1950, Sen 1968), and its interval comes from Kendall's
    statistic. Points are gathered in bins first, because neighbours depend on each other.
    """
    points = _binned(xs, ys)
    if len(points) < _FEWEST_BINS:
        return None
    slopes = sorted(
        (later - earlier) / (right - left)
        for i, (left, earlier) in enumerate(points)
        for right, later in points[i + 1 :]
        if right > left
    )
    if not slopes:
        return None
    count = len(points)
    spread = _DEVIATIONS * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(int((len(slopes) - spread) / 2), 0)
    high = min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)
    return Trend(median(slopes), slopes[low], slopes[high], points[0][0], points[-1][0])


def steady_growth(xs: Sequence[float], ys: Sequence[float]) -> Trend | None:
    """Return the slope of a series that grows all the time, and not in one jump; None for all others."""
    found = trend(xs, ys)
    if found is None or found.low <= 0:
        return None
    points = _binned(xs, ys)
    quarter = len(points) // 4
    levels = [median(y for _, y in points[i * quarter : (i + 1) * quarter]) for i in range(4)]
    steps = [after - before for before, after in pairwise(levels)]
    mean = sum(steps) / len(steps)
    is_even = mean > 0 and min(steps) >= _EVEN_SHARE * mean
    centre = median(y - found.slope * x for x, y in points)
    noise = median(abs(y - found.slope * x - centre) for x, y in points)
    return found if is_even and found.slope * (found.last - found.first) >= _TIMES_NOISE * noise else None


def _binned(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Gather a series in bins of equal counts: the medians of each."""
    points = sorted(zip(xs, ys, strict=True))
    count = min(_BINS, len(points))
    edges = [round(i * len(points) / count) for i in range(count + 1)] if count else []
    bins = [points[start:end] for start, end in pairwise(edges) if end > start]
    return [(median(x for x, _ in one), median(y for _, y in one)) for one in bins]


# ---------------------------------------------------------------- what the allocators of this process report

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
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return trim is not None


def map_blocks_from(nbytes: int) -> bool:
    """Let the C library map every block of so many bytes on its own, in place of a threshold that moves.

    False where it cannot. As with the threshold that moves, twice as much stays free at the end of the heap.
    """
    option = getattr(_c_library(), "mallopt", None)
    return (
        option is not None and bool(option(_M_MMAP_THRESHOLD, nbytes)) and bool(option(_M_TRIM_THRESHOLD, 2 * nbytes))
    )


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

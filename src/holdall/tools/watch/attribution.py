"""Attribution: the memory of one process, part by part, as the kernel's files in /proc and its agent report show it.

In:  a process id, its mappings, and its agent report.  Out: parts whose sum is its proportional set size, to the byte.
Named arrays, stacks, heaps, library variables and large malloc blocks are address ranges, and the page map says how
much of each is resident. The rest is split by what the allocators report. What stays without a name is shown as
unattributed. Where the kernel does not show a file to this user, the answer is None or empty.
"""

from __future__ import annotations

import bisect
import mmap
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path, PurePosixPath
from typing import ClassVar, Self

from holdall.machine import Mapping, mappings, read_text
from holdall.tools.watch.agent_files import AgentReport, HeldField, Region
from holdall.tools.watch.reading import GROUPS, AttributedPart
from holdall.units import format_bytes

_LARGE_MAPPING_BYTES = 8 * 2**20
"""A mapping without a name of at least this length is a part of its own, if the process has no agent."""

_HEAP, _BLOCK = "heap", "block"


class _PartSums(dict[tuple[str, str], AttributedPart]):
    """Parts under way, by group and name."""

    def add(self, group: str, name: str, resident: int, allocated: int, region: Region | None = None) -> None:
        before = self.get((group, name)) or AttributedPart(group, name, 0, 0)
        known = before if region is None else region
        fill, grows = known.fill if before.fill is None else before.fill, before.grows or known.grows
        sums = before.resident + resident, before.allocated + allocated
        self[group, name] = AttributedPart(group, name, *sums, fill, grows)

    def in_order(self) -> list[AttributedPart]:
        return sorted(self.values(), key=lambda part: (GROUPS.index(part.group), -part.resident, part.name))


@dataclass(frozen=True, slots=True)
class _Claim:
    """A range of addresses that is known to be something."""

    start: int
    end: int
    kind: str  # _HEAP, _BLOCK, or a group
    region: Region | None = None


def attribute_memory(pid: int, report: AgentReport | None, arrays: Sequence[Region] = ()) -> list[AttributedPart]:
    """Read a process and return where its memory is.

    Args:
        arrays: Regions that are known beside those of the report.
    """
    found = mappings(pid)
    if not found:  # its memory is gone, and its exit code waits to be read
        raise ProcessLookupError(pid)
    sums = _PartSums()
    named = list(named_mappings(found))
    for mapping, group, name in named:
        sums.add(group, name, mapping.proportional, mapping.nbytes)
    whole = {mapping.start for mapping, _, _ in named}
    plain = [one for one in found if one.start not in whole]
    libraries = [(mapping, name) for mapping, group, name in named if group == "libraries"]
    claims = _claims(pid, found, libraries, [*arrays, *(() if report is None else report.regions)])
    nameless, taken = 0, Counter[str]()
    with PageMap(pid) as pages, ProcessMemory(pid) as memory:
        if report is not None:
            claims = _with_malloc_blocks(claims, plain, memory)
        for mapping, here in _by_mapping(plain, claims):
            left = _assign_resident(mapping, here, pages, sums, taken)
            if report is None and left and mapping.nbytes >= _LARGE_MAPPING_BYTES:
                name = f"mapping of {format_bytes(mapping.nbytes)}, {100 * left / mapping.nbytes:.0f} % touched"
                sums.add("unattributed", name, left, mapping.nbytes)
            else:
                nameless += left
        is_readable = memory.is_readable
    group = "torch" if ("libraries", "torch") in sums else "python"
    _split_heap(taken, report, group, sums)
    if report is not None:
        if report.python is not None:
            objects = min(report.python.taken, nameless)
            sums.add("python", "objects", objects, report.python.taken)
            nameless -= objects
        in_blocks = taken[_BLOCK]
        allocated = sum(claim.end - claim.start for claim in claims if claim.kind == _BLOCK)
        if not is_readable and report.heap is not None:
            allocated = _blocks_by_total(report.heap.mapped, claims)
            in_blocks = min(allocated, nameless)
            nameless -= in_blocks
        nameless, in_blocks = _attribute_held_fields(report.held, nameless, in_blocks, sums)
        sums.add(group, "large blocks without a name", in_blocks, allocated)
    sums.add("unattributed", "memory without a name", nameless, nameless)
    return sums.in_order()


def _attribute_held_fields(
    held: Sequence[HeldField], nameless: int, in_blocks: int, sums: _PartSums
) -> tuple[int, int]:
    """Attribute memory without a name to the fields of holdall's memories, which report sizes and no addresses.

    Their large arrays are mapped, so they are taken from the mappings without a name first, and then from the blocks of
    the C library. Return what remains of both.
    """
    for field in held:
        from_mappings = min(field.nbytes, nameless)
        from_blocks = min(field.nbytes - from_mappings, in_blocks)
        nameless -= from_mappings
        in_blocks -= from_blocks
        part = Region("buffers", field.name, 0, field.nbytes, field.fill, grows=True)
        sums.add("buffers", field.name, from_mappings + from_blocks, field.nbytes, part)
    return nameless, in_blocks


def _claims(pid: int, found: list[Mapping], libraries: list[tuple[Mapping, str]], known: list[Region]) -> list[_Claim]:
    claims = [_Claim(start, end, _HEAP) for start, end in heap_ranges(found)]
    stacks = [("stacks", "threads", *ends) for ends in stack_ranges(pid, found).values()]
    zeroed = [("libraries", name, start, end) for start, end, name in bss_ranges(pid, libraries)]
    regions = [Region(group, name, start, end - start, in_heap=False) for group, name, start, end in stacks + zeroed]
    claims += [_Claim(one.address, one.address + one.nbytes, one.group, one) for one in [*regions, *known]]
    return sorted(claims, key=lambda claim: claim.start)


def _with_malloc_blocks(claims: list[_Claim], plain: list[Mapping], memory: ProcessMemory) -> list[_Claim]:
    """Add the large blocks in which nothing is claimed yet."""
    nameless = [one for one in plain if is_nameless(one) and one.permissions.startswith("rw-p")]
    starts = [claim.start for claim in claims]
    found = []
    for start, end in memory.blocks(nameless):
        at = bisect.bisect_left(starts, end)
        if at == 0 or claims[at - 1].end <= start:
            found.append(_Claim(start, end, _BLOCK))
    return sorted([*claims, *found], key=lambda claim: claim.start)


def _by_mapping(plain: list[Mapping], claims: list[_Claim]) -> Iterable[tuple[Mapping, list[_Claim]]]:
    """Yield every mapping with the claims that touch it, cut to its bounds."""
    starts = [mapping.start for mapping in plain]
    touching: dict[int, list[_Claim]] = {}
    for claim in claims:
        at = max(bisect.bisect_right(starts, claim.start) - 1, 0)
        while at < len(plain) and plain[at].start < claim.end:
            mapping = plain[at]
            start, end = max(claim.start, mapping.start), min(claim.end, mapping.end)
            if start < end:
                touching.setdefault(mapping.start, []).append(replace(claim, start=start, end=end))
            at += 1
    return [(mapping, touching.get(mapping.start, [])) for mapping in plain]


def _assign_resident(
    mapping: Mapping, claims: list[_Claim], pages: PageMap, sums: _PartSums, taken: Counter[str]
) -> int:
    """Give every claim its touched bytes, counted in `taken` by kind; return what nobody claimed."""
    left = mapping.proportional
    outer = [claim for claim in claims if claim.region is None]
    inner = [claim for claim in claims if claim.region is not None]
    in_heap = 0
    for claim in _without_overlaps(inner):
        region = claim.region
        touched = min(_touched(mapping, claim, pages, is_alone=not outer and len(inner) == 1), left)
        left -= touched
        if any(one.kind == _HEAP and one.start <= claim.start < one.end for one in outer):
            in_heap += touched
        if region is not None:
            sums.add(region.group, region.name, touched, claim.end - claim.start, region)
    for claim in outer:
        touched = _touched(mapping, claim, pages, is_alone=not inner and len(outer) == 1)
        touched = min(max(touched - (in_heap if claim.kind == _HEAP else 0), 0), left)
        left -= touched
        taken[claim.kind] += touched
    taken["named in heap"] += in_heap
    return left


def _without_overlaps(claims: list[_Claim]) -> Iterable[_Claim]:
    """Let the first of two claims to the same bytes have them."""
    reached = 0
    for claim in claims:
        start = max(claim.start, reached)
        if start < claim.end:
            yield replace(claim, start=start)
            reached = claim.end


def _touched(mapping: Mapping, claim: _Claim, pages: PageMap, *, is_alone: bool) -> int:
    """Return a claim's share of what its mapping takes."""
    if mapping.resident == 0:
        return 0
    length = claim.end - claim.start
    if is_alone and length >= mapping.nbytes - mmap.PAGESIZE:  # the allocator's header stands before an array
        return mapping.proportional
    resident = length if length < mmap.PAGESIZE else pages.resident(claim.start, claim.end)
    if resident is None:  # without the page map, pages are taken to lie evenly
        resident = mapping.resident * length // mapping.nbytes
    return resident * mapping.proportional // mapping.resident


def _split_heap(taken: Counter[str], report: AgentReport | None, group: str, sums: _PartSums) -> None:
    """Separate what live objects take from what the C library keeps."""
    heap = taken[_HEAP]
    if report is None or report.heap is None:
        if heap:
            sums.add(group, "C heap, in use and kept", heap, heap)
        return
    live = min(max(report.heap.in_use - taken["named in heap"], 0), heap)
    sums.add(group, "C heap in use", live, live)
    sums.add("heap_retained", "free, kept by the C library", heap - live, report.heap.free)


def _blocks_by_total(mapped: int, claims: list[_Claim]) -> int:
    """Return what is mapped for large blocks without a name, where they cannot be found one by one."""
    heaps = [claim for claim in claims if claim.kind == _HEAP]
    named = [claim for claim in claims if claim.region is not None and claim.region.in_heap]
    alone = [claim for claim in named if not any(heap.start <= claim.start < heap.end for heap in heaps)]
    return max(mapped - sum(claim.end - claim.start for claim in alone), 0)


_PRESENT_BYTE = bytes(1 if entry & 0x80 else 0 for entry in range(256))
_CHUNK_PAGES = 1 << 17
ARENA_BYTES = 64 * 2**20
"""The C library's arenas for threads begin at multiples of this, and end in a range that is not used yet."""
_PACKAGE_PATH = re.compile(r"/(?:site|dist)-packages/([A-Za-z0-9_-]+)")
_SHARED_PATH = re.compile(r"^(?:/dev/shm/|/memfd:|/SYSV|/dev/zero|/run/shm/)")
_DEVICE_PATH = re.compile(r"^/dev/(?:nvidia|kfd|dri)")
_STACK_LIMIT = re.compile(r"^Max stack size\s+(\S+)", re.MULTILINE)
_PT_LOAD = 1
_ET_EXEC = 2
"""A program that is always loaded to the addresses in its header."""
_LARGEST_GUARD_BYTES = 16 * mmap.PAGESIZE
_UNLIMITED_STACK_BYTES = 2 * 2**20
"""What a thread gets where the limit of stacks is none."""
_MMAPPED_FLAG = 2
_FLAG_BITS = 7
_PYTHON_ARENA_BYTES = 2**20
"""What may lie between blocks in one mapping: arenas of Python's own allocator."""
_MOST_READS = 4096


class ProcFile:
    """One file of `/proc/PID`; also a context manager."""

    name: ClassVar[str]

    def __init__(self, pid: int) -> None:
        try:
            self._file: int | None = os.open(f"/proc/{pid}/{self.name}", os.O_RDONLY)
        except OSError:
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def is_readable(self) -> bool:
        """Whether it can be read at all."""
        return self._file is not None

    def read(self, place: int, count: int) -> bytes:
        """Return bytes from a place on; fewer, or none, where they cannot be read, or the process is gone."""
        try:
            return b"" if self._file is None else os.pread(self._file, count, place)
        except (OSError, OverflowError):
            return b""


class PageMap(ProcFile):
    """The page map of one process, open for some reads: eight bytes a page, with the highest bit set if it is there."""

    name = "pagemap"

    def resident(self, start: int, end: int) -> int | None:
        """Return the bytes of a range that are in memory; pages that it begins or ends in count in part."""
        if self._file is None:
            return None
        first, last = start // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE
        found = 0
        for page in range(first, last + 1, _CHUNK_PAGES):
            entries = self.read(8 * page, 8 * min(_CHUNK_PAGES, last + 1 - page))
            present = entries[7::8].translate(_PRESENT_BYTE)  # a byte a page: 1 if it is in memory
            found += present.count(1) * mmap.PAGESIZE
            if page == first and present[:1] == b"\1":
                found -= start - first * mmap.PAGESIZE
            if page + len(present) == last + 1 and present[-1:] == b"\1":
                found -= (last + 1) * mmap.PAGESIZE - end
        return max(found, 0)


def is_nameless(mapping: Mapping) -> bool:
    """Whether a mapping is plain memory: no file, and no purpose that the kernel knows of."""
    return not mapping.name or mapping.name.startswith("[anon:")


def named_mappings(found: list[Mapping]) -> Iterator[tuple[Mapping, str, str]]:
    """Yield every mapping with a file name or a purpose that the kernel shows, with its group and a name."""
    code = {one.name for one in found if "x" in one.permissions and not is_nameless(one)}
    for one in found:
        if not is_nameless(one):
            group, name = _group_and_name(one, code)
            if group:
                yield one, group, name
        elif "s" in one.permissions:
            yield one, "shared", "shared between processes"


def heap_ranges(found: list[Mapping]) -> list[tuple[int, int]]:
    """Return the ranges of the C library's heap: the first one, and the arenas that threads were given."""
    ranges = [(one.start, one.end) for one in found if one.name == "[heap]"]
    for here, above in zip_longest(found, found[1:]):
        if not is_nameless(here) or not here.permissions.startswith("rw-p"):
            continue
        if above is not None and above.start == here.end and above.permissions.startswith("---"):
            # Neighbours below may have been joined to the arena: it begins a whole arena below its end.
            start = above.end - ARENA_BYTES
            if above.end % ARENA_BYTES == 0 and here.start <= start < here.end:
                ranges.append((start, here.end))
        elif here.nbytes == ARENA_BYTES and here.start % ARENA_BYTES == 0:
            ranges.append((here.start, here.end))
    return ranges


def _group_and_name(mapping: Mapping, code: set[str]) -> tuple[str, str]:
    name = mapping.name
    if name == "[heap]":
        return "", ""
    if name == "[stack]":
        return "stacks", "main thread"
    if name.startswith("["):
        return "other", "kernel"
    if _DEVICE_PATH.match(name):
        return "other", "GPU driver"
    if _SHARED_PATH.match(name) or ("s" in mapping.permissions and mapping.permissions.startswith("rw")):
        return "shared", name.removesuffix(" (deleted)")
    file = PurePosixPath(name).name
    if name in code or ".so" in file:
        package = _PACKAGE_PATH.search(name)
        if package:
            return "libraries", package[1].removesuffix("_libs")
        return "libraries", "Python" if "python" in name else "system"
    return "other", f"file {file}"


def bss_ranges(pid: int, libraries: list[tuple[Mapping, str]]) -> Iterator[tuple[int, int, str]]:
    """Yield the ranges of library variables without bytes in the file, and the library's name.

    The kernel does not name them; the ELF header has their length.
    """
    first: dict[str, tuple[int, str]] = {}
    for mapping, name in libraries:
        first.setdefault(mapping.name, (mapping.start, name))
    for file, (start, name) in first.items():
        fixed, zeroed = _bss_segments(Path(f"/proc/{pid}/root/{file.removeprefix('/')}"))
        for after_file, end in zeroed:
            base = 0 if fixed else start
            yield _page_up(base + after_file), _page_up(base + end), name


@cache
def _bss_segments(file: Path) -> tuple[bool, tuple[tuple[int, int], ...]]:
    """Read which parts of a loaded file have no bytes in it."""
    try:
        with file.open("rb") as stream:
            header = stream.read(64)
            if header[:5] != b"\x7fELF\x02":
                return False, ()
            (kind,), (first,) = struct.unpack_from("<H", header, 16), struct.unpack_from("<Q", header, 32)
            size, count = struct.unpack_from("<HH", header, 54)
            stream.seek(first)
            table = stream.read(size * count)
    except (OSError, struct.error):
        return False, ()
    found = []
    for start in range(0, len(table) - size + 1, size) if size >= 56 else ():
        loaded, _, _, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", table, start)
        if loaded == _PT_LOAD and in_memory > in_file:
            found.append((address + in_file, address + in_memory))
    return kind == _ET_EXEC, tuple(found)


def _page_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE


def stack_ranges(pid: int, found: list[Mapping]) -> dict[int, tuple[int, int]]:
    """Return the range of every thread's stack, by the mapping's start; it has a guard page or a stack pointer."""
    most = _longest_stack(Path(f"/proc/{pid}/limits"))
    ranges = {}
    for below, here in pairwise(found):
        is_guard = below.permissions.startswith("---") and below.nbytes <= _LARGEST_GUARD_BYTES
        if is_guard and below.end == here.start and _may_be_stack(here):
            # The kernel joins neighbours: what lies behind the stack is no part of it.
            ranges[here.start] = (here.start, min(here.end, here.start + most - below.nbytes))
    starts = [one.start for one in found]
    for pointer in _stack_pointers(Path(f"/proc/{pid}/task")):
        at = bisect.bisect_right(starts, pointer) - 1
        here = found[at]
        is_inside = at >= 0 and here.start <= pointer < here.end and here.nbytes <= most + _LARGEST_GUARD_BYTES
        if is_inside and here.start not in ranges and _may_be_stack(here):
            ranges[here.start] = (here.start, here.end)
    return ranges


def _may_be_stack(mapping: Mapping) -> bool:
    return not mapping.name and mapping.permissions.startswith("rw-p")


def _longest_stack(limits: Path) -> int:
    found = _STACK_LIMIT.search(read_text(limits))
    if found is None:
        return 8 * 2**20
    return int(found[1]) if found[1].isdigit() else _UNLIMITED_STACK_BYTES


def _stack_pointers(tasks: Path) -> Iterator[int]:
    """Yield the stack pointers of threads that wait in the kernel; those that run have none to show."""
    for thread in tasks.glob("*/syscall"):
        words = read_text(thread).split()  # nothing: no right to trace the process, or the thread ended
        if len(words) >= 2 and words[0] != "running":
            yield int(words[-2], 16)


class ProcessMemory(ProcFile):
    """The memory of another process, open for some reads of a few bytes.

    glibc maps large blocks on their own, and writes their length and a flag before them. Neighbours may be joined
    in one mapping, and NumPy asks for huge pages, so blocks are found by these marks and not by mappings.
    """

    name = "mem"

    def blocks(self, mappings: list[Mapping]) -> Iterator[tuple[int, int]]:
        """Yield the ranges that malloc mapped on their own, in mappings without a name that are in order."""
        runs: list[list[Mapping]] = []
        for mapping in mappings if self._file is not None else ():
            if runs and runs[-1][-1].end == mapping.start:
                runs[-1].append(mapping)
            else:
                runs.append([mapping])
        for run in runs:
            yield from self._in_run(run)

    def _in_run(self, run: list[Mapping]) -> Iterator[tuple[int, int]]:
        """Yield the blocks in mappings that lie one behind the other."""
        here, end = run[0].start, run[-1].end
        # Where a mapping begins, a block may have begun a page before.
        borders = sorted({border for one in run for border in (one.start - mmap.PAGESIZE, one.start)})
        for _ in range(_MOST_READS):
            if here >= end:
                return
            length = self._length_at(here)
            if length and here + length <= end:
                yield here, here + length
                here += length
            else:
                at = bisect.bisect_right(borders, here)
                here = min([here + _PYTHON_ARENA_BYTES, *borders[at : at + 1]])

    def _length_at(self, address: int) -> int:
        """Return the length that stands at the start of a page; 0 if none does."""
        content = self.read(address, 16)
        if len(content) < 16:
            return 0
        before, length = struct.unpack("<QQ", content)
        length, flags = length & ~_FLAG_BITS, length & _FLAG_BITS
        is_one = before == 0 and flags == _MMAPPED_FLAG and length and length % mmap.PAGESIZE == 0
        return int(length) if is_one else 0

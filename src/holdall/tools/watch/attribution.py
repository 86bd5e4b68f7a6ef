"""Attribution: the memory of one process, part by part. The parts add up to its proportional set size, to the byte.

The kernel names mapped files and shared memory. Named arrays, thread stacks and heaps are address ranges, and the page
map tells how much of each is resident. The rest is split by the counts of the allocators in the agent report. Memory
that nobody claims is shown as unattributed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from holdall.machine import Mapping, mappings, read_text
from holdall.tools.watch.exchange import AgentReport
from holdall.tools.watch.reading import BYTES_PER_PYTHON_OBJECT, GROUPS, AttributedPart
from holdall.units import format_bytes

_MIN_LARGE_BYTES = 8 * 2**20
"""Without an agent, a nameless mapping of this size is a part of its own."""
_ARENA_BYTES = 64 * 2**20
"""Heaps of threads begin at multiples of this size. A reserved range follows the part that is in use."""
_MAX_GUARD_BYTES = 16 * mmap.PAGESIZE
_DEFAULT_STACK_BYTES = 8 * 2**20
_PRESENT = bytes(1 if entry & 0x80 else 0 for entry in range(256))
_PAGES_PER_READ = 1 << 17
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([A-Za-z0-9_-]+)")
_SHARED_FILE = re.compile(r"^(?:/dev/shm/|/memfd:|/SYSV|/dev/zero|/run/shm/)")
_GPU_FILE = re.compile(r"^/dev/(?:nvidia|kfd|dri)")
_STACK_LIMIT = re.compile(r"^Max stack size\s+(\d+)", re.MULTILINE)


class _Range(NamedTuple):
    """Addresses that belong to one part."""

    start: int
    end: int
    part: AttributedPart
    is_malloc: bool = False


class _Parts(dict[tuple[str, str], AttributedPart]):
    """Parts by group and name."""

    def add(self, part: AttributedPart) -> None:
        before = self.get((part.group, part.name))
        if before is not None:
            resident = before.resident + part.resident
            part = replace(part, resident=resident, allocated=before.allocated + part.allocated)
        self[part.group, part.name] = part

    def sort(self) -> list[AttributedPart]:
        return sorted(self.values(), key=lambda part: (GROUPS.index(part.group), -part.resident, part.name))


def attribute_memory(pid: int, report: AgentReport | None) -> list[AttributedPart]:
    """Return the parts of a process. Raise ProcessLookupError if it has ended."""
    found = mappings(pid)
    if not found:
        raise ProcessLookupError(pid)
    parts = _Parts()
    plain: list[Mapping] = []
    code = {one.name for one in found if "x" in one.permissions and one.name}
    for mapping in found:
        part = _name_mapping(mapping, code)
        if part is None:
            plain.append(mapping)
        else:
            parts.add(part)
    ranges = [*_list_stacks(pid, plain, found), *_list_regions(report)]
    heaps = _list_heaps(found)
    in_heap = 0  # Named bytes in heaps.
    heap = 0  # Other resident bytes in heaps.
    nameless = 0
    with _PageMap(pid) as pages:
        for mapping in plain:
            left = mapping.proportional
            named_here = 0
            for start, end, part, _ in _clip_ranges(ranges, mapping):
                resident = min(pages.count_resident(mapping, start, end), left)
                parts.add(replace(part, resident=resident, allocated=end - start))
                left -= resident
                if any(first <= start < last for first, last in heaps):
                    named_here += resident
            for first, last in heaps:
                if first < mapping.end and last > mapping.start:
                    touched = pages.count_resident(mapping, max(first, mapping.start), min(last, mapping.end))
                    touched = min(max(touched - named_here, 0), left)
                    heap += touched
                    left -= touched
            in_heap += named_here
            if report is None and left and mapping.nbytes >= _MIN_LARGE_BYTES:
                share = left / mapping.nbytes
                name = f"mapping of {format_bytes(mapping.nbytes)}, {share:.0%} touched"
                parts.add(AttributedPart("unattributed", name, left, mapping.nbytes))
            else:
                nameless += left
    owner = "torch" if ("libraries", "torch") in parts else "python"
    if report is None:
        parts.add(AttributedPart(owner, "C heap, in use and kept", heap, heap))
    else:
        nameless = _attribute_by_counts(report, ranges, heaps, (heap, in_heap, nameless), owner, parts)
    parts.add(AttributedPart("unattributed", "memory without a name", nameless, nameless))
    return parts.sort()


def _attribute_by_counts(
    report: AgentReport,
    ranges: Sequence[_Range],
    heaps: Sequence[tuple[int, int]],
    totals: tuple[int, int, int],
    owner: str,
    parts: _Parts,
) -> int:
    """Split the heap and the nameless memory by the counts of the agent. Return the bytes that remain nameless."""
    heap, in_heap, nameless = totals
    if report.heap_used is None:
        parts.add(AttributedPart(owner, "C heap, in use and kept", heap, heap))
    else:
        live = min(max(report.heap_used - in_heap, 0), heap)
        parts.add(AttributedPart(owner, "C heap in use", live, live))
        parts.add(AttributedPart("heap_retained", "free, kept by the C library", heap - live, heap - live))
    counted = [
        AttributedPart("buffers", one.name, one.nbytes, one.nbytes, one.fill, grows=True, budget=one.budget)
        for one in report.held
    ]
    objects = report.python_objects * BYTES_PER_PYTHON_OBJECT
    counted.append(AttributedPart("python", "objects, estimated from their number", objects, objects))
    named = sum(
        end - start
        for start, end, _, is_malloc in ranges
        if is_malloc and not any(first <= start < last for first, last in heaps)
    )
    # The C library counts addresses of large blocks, and not which of their pages were touched.
    blocks = max(report.heap_mapped - named - report.held_in_heap, 0)
    counted.append(AttributedPart(owner, "large blocks of malloc, at most", blocks, blocks))
    for part in counted:
        resident = min(part.resident, nameless)
        nameless -= resident
        parts.add(replace(part, resident=resident))
    return nameless


def _list_regions(report: AgentReport | None) -> Iterator[_Range]:
    for one in () if report is None else report.regions:
        part = AttributedPart(one.group, one.name, 0, 0, one.fill)
        yield _Range(one.address, one.address + one.nbytes, part, one.is_malloc)


def _clip_ranges(ranges: Iterable[_Range], mapping: Mapping) -> Iterator[_Range]:
    """Yield the ranges in a mapping in order of addresses. The first of two ranges gets the bytes that both claim."""
    reached = mapping.start
    for one in sorted(one for one in ranges if one.start < mapping.end and one.end > mapping.start):
        start = max(one.start, reached)
        end = min(one.end, mapping.end)
        if start < end:
            yield one._replace(start=start, end=end)
            reached = end


def _name_mapping(mapping: Mapping, code: set[str]) -> AttributedPart | None:
    """Return the part that a whole mapping is, by the name that the kernel gives it. None for plain memory."""
    group_and_name = _find_name(mapping, code)
    if group_and_name is None:
        return None
    return AttributedPart(*group_and_name, mapping.proportional, mapping.nbytes)


def _find_name(mapping: Mapping, code: set[str]) -> tuple[str, str] | None:
    name = mapping.name
    is_shared = "s" in mapping.permissions
    if not name or name.startswith("[anon:"):
        return ("shared", "shared between processes") if is_shared else None
    if name == "[heap]":
        return None
    if name == "[stack]":
        return "stacks", "main thread"
    if name.startswith("["):
        return "other", "kernel"
    if _GPU_FILE.match(name):
        return "other", "GPU driver"
    if _SHARED_FILE.match(name) or (is_shared and mapping.permissions.startswith("rw")):
        return "shared", name.removesuffix(" (deleted)")
    file = PurePosixPath(name).name
    if name not in code and ".so" not in file:
        return "other", f"file {file}"
    package = _PACKAGE.search(name)
    if package:
        return "libraries", package[1].removesuffix("_libs")
    return "libraries", "Python" if "python" in name else "system"


def _list_heaps(found: list[Mapping]) -> list[tuple[int, int]]:
    """Return the address ranges of the C library's heap: the first one, and the arenas of threads."""
    ranges = [(one.start, one.end) for one in found if one.name == "[heap]"]
    for here, above in pairwise(found):
        if here.name or not here.permissions.startswith("rw-p"):
            continue
        if above.start == here.end and above.permissions.startswith("---") and above.end % _ARENA_BYTES == 0:
            start = above.end - _ARENA_BYTES  # The kernel may have joined a neighbour below to the arena.
            if here.start <= start < here.end:
                ranges.append((start, here.end))
        elif here.nbytes == _ARENA_BYTES and here.start % _ARENA_BYTES == 0:
            ranges.append((here.start, here.end))
    return ranges


def _list_stacks(pid: int, plain: Sequence[Mapping], found: list[Mapping]) -> Iterator[_Range]:
    """Yield the stacks of threads, which follow a guard page."""
    limit = _STACK_LIMIT.search(read_text(Path(f"/proc/{pid}/limits")))
    max_bytes = _DEFAULT_STACK_BYTES if limit is None else int(limit[1])
    starts = {mapping.start for mapping in plain if mapping.permissions.startswith("rw-p") and not mapping.name}
    for guard, here in pairwise(found):
        is_guard = guard.permissions.startswith("---") and guard.nbytes <= _MAX_GUARD_BYTES
        if is_guard and guard.end == here.start and here.start in starts:
            # The kernel may have joined a neighbour above to the stack.
            end = min(here.end, here.start + max_bytes - guard.nbytes)
            yield _Range(here.start, end, AttributedPart("stacks", "threads", 0, 0))


class _PageMap:
    """Page map of a process: eight bytes per page, whose highest bit is set if the page is in memory."""

    def __init__(self, pid: int) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # Without it, pages are taken to be evenly distributed.
            self._file = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)

    def __enter__(self) -> _PageMap:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def count_resident(self, mapping: Mapping, start: int, end: int) -> int:
        """Return the share of a range in the proportional set size of its mapping."""
        if mapping.resident == 0:
            return 0
        if end - start >= mapping.nbytes - mmap.PAGESIZE:  # The allocator's header precedes an array.
            return mapping.proportional
        if self._file < 0:
            return mapping.proportional * (end - start) // mapping.nbytes
        resident = self._count_pages(start, end)
        return resident * mapping.proportional // mapping.resident

    def _count_pages(self, start: int, end: int) -> int:
        """Return the bytes of a range that are in memory. A page that is only partly in the range counts in part."""
        if end - start < mmap.PAGESIZE:
            return end - start
        first = start // mmap.PAGESIZE
        last = (end - 1) // mmap.PAGESIZE
        present = b""
        for page in range(first, last + 1, _PAGES_PER_READ):
            count = min(_PAGES_PER_READ, last + 1 - page)
            present += os.pread(self._file, 8 * count, 8 * page)[7::8].translate(_PRESENT)
        resident = present.count(1) * mmap.PAGESIZE
        if present[:1] == b"\1":
            resident -= start - first * mmap.PAGESIZE
        if present[-1:] == b"\1":
            resident -= (last + 1) * mmap.PAGESIZE - end
        return max(resident, 0)

"""Attribution: the memory of one process, part by part. The parts add up to its proportional set size, to the byte.

The kernel names mapped files and shared memory. Named arrays, thread stacks and heaps are address ranges, and the page
map tells how much of each is resident. The rest is split by the counts of the allocators in the agent report. Memory
that has no name after that is shown as unattributed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from holdall.machine import Mapping, mappings, read_text
from holdall.tools.part_groups import GROUP_NAMES
from holdall.tools.watch.exchange import AgentReport
from holdall.tools.watch.reading import BYTES_PER_PYTHON_OBJECT, AttributedPart
from holdall.units import format_bytes

_MIN_LARGE_BYTES = 8 * 2**20
"""Without an agent, a nameless mapping of this size is a part of its own."""
_ARENA_BYTES = 64 * 2**20
"""Heaps of threads begin at multiples of this size. A reserved range follows the part that is in use."""
_MAX_GUARD_BYTES = 16 * mmap.PAGESIZE
_DEFAULT_STACK_BYTES = 8 * 2**20
_PRESENT = bytes(1 if entry & 0x80 else 0 for entry in range(256))
"""Translates the highest byte of an entry of the page map to 1 if the page is in memory, and else to 0."""
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
    is_malloc: bool = False  # Whether the C library's allocator provided the addresses.


@dataclass(slots=True)
class _Totals:
    """Resident bytes of the memory that the kernel does not name."""

    named_in_heap: int = 0  # Named arrays in heaps.
    heap: int = 0  # The rest of the heaps.
    nameless: int = 0  # Memory outside of heaps without a name.


class _Parts(dict[tuple[str, str], AttributedPart]):
    """Parts by group and name."""

    def add(self, part: AttributedPart) -> None:
        """Add the bytes of a part to the part of the same group and name."""
        before = self.get((part.group, part.name))
        if before is not None:
            resident = before.resident + part.resident
            part = replace(part, resident=resident, allocated=before.allocated + part.allocated)
        self[part.group, part.name] = part

    def list_sorted(self) -> list[AttributedPart]:
        """Return the parts by group, the largest of each group first."""
        return sorted(self.values(), key=lambda part: (GROUP_NAMES.index(part.group), -part.resident, part.name))


def attribute_memory(pid: int, report: AgentReport | None) -> list[AttributedPart]:
    """Return the parts of a process. Raise ProcessLookupError if it has ended."""
    all_mappings = mappings(pid)
    if not all_mappings:
        raise ProcessLookupError(pid)
    parts = _Parts()
    plain: list[Mapping] = []
    code_files = {one.name for one in all_mappings if "x" in one.permissions and one.name}
    for mapping in all_mappings:
        part = _name_mapping(mapping, code_files)
        if part is None:
            plain.append(mapping)
        else:
            parts.add(part)
    ranges = [*_list_stacks(pid, plain, all_mappings), *_list_regions(report)]
    heaps = _list_heaps(all_mappings)
    totals = _Totals()
    with _PageMap(pid) as pages:
        for mapping in plain:
            left = _attribute_by_addresses(mapping, ranges, heaps, pages, totals, parts)
            if report is None and left and mapping.nbytes >= _MIN_LARGE_BYTES:
                share = left / mapping.nbytes
                name = f"mapping of {format_bytes(mapping.nbytes)}, {share:.0%} touched"
                parts.add(AttributedPart("unattributed", name, left, mapping.nbytes))
            else:
                totals.nameless += left
    owner = "torch" if ("libraries", "torch") in parts else "python"
    nameless = totals.nameless
    if report is None:
        parts.add(AttributedPart(owner, "C heap, in use and kept", totals.heap, totals.heap))
    else:
        nameless = _attribute_by_counts(report, ranges, heaps, totals, owner, parts)
    parts.add(AttributedPart("unattributed", "memory without a name", nameless, nameless))
    return parts.list_sorted()


def _attribute_by_addresses(
    mapping: Mapping,
    ranges: Sequence[_Range],
    heaps: Sequence[tuple[int, int]],
    pages: _PageMap,
    totals: _Totals,
    parts: _Parts,
) -> int:
    """Add the named ranges of a mapping to `parts`, and its heap to `totals`. Return the resident bytes of the rest."""
    left = mapping.proportional
    named_in_heap = 0
    for start, end, part, _ in _clip_ranges(ranges, mapping):
        resident = min(pages.count_resident(mapping, start, end), left)
        parts.add(replace(part, resident=resident, allocated=end - start))
        left -= resident
        if _is_in_heap(start, heaps):
            named_in_heap += resident
    for heap_start, heap_end in heaps:
        if heap_start < mapping.end and heap_end > mapping.start:
            start = max(heap_start, mapping.start)
            end = min(heap_end, mapping.end)
            resident = min(max(pages.count_resident(mapping, start, end) - named_in_heap, 0), left)
            totals.heap += resident
            left -= resident
    totals.named_in_heap += named_in_heap
    return left


def _is_in_heap(address: int, heaps: Sequence[tuple[int, int]]) -> bool:
    return any(start <= address < end for start, end in heaps)


def _attribute_by_counts(
    report: AgentReport,
    ranges: Sequence[_Range],
    heaps: Sequence[tuple[int, int]],
    totals: _Totals,
    owner: str,
    parts: _Parts,
) -> int:
    """Split the heap and the nameless memory by the counts of the agent. Return the bytes that remain nameless."""
    heap = totals.heap
    nameless = totals.nameless
    if report.heap_used is None:
        parts.add(AttributedPart(owner, "C heap, in use and kept", heap, heap))
    else:
        live = min(max(report.heap_used - totals.named_in_heap, 0), heap)
        parts.add(AttributedPart(owner, "C heap in use", live, live))
        parts.add(AttributedPart("heap_retained", "free, kept by the C library", heap - live, heap - live))
    counted = [
        AttributedPart("buffers", one.name, one.nbytes, one.nbytes, one.fill, grows=True, budget=one.budget)
        for one in report.held
    ]
    objects = report.python_objects * BYTES_PER_PYTHON_OBJECT
    counted.append(AttributedPart("python", "objects, estimated from their number", objects, objects))
    named_blocks = sum(
        end - start for start, end, _, is_malloc in ranges if is_malloc and not _is_in_heap(start, heaps)
    )
    # The C library counts the addresses of large blocks. It does not know which of their pages were touched.
    blocks = max(report.heap_mapped - named_blocks - report.held_in_heap, 0)
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
    """Yield the ranges in a mapping by address. If two ranges overlap, the first one gets the bytes of the overlap."""
    next_start = mapping.start
    overlapping = [one for one in ranges if one.start < mapping.end and one.end > mapping.start]
    for one in sorted(overlapping, key=lambda one: (one.start, one.end)):
        start = max(one.start, next_start)
        end = min(one.end, mapping.end)
        if start < end:
            yield one._replace(start=start, end=end)
            next_start = end


def _name_mapping(mapping: Mapping, code_files: set[str]) -> AttributedPart | None:
    """Return the part of a mapping to which the kernel gives a name. None for plain memory: the heap, or no name."""
    group_and_name = _find_name(mapping, code_files)
    if group_and_name is None:
        return None
    return AttributedPart(*group_and_name, mapping.proportional, mapping.nbytes)


def _find_name(mapping: Mapping, code_files: set[str]) -> tuple[str, str] | None:
    """Return group and name of the part. `code_files` are the names of all files that are mapped as code."""
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
    if name not in code_files and ".so" not in file:
        return "other", f"file {file}"
    package = _PACKAGE.search(name)
    if package:
        return "libraries", package[1].removesuffix("_libs")
    return "libraries", "Python" if "python" in name else "system"


def _list_heaps(all_mappings: list[Mapping]) -> list[tuple[int, int]]:
    """Return the address ranges of the C library's heaps: the main heap, and the arenas of threads."""
    ranges = [(one.start, one.end) for one in all_mappings if one.name == "[heap]"]
    for here, above in pairwise(all_mappings):
        if here.name or not here.permissions.startswith("rw-p"):
            continue
        if above.start == here.end and above.permissions.startswith("---") and above.end % _ARENA_BYTES == 0:
            start = above.end - _ARENA_BYTES  # The kernel may have joined a neighbour below to the arena.
            if here.start <= start < here.end:
                ranges.append((start, here.end))
        elif here.nbytes == _ARENA_BYTES and here.start % _ARENA_BYTES == 0:
            ranges.append((here.start, here.end))
    return ranges


def _list_stacks(pid: int, plain: Sequence[Mapping], all_mappings: list[Mapping]) -> Iterator[_Range]:
    """Yield the stacks of threads. A stack follows a guard page."""
    limit = _STACK_LIMIT.search(read_text(Path(f"/proc/{pid}/limits")))
    max_bytes = _DEFAULT_STACK_BYTES if limit is None else int(limit[1])
    starts = {mapping.start for mapping in plain if mapping.permissions.startswith("rw-p") and not mapping.name}
    for guard, here in pairwise(all_mappings):
        is_guard = guard.permissions.startswith("---") and guard.nbytes <= _MAX_GUARD_BYTES
        if is_guard and guard.end == here.start and here.start in starts:
            # The kernel may have joined a neighbour above to the stack.
            end = min(here.end, here.start + max_bytes - guard.nbytes)
            yield _Range(here.start, end, AttributedPart("stacks", "threads", 0, 0))


class _PageMap:
    """Page map of a process: eight bytes per page, whose highest bit is set if the page is in memory."""

    def __init__(self, pid: int) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # Without the file, `count_resident` assumes evenly distributed pages.
            self._file = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)

    def __enter__(self) -> _PageMap:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def count_resident(self, mapping: Mapping, start: int, end: int) -> int:
        """Return the bytes of a range in the proportional set size of its mapping."""
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

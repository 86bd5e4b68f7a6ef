"""Attribution: the memory of one process, part by part.

In:  its mappings, and its agent report.  Out: parts whose sum is its proportional set size, to the byte.
Named arrays, stacks and heaps are address ranges, and the page map says how much of each is resident. The rest is split
by what the allocators report. What stays without a name is shown as unattributed.
"""

from __future__ import annotations

import bisect
import mmap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from holdall.machine import Mapping, mappings
from holdall.tools.watch import address_ranges as ranges
from holdall.tools.watch.address_ranges import PageMap, ProcessMemory, is_nameless
from holdall.tools.watch.agent_files import AgentReport, Region
from holdall.tools.watch.reading import GROUPS, AttributedPart
from holdall.units import format_bytes

_LARGE_MAPPING_BYTES = 8 * 2**20
"""A mapping without a name of at least this length is a part of its own, if the process has no agent."""

_HEAP, _STACK, _BLOCK = "heap", "stack", "block"


@dataclass(slots=True)
class _Sum:
    resident: int = 0
    allocated: int = 0
    fill: float | None = None
    grows: bool = False


class _Sums:
    """Parts under way."""

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], _Sum] = defaultdict(_Sum)

    def add(self, group: str, name: str, resident: int, allocated: int, region: Region | None = None) -> None:
        part = self.by_name[group, name]
        part.resident += resident
        part.allocated += allocated
        if region is not None:
            part.fill = region.fill if part.fill is None else part.fill
            part.grows = part.grows or region.grows

    def parts(self) -> list[AttributedPart]:
        order = {group: position for position, group in enumerate(GROUPS)}
        found = [
            AttributedPart(*key, one.resident, one.allocated, one.fill, one.grows) for key, one in self.by_name.items()
        ]
        return sorted(found, key=lambda part: (order[part.group], -part.resident, part.name))


@dataclass(frozen=True, slots=True)
class _Claim:
    """A range of addresses that is known to be something."""

    start: int
    end: int
    kind: str  # _HEAP, _STACK, _BLOCK, or a group
    region: Region | None = None


def attribute_memory(pid: int, report: AgentReport | None, arrays: Sequence[Region] = ()) -> list[AttributedPart]:
    """Read a process and return where its memory is.

    Args:
        arrays: Regions that are known beside those of the report.
    """
    found = mappings(pid)
    if not found:  # its memory is gone, and its exit code waits to be read
        raise ProcessLookupError(pid)
    sums = _Sums()
    named = list(ranges.named_mappings(found))
    for mapping, group, name in named:
        sums.add(group, name, mapping.proportional, mapping.nbytes)
    whole = {mapping.start for mapping, _, _ in named}
    plain = [one for one in found if one.start not in whole]
    libraries = [(mapping, name) for mapping, group, name in named if group == "libraries"]
    claims = _claims(pid, found, libraries, [*arrays, *(() if report is None else report.regions)])
    heap = nameless = named_heap = 0
    blocks = _Sum()
    with PageMap(pid) as pages, ProcessMemory(pid) as memory:
        if report is not None:
            claims = _with_malloc_blocks(claims, plain, memory)
        for mapping, here in _by_mapping(plain, claims):
            taken, left = _assign_resident(mapping, here, pages, sums)
            heap += taken[_HEAP]
            named_heap += taken["named in heap"]
            blocks.resident += taken[_BLOCK]
            nameless += left
            if report is None and left and mapping.nbytes >= _LARGE_MAPPING_BYTES:
                name = f"mapping of {format_bytes(mapping.nbytes)}, {100 * left / mapping.nbytes:.0f} % touched"
                sums.add("unattributed", name, left, mapping.nbytes)
                nameless -= left
        is_readable = memory.is_readable
    blocks.allocated = sum(claim.end - claim.start for claim in claims if claim.kind == _BLOCK)
    uses_torch = any(group == "libraries" and name == "torch" for group, name in sums.by_name)
    group = "torch" if uses_torch else "python"
    _split_heap(heap, named_heap, report, group, sums)
    if report is not None and report.python is not None:
        objects = min(report.python.taken, nameless)
        sums.add("python", "objects", objects, report.python.taken)
        nameless -= objects
    if not is_readable:
        nameless -= _assign_blocks_by_total(nameless, report, claims, blocks)
    if report is not None:
        sums.add(group, "large blocks without a name", blocks.resident, blocks.allocated)
    sums.add("unattributed", "memory without a name", nameless, nameless)
    return sums.parts()


def _claims(pid: int, found: list[Mapping], libraries: list[tuple[Mapping, str]], known: list[Region]) -> list[_Claim]:
    claims = [_Claim(start, end, _HEAP) for start, end in ranges.heap_ranges(found)]
    claims += [_Claim(start, end, _STACK) for start, end in ranges.stack_ranges(pid, found).values()]
    zeroed = ranges.bss_ranges(pid, libraries)
    regions = [Region("libraries", name, start, end - start, in_heap=False) for start, end, name in zeroed]
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
    mapping: Mapping, claims: list[_Claim], pages: PageMap, sums: _Sums
) -> tuple[defaultdict[str, int], int]:
    """Give every claim its touched bytes; return what the heap got, and what nobody claimed."""
    taken: defaultdict[str, int] = defaultdict(int)
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
        if claim.kind == _STACK:
            sums.add("stacks", "threads", touched, claim.end - claim.start)
    taken["named in heap"] = in_heap
    return taken, left


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


def _split_heap(heap: int, named: int, report: AgentReport | None, group: str, sums: _Sums) -> None:
    """Separate what live objects take from what the C library keeps."""
    if report is None or report.heap is None:
        if heap:
            sums.add(group, "C heap, in use and kept", heap, heap)
        return
    live = min(max(report.heap.in_use - named, 0), heap)
    sums.add(group, "C heap in use", live, live)
    sums.add("heap_retained", "free, kept by the C library", heap - live, report.heap.free)


def _assign_blocks_by_total(left: int, report: AgentReport | None, claims: list[_Claim], blocks: _Sum) -> int:
    """Give large blocks at most what the C library reports, where they cannot be found one by one."""
    if report is None or report.heap is None:
        return 0
    heaps = [claim for claim in claims if claim.kind == _HEAP]
    named = [claim for claim in claims if claim.region is not None and claim.region.in_heap]
    mapped = [claim for claim in named if not any(heap.start <= claim.start < heap.end for heap in heaps)]
    own = sum(claim.end - claim.start for claim in mapped)
    blocks.allocated = max(report.heap.mapped - own, 0)
    blocks.resident = min(blocks.allocated, left)
    return blocks.resident

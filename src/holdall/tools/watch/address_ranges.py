"""What the address ranges of a process are used for, as the kernel's files in /proc show it.

In:  a process id and its mappings.  Out: resident bytes of a range (page map); ranges of heaps, library variables,
thread stacks and large malloc blocks; group and name of every mapping that has one.
Where the kernel does not show a file to this user, the answer is None or empty.
"""

from __future__ import annotations

import bisect
import mmap
import os
import re
import struct
from collections.abc import Iterator
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path, PurePosixPath
from typing import ClassVar, Self

from holdall.machine import Mapping

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

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        try:
            self._file: int | None = os.open(proc / str(pid) / self.name, os.O_RDONLY)
        except OSError:
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


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
            present = self._present(page, min(_CHUNK_PAGES, last + 1 - page))
            found += present.count(1) * mmap.PAGESIZE
            if page == first and present[:1] == b"\1":
                found -= start - first * mmap.PAGESIZE
            if page + len(present) == last + 1 and present[-1:] == b"\1":
                found -= (last + 1) * mmap.PAGESIZE - end
        return max(found, 0)

    def _present(self, page: int, count: int) -> bytes:
        """Return a byte a page: 1 if it is in memory."""
        if self._file is None:
            return b""
        try:
            return os.pread(self._file, 8 * count, 8 * page)[7::8].translate(_PRESENT_BYTE)
        except OSError:  # the process is gone
            return b""


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


def bss_ranges(
    pid: int, libraries: list[tuple[Mapping, str]], proc: Path = Path("/proc")
) -> Iterator[tuple[int, int, str]]:
    """Yield the ranges of library variables without bytes in the file, and the library's name.

    The kernel does not name them; the ELF header has their length.
    """
    first: dict[str, tuple[int, str]] = {}
    for mapping, name in libraries:
        first.setdefault(mapping.name, (mapping.start, name))
    for file, (start, name) in first.items():
        fixed, zeroed = _bss_segments(proc / str(pid) / "root" / file.removeprefix("/"))
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


def stack_ranges(pid: int, found: list[Mapping], proc: Path = Path("/proc")) -> dict[int, tuple[int, int]]:
    """Return the range of every thread's stack, by the mapping's start; it has a guard page or a stack pointer."""
    most = _longest_stack(proc / str(pid) / "limits")
    ranges = {}
    for below, here in pairwise(found):
        is_guard = below.permissions.startswith("---") and below.nbytes <= _LARGEST_GUARD_BYTES
        if is_guard and below.end == here.start and _may_be_stack(here):
            # The kernel joins neighbours: what lies behind the stack is no part of it.
            ranges[here.start] = (here.start, min(here.end, here.start + most - below.nbytes))
    starts = [one.start for one in found]
    for pointer in _stack_pointers(proc / str(pid) / "task"):
        at = bisect.bisect_right(starts, pointer) - 1
        here = found[at]
        is_inside = at >= 0 and here.start <= pointer < here.end and here.nbytes <= most + _LARGEST_GUARD_BYTES
        if is_inside and here.start not in ranges and _may_be_stack(here):
            ranges[here.start] = (here.start, here.end)
    return ranges


def _may_be_stack(mapping: Mapping) -> bool:
    return not mapping.name and mapping.permissions.startswith("rw-p")


def _longest_stack(limits: Path) -> int:
    try:
        found = _STACK_LIMIT.search(limits.read_text(encoding="ascii", errors="replace"))
    except OSError:
        found = None
    if found is None:
        return 8 * 2**20
    return int(found[1]) if found[1].isdigit() else _UNLIMITED_STACK_BYTES


def _stack_pointers(tasks: Path) -> list[int]:
    """Return the stack pointers of threads that wait in the kernel; those that run have none to show."""
    pointers = []
    try:
        threads = list(tasks.iterdir())
    except OSError:
        return []
    for thread in threads:
        try:
            words = (thread / "syscall").read_text(encoding="ascii").split()
        except OSError:  # no right to trace the process, or the thread ended
            continue
        if len(words) >= 2 and words[0] != "running":
            pointers.append(int(words[-2], 16))
    return pointers


class ProcessMemory(ProcFile):
    """The memory of another process, open for some reads of a few bytes.

    glibc maps large blocks on their own, and writes their length and a flag before them. Neighbours may be joined
    in one mapping, and NumPy asks for huge pages, so blocks are found by these marks and not by mappings.
    """

    name = "mem"

    @property
    def is_readable(self) -> bool:
        """Whether it can be read at all."""
        return self._file is not None

    def read(self, address: int, count: int) -> bytes:
        """Return bytes from an address on; fewer, or none, where they cannot be read."""
        if self._file is None:
            return b""
        try:
            return os.pread(self._file, count, address)
        except (OSError, OverflowError):
            return b""

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

"""Large blocks of the C library, each mapped on its own, found where they lie.

In:  mappings without a name.  Out: the ranges in them that malloc handed out.
The GNU C library writes a block's length, marked as mapped, at the start of its first page; a block that lies behind
another one begins where that one ends. NumPy asks for large pages from the second page on, which makes that a mapping
of its own. Where the process's memory may not be read, nothing is found.
"""

from __future__ import annotations

import bisect
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

from holdall.machine import Mapping
from holdall.watch.proc_file import ProcFile

_IS_MAPPED = 2
_FLAGS = 7
_PYTHONS_ARENA = 2**20
"""What may lie between blocks in one mapping: arenas of Python's own allocator."""
_MOST_LOOKS = 4096


class MemoryOf(ProcFile):
    """The memory of another process, open for some reads of a few bytes."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        super().__init__(pid, "mem", proc)

    @property
    def is_readable(self) -> bool:
        """Whether it can be read at all."""
        return self._file is not None

    def blocks(self, mappings: list[Mapping]) -> Iterator[tuple[int, int]]:
        """Yield the ranges that malloc mapped on their own, in mappings without a name that are in order."""
        if self._file is None:
            return
        run: list[Mapping] = []
        for mapping in mappings:
            if run and run[-1].end != mapping.start:
                yield from self._in_run(run)
                run = []
            run.append(mapping)
        yield from self._in_run(run)

    def _in_run(self, run: list[Mapping]) -> Iterator[tuple[int, int]]:
        """Yield the blocks in mappings that lie one behind the other."""
        if not run:
            return
        here, end = run[0].start, run[-1].end
        # Where a mapping begins, a block may have begun a page before.
        borders = sorted({border for one in run for border in (one.start - mmap.PAGESIZE, one.start)})
        for _ in range(_MOST_LOOKS):
            if here >= end:
                return
            length = self._length_at(here)
            if length and here + length <= end:
                yield here, here + length
                here += length
            else:
                at = bisect.bisect_right(borders, here)
                here = min([here + _PYTHONS_ARENA, *borders[at : at + 1]])

    def _length_at(self, address: int) -> int:
        """Return the length that stands at the start of a page; 0 if none does."""
        if self._file is None:
            return 0
        try:
            before, length = struct.unpack("<QQ", os.pread(self._file, 16, address))
        except (OSError, struct.error, OverflowError):
            return 0
        length, flags = length & ~_FLAGS, length & _FLAGS
        is_one = before == 0 and flags == _IS_MAPPED and length and length % mmap.PAGESIZE == 0
        return int(length) if is_one else 0

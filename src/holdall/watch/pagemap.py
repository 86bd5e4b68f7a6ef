"""Which pages of a range were touched, as the kernel's page map says.

In:  a process and ranges of its addresses.  Out: bytes that are resident, range by range; None where the map is closed.
A gigabyte takes a few milliseconds: every page has eight bytes there, of which the highest bit of the last says whether
it is in memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from holdall.watch.proc_file import ProcFile

_PRESENT = bytes(1 if entry & 0x80 else 0 for entry in range(256))
_CHUNK_PAGES = 1 << 17


class PageMap(ProcFile):
    """The page map of one process, open for some reads."""

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        super().__init__(pid, "pagemap", proc)

    def resident(self, ranges: Iterable[tuple[int, int]]) -> int | None:
        """Return the bytes of the ranges that are in memory; pages that one begins or ends in count in part."""
        if self._file is None:
            return None
        return sum(self._resident(start, end) for start, end in ranges if end > start)

    def _resident(self, start: int, end: int) -> int:
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
            return os.pread(self._file, 8 * count, 8 * page)[7::8].translate(_PRESENT)
        except OSError:  # the process is gone
            return b""

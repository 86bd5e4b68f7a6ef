"""Variables of libraries that begin as zeros: memory behind a mapped file that looks like anybody's.

In:  the mappings of a process.  Out: ranges that belong to its libraries, though no file backs them.
A library's own header says how long it is in memory, so that nothing of a neighbour is taken for it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from holdall.machine import Mapping

_LOADED = 1
_FIXED = 2
"""A program that is always loaded to the addresses in its header."""


def zeroed_ranges(
    pid: int, libraries: list[tuple[Mapping, str]], proc: Path = Path("/proc")
) -> Iterator[tuple[int, int, str]]:
    """Yield the ranges, and what the library is called."""
    first: dict[str, tuple[int, str]] = {}
    for mapping, name in libraries:
        first.setdefault(mapping.name, (mapping.start, name))
    for file, (start, name) in first.items():
        fixed, zeroed = _zeroed(proc / str(pid) / "root" / file.removeprefix("/"))
        for after_file, end in zeroed:
            base = 0 if fixed else start
            yield _page_up(base + after_file), _page_up(base + end), name


@cache
def _zeroed(file: Path) -> tuple[bool, tuple[tuple[int, int], ...]]:
    """Read which parts of a loaded file have no bytes in it."""
    try:
        with file.open("rb") as stream:
            header = stream.read(64)
            if header[:5] != b"\x7fELF\x02":
                return False, ()
            kind, (first, size, count) = struct.unpack_from("<H", header, 16)[0], _programs(header)
            stream.seek(first)
            table = stream.read(size * count)
    except (OSError, struct.error):
        return False, ()
    found = []
    for start in range(0, len(table) - size + 1, size) if size >= 56 else ():
        loaded, _, _, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", table, start)
        if loaded == _LOADED and in_memory > in_file:
            found.append((address + in_file, address + in_memory))
    return kind == _FIXED, tuple(found)


def _programs(header: bytes) -> tuple[int, int, int]:
    return struct.unpack_from("<Q", header, 32)[0], *struct.unpack_from("<HH", header, 54)


def _page_up(address: int) -> int:
    return -(-address // mmap.PAGESIZE) * mmap.PAGESIZE

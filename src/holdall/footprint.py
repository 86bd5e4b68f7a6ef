"""What processes hold in memory, as the kernel counts it: one place for everybody who asks.

In:  a process id; None is this process.  Out: resident, anonymous, unique and proportional bytes, of the whole
process or of every mapping, and the peak, which can be begun anew.
Linux is read from /proc; elsewhere psutil gives the nearest figure of the platform, and mappings cannot be told apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LINUX = sys.platform.startswith("linux")

_COUNTED = {
    b"Rss:": 0, b"Pss:": 1, b"Private_Clean:": 2, b"Private_Dirty:": 2, b"Anonymous:": 3, b"Swap:": 4,
}  # fmt: skip
"""The lines of smaps that are read, and where they are added up."""


@dataclass(frozen=True, slots=True)
class Held:
    """One process, at one moment."""

    resident: int
    anonymous: int  # pages that no file backs: no other process can share them unless it was forked from this one
    unique: int  # what would come free if the process ended now
    proportional: int  # pages that several processes share count in equal parts; sums over a process tree are true


@dataclass(frozen=True, slots=True)
class Mapping:
    """One range of a process's addresses."""

    start: int
    end: int
    permissions: str
    inode: int
    name: str  # a file, a name in brackets that the kernel gave, or nothing
    resident: int
    proportional: int
    unique: int
    anonymous: int
    swapped: int

    @property
    def nbytes(self) -> int:
        """Addresses, whether their pages were touched or not."""
        return self.end - self.start


def held_bytes(pid: int | None = None) -> Held:
    """Read what a process holds; None: this one."""
    if not LINUX:
        info = psutil.Process(pid).memory_full_info()
        return Held(int(info.rss), int(info.uss), int(info.uss), int(info.uss))
    sums = [0] * 5
    for line in _file(pid, "smaps_rollup").read_bytes().splitlines():
        _count(line, sums)
    resident, proportional, unique, anonymous, _ = sums
    return Held(resident, anonymous, unique, proportional)


def peak_bytes(pid: int | None = None) -> int:
    """Return the most that was resident since the process began, or since `begin_peak`."""
    if LINUX:
        for line in _file(pid, "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return held_bytes(pid).resident
    info = psutil.Process(pid).memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return int(info.peak_wset)
    if pid is not None and pid != os.getpid():  # macOS tells a process only of itself
        return int(info.rss)
    import resource  # noqa: PLC0415 does not exist on Windows

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def begin_peak(pid: int | None = None) -> bool:
    """Let a process's peak begin anew; False where the kernel does not allow it."""
    try:
        _file(pid, "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def mappings(pid: int | None = None) -> list[Mapping]:
    """Read every mapping of a process, in order of addresses; Linux alone tells them apart.

    The kernel walks the page tables for it: about 5 ms a read, and the caller's time to parse it, 15 ms.
    """
    return list(_mappings(_file(pid, "smaps").read_bytes()))


def _mappings(text: bytes) -> Iterator[Mapping]:
    header: list[bytes] = []
    sums = [0] * 5
    for line in text.splitlines():
        if line[:1] in _HEXADECIMAL:  # a line of figures begins with a capital letter
            if header:
                yield _mapping(header, sums)
            header, sums = line.split(None, 5), [0] * 5
        else:
            _count(line, sums)
    if header:
        yield _mapping(header, sums)


_HEXADECIMAL = frozenset(bytes([digit]) for digit in b"0123456789abcdef")


def _mapping(header: list[bytes], sums: list[int]) -> Mapping:
    start, _, end = header[0].partition(b"-")
    name = header[5].decode("utf-8", "replace") if len(header) > 5 else ""
    resident, proportional, unique, anonymous, swapped = sums
    return Mapping(
        start=int(start, 16),
        end=int(end, 16),
        permissions=header[1].decode("ascii", "replace"),
        inode=int(header[4]),
        name=name,
        resident=resident,
        proportional=proportional,
        unique=unique,
        anonymous=anonymous,
        swapped=swapped,
    )


def _count(line: bytes, sums: list[int]) -> None:
    words = line.split(None, 2)
    if len(words) > 1 and (place := _COUNTED.get(words[0])) is not None:
        sums[place] += int(words[1]) * 1024


def _file(pid: int | None, name: str) -> Path:
    return Path(f"/proc/{'self' if pid is None else pid}/{name}")

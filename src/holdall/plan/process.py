"""What processes hold, as the kernel counts it.

Out: resident, anonymous, unique and proportional bytes of a process, and its peak, which can be begun anew.
Linux is read from /proc; elsewhere psutil gives the nearest figure of the platform.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

LINUX = sys.platform.startswith("linux")


@dataclass(frozen=True, slots=True)
class Held:
    """One process, at one moment."""

    resident: int
    anonymous: int  # pages that no file backs: no other process can share them unless it was forked from this one
    unique: int
    proportional: int


def held_bytes(pid: int | None = None) -> Held:
    """Read what a process holds; None: this one."""
    if not LINUX:
        process = psutil.Process(pid)
        info = process.memory_full_info()
        return Held(int(info.rss), int(info.uss), int(info.uss), int(info.uss))
    kib = dict.fromkeys(("Rss", "Pss", "Private_Clean", "Private_Dirty", "Anonymous"), 0)
    text = Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text(encoding="ascii", errors="replace")
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in kib:
            kib[name] = int(rest.split()[0])
    unique = kib["Private_Clean"] + kib["Private_Dirty"]
    return Held(kib["Rss"] * 1024, kib["Anonymous"] * 1024, unique * 1024, kib["Pss"] * 1024)


def peak_bytes(pid: int | None = None) -> int:
    """Return the most that was resident since the process began, or since `begin_peak`."""
    if not LINUX:
        info = psutil.Process(pid).memory_info()
        return int(getattr(info, "peak_wset", info.rss))
    for line in Path(f"/proc/{pid or os.getpid()}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return held_bytes(pid).resident


def begin_peak() -> bool:
    """Let this process's peak begin anew; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True

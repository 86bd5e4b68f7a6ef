"""What this process really holds in memory, as the kernel counts it.

Out: unique set size (private pages only: libraries shared with others do not count) and the peak resident size.
Linux is read from /proc; elsewhere psutil gives the nearest figure of the platform.
"""

import sys
from pathlib import Path

import psutil

LINUX = sys.platform.startswith("linux")


def unique_bytes() -> int:
    """Return the memory that would come free if this process ended now."""
    if not LINUX:
        return int(psutil.Process().memory_full_info().uss)
    return sum(_kib_of("/proc/self/smaps_rollup", name) for name in ("Private_Clean", "Private_Dirty")) * 1024


def peak_bytes() -> int:
    """Return the most memory that was resident at any moment of this process."""
    if LINUX:
        return _kib_of("/proc/self/status", "VmHWM") * 1024
    info = psutil.Process().memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return int(info.peak_wset)
    import resource  # noqa: PLC0415 does not exist on Windows

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def _kib_of(path: str, name: str) -> int:
    for line in Path(path).read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    msg = f"{path} has no line {name!r}; this kernel does not say what the process holds."
    raise OSError(msg)

"""How short memory is: what is left under every limit, and how long processes waited for it.

In:  a process id.  Out: headroom by limit, and the kernel's pressure figure where it keeps one.
"""

from __future__ import annotations

from pathlib import Path

from holdall.machine import memory_limits

_FILES = ("/sys/fs/cgroup/memory.pressure", "/proc/pressure/memory")


def headroom(pid: int, budget_bytes: int | None = None) -> dict[str, int]:
    """Return the bytes that are left, by what limits them."""
    return {limit.name: limit.free_bytes for limit in memory_limits(None, process=pid)} | (
        {} if budget_bytes is None else {"--limit": budget_bytes}
    )


def stalled_share() -> float | None:
    """Return the share of the last ten seconds in which something waited for memory, in per cent."""
    for name in _FILES:
        try:
            first = Path(name).read_text(encoding="ascii").partition("\n")[0]
            return float(dict(word.split("=") for word in first.split()[1:])["avg10"])
        except (OSError, ValueError, KeyError):
            continue
    return None

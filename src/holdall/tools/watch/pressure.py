"""Memory pressure: how much of the time processes wait for memory, as the Linux kernel measures it."""

from __future__ import annotations

from pathlib import Path

from holdall.machine import list_control_groups, read_text

_OWN_PROCESS = Path("/proc/self")
_SYSTEM = Path("/proc/pressure/memory")


def read_stalled_percent(process: Path = _OWN_PROCESS, system: Path = _SYSTEM) -> float | None:
    """Return the percentage of the last ten seconds in which a process waited for memory. None if it is unknown.

    Args:
        process: Folder of a process in /proc. Only the processes of its control group count.
        system: File with the pressure of the whole system, for processes without a control group.
    """
    files = [group / "memory.pressure" for group, _ in list_control_groups(process)]
    for file in [*files, system]:
        words = read_text(file).split()
        if len(words) > 1 and words[1].startswith("avg10="):
            return float(words[1].removeprefix("avg10="))
    return None

"""What this machine has and what this process takes: cores, memory limits, control groups, resident pages.

In:  /proc, the control group, psutil.  Out: cores; bytes, each with the name of the limit that it comes from.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdall.errors import ArgumentError

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""
LINUX = sys.platform.startswith("linux")
_COUNTED = {b"Rss:": 0, b"Pss:": 1, b"Private_Clean:": 2, b"Private_Dirty:": 2, b"Anonymous:": 3}
"""The lines of smaps that are read, and where they are added up."""
_HEXADECIMAL = frozenset(bytes([digit]) for digit in b"0123456789abcdef")
_MOST_THREADS = 8
"""More threads do not decode a batch faster."""
_SHARE_OF_A_CORE = 0.02
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable_cores(control_groups: Path = _CONTROL_GROUPS) -> int:
    """Return the number of cores that this process may use: its affinity, or its container's share if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_quota(control_groups)
    return cores if quota is None else max(1, min(cores, int(quota)))


def pool_threads(most: int = _MOST_THREADS) -> int:
    """Return the number of threads of a pool: HOLDALL_THREADS, or the usable cores, but not more than `most`."""
    return min(wished_threads() or usable_cores(), most)


def wished_threads() -> int | None:
    """Return the value of HOLDALL_THREADS, or None if it is not set. Raise ArgumentError if it is not a number."""
    wish = os.environ.get("HOLDALL_THREADS", "")
    if not wish:
        return None
    if not wish.isdecimal() or int(wish) < 1:
        raise ArgumentError(f"HOLDALL_THREADS ({wish}) must be a whole number of at least 1; correct or unset it")
    return int(wish)


def _read_quota(control_groups: Path) -> float | None:
    """Return how many cores the control group may use, or None if it has no limit that can be read."""
    version_1 = [control_groups / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    text = read_text(control_groups / "cpu.max") or " ".join(map(read_text, version_1))
    try:
        quota_us, period_us = text.split()
        return None if quota_us in {"max", "-1"} else int(quota_us) / int(period_us)
    except (ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound, and what is left under it."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    """What a version of control groups calls things."""

    limit: str
    usage: str
    reclaimable: str  # a line of memory.stat


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def memory_limits(budget_bytes: int | None = None, process: int | None = None) -> list[Limit]:
    """Return every bound on host memory, the smallest first; of another process if that is named."""
    memory = psutil.virtual_memory()
    limits = [Limit("free memory of this machine", int(memory.available), int(memory.total))]
    limits += control_groups(process=process)
    if budget_bytes is not None:
        limits.append(Limit("--budget", budget_bytes, budget_bytes))
    return sorted(limits, key=lambda limit: limit.free_bytes)


def available_bytes() -> int:
    """Return the memory that is free for this process: the machine's, or a control group's if that is less."""
    return memory_limits()[0].free_bytes


def control_groups(proc: Path = Path("/proc"), process: int | None = None) -> list[Limit]:
    """Return the memory limits of all control groups that a process is in; None: this one."""
    limits = []
    for directory, files in _directories(proc / ("self" if process is None else str(process))):
        limit, usage = _number(directory / files.limit), _number(directory / files.usage)
        if limit is None or usage is None or limit >= _NO_LIMIT:
            continue
        free = limit - usage + _stat(directory / "memory.stat", files.reclaimable)
        limits.append(Limit(f"control group {directory}", min(max(free, 0), limit), limit))
    return limits


def largest_mapping(proc: Path = Path("/proc")) -> int | None:
    """Return the most that one array may ask for; None where the kernel does not check it.

    Untouched pages cost nothing, but a request for more than all memory and swap is refused at once.
    """
    if _number(proc / "sys/vm/overcommit_memory") == 1:
        return None
    return int(psutil.virtual_memory().total) + int(psutil.swap_memory().total)


def shared_memory() -> Limit | None:
    """Return what is left for shared memory between processes; None where it has no place of its own."""
    return _disk("/dev/shm", Path("/dev/shm"))


def disk(directory: Path) -> Limit | None:
    """Return what is left where checkpoints go."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return _disk(f"disk at {directory}", directory)


def _disk(name: str, directory: Path) -> Limit | None:
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None
    return Limit(name, usage.free, usage.total)


def _directories(process: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the directory of a process's memory control group and of all that enclose it."""
    paths = _paths(process / "cgroup")
    for mount, root, kind, controllers in _mounts(process / "mountinfo"):
        if kind == "cgroup2":
            files, path = _V2, paths.get("")
        elif "memory" in controllers:
            files, path = _V1, paths.get("memory")
        else:
            continue
        if path is None:
            continue
        # In a container the mount shows only part of the tree; what lies outside of it cannot be read.
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        group = mount / inside.strip("/")
        if not group.is_dir():
            group = mount
        while True:
            yield group, files
            if group == mount:
                break
            group = group.parent


def _paths(file: Path) -> dict[str, str]:
    """Read the path in every hierarchy, by controller; version 2 has none: the empty name."""
    paths = {}
    for line in read_text(file).splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(file: Path) -> Iterator[tuple[Path, str, str, set[str]]]:
    """Yield mount point, root, kind and options of the mounted control group hierarchies."""
    for line in read_text(file).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind in {"cgroup", "cgroup2"}:
            fields = before.split()
            yield Path(fields[4]), fields[3], kind, set(options.split()[-1].split(","))


def _stat(file: Path, name: str) -> int:
    """Return the number behind a name, in a file of names and numbers; 0 if it is not there."""
    found = (line.split() for line in read_text(file).splitlines() if line.startswith(name))
    return next((int(words[1]) for words in found if words[0] == name), 0)


def _number(file: Path) -> int | None:
    text = read_text(file).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def read_text(file: Path) -> str:
    """Return what a small file of the system holds; nothing if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """One process, at one moment."""

    resident: int
    proportional: int  # pages that several processes share count in equal parts; sums over a process tree are true
    unique: int  # what would come free if the process ended now
    anonymous: int  # pages that no file backs: no other process can share them unless it was forked from this one


@dataclass(frozen=True, slots=True)
class Mapping:
    """One range of a process's addresses."""

    start: int
    end: int
    permissions: str
    name: str  # a file, a name in brackets that the kernel gave, or nothing
    resident: int
    proportional: int
    unique: int

    @property
    def nbytes(self) -> int:
        """Addresses, whether their pages were touched or not."""
        return self.end - self.start


def held_bytes(pid: int | None = None) -> HeldMemory:
    """Read what a process holds; None: this one."""
    if not LINUX:
        info = psutil.Process(pid).memory_full_info()
        return HeldMemory(int(info.rss), int(info.uss), int(info.uss), int(info.uss))
    sums = [0] * 4
    for line in _file(pid, "smaps_rollup").read_bytes().splitlines():
        _count(line, sums)
    return HeldMemory(*sums)


def anonymous_bytes() -> int:
    """Return what this process holds that no file backs, from the kernel's counters: at no cost, whatever the size."""
    if not LINUX:
        return held_bytes().anonymous
    _, resident, shared, *_ = _file(None, "statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class HeldReader:
    """Reads what this process holds for who asks often: that costs a fiftieth of a core at most."""

    def __init__(self) -> None:
        self._held: HeldMemory | None = None
        self._read_again_at = 0.0

    def read(self) -> HeldMemory:
        """Return what is held, or was a little while ago."""
        now = time.monotonic()
        if self._held is None or now >= self._read_again_at:
            self._held = held_bytes()  # the kernel walks all pages for it
            self._read_again_at = now + (time.monotonic() - now) / _SHARE_OF_A_CORE
        return self._held


def peak_bytes(pid: int | None = None) -> int:
    """Return the most that was resident since the process began, or since `begin_peak`."""
    if LINUX:
        return _stat(_file(pid, "status"), "VmHWM:") * 1024 or held_bytes(pid).resident
    info = psutil.Process(pid).memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return int(info.peak_wset)
    if pid is not None and pid != os.getpid():  # macOS reports only a process's own
        return int(info.rss)
    import resource  # noqa: PLC0415 does not exist on Windows

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def begin_peak() -> bool:
    """Reset this process's peak; False where the kernel does not allow it."""
    try:
        _file(None, "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def mappings(pid: int | None = None) -> list[Mapping]:
    """Read every mapping of a process, in order of addresses; only on Linux.

    The kernel walks the page tables for it: about 5 ms a read, and the caller's time to parse it, 15 ms.
    """
    return list(_mappings(_file(pid, "smaps").read_bytes()))


def _mappings(text: bytes) -> Iterator[Mapping]:
    header: list[bytes] = []
    sums = [0] * 4
    for line in [*text.splitlines(), b"0"]:
        if line[:1] not in _HEXADECIMAL:  # a line of figures begins with a capital letter
            _count(line, sums)
            continue
        if header:
            start, _, end = header[0].partition(b"-")
            name = header[5].decode("utf-8", "replace") if len(header) > 5 else ""
            yield Mapping(int(start, 16), int(end, 16), header[1].decode("ascii", "replace"), name, *sums[:3])
        header, sums = line.split(None, 5), [0] * 4


def _count(line: bytes, sums: list[int]) -> None:
    words = line.split(None, 2)
    if len(words) > 1 and (place := _COUNTED.get(words[0])) is not None:
        sums[place] += int(words[1]) * 1024


def _file(pid: int | None, name: str) -> Path:
    return Path(f"/proc/{'self' if pid is None else pid}/{name}")

"""Cores and memory of this machine, and the memory of its processes.

Sources are /proc, control groups and psutil. Every limit has the name of its origin, for messages.
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
"""Limits of at least this number are ignored. Version 1 of control groups writes a number near 2^63 for no limit."""
LINUX = sys.platform.startswith("linux")
_SUM_BY_FIELD = {b"Rss:": 0, b"Pss:": 1, b"Private_Clean:": 2, b"Private_Dirty:": 2, b"Anonymous:": 3}
"""Fields of smaps, and the index of the sum to which each field is added. The order is that of `HeldMemory`."""
_HEXADECIMAL = frozenset(bytes([digit]) for digit in b"0123456789abcdef")
_MAX_POOL_THREADS = 8
"""Largest size of a pool of threads. More threads do not decode a batch faster."""
_MAX_CORE_SHARE = 0.02
"""Largest share of a core that `HeldReader` uses."""
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable_cores(control_groups: Path = _CONTROL_GROUPS) -> int:
    """Return the number of cores that this process may use: its affinity, or the quota of its container if less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_quota(control_groups)
    return cores if quota is None else max(1, min(cores, int(quota)))


def pool_threads() -> int:
    """Return the number of threads of a pool: HOLDALL_THREADS, or else the usable cores, up to a limit."""
    return min(read_requested_threads() or usable_cores(), _MAX_POOL_THREADS)


def read_requested_threads() -> int | None:
    """Return the value of HOLDALL_THREADS, or None if it is not set. Raise ArgumentError if it is not a number."""
    value = os.environ.get("HOLDALL_THREADS", "")
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ArgumentError(f"HOLDALL_THREADS ({value}) must be a whole number of at least 1; correct or unset it")
    return int(value)


def _read_quota(control_groups: Path) -> float | None:
    """Return the number of cores that the control group may use, or None if no limit can be read."""
    version_1 = [control_groups / "cpu" / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    text = read_text(control_groups / "cpu.max") or " ".join(map(read_text, version_1))
    try:
        quota_us, period_us = text.split()
        return None if quota_us in {"max", "-1"} else int(quota_us) / int(period_us)
    except (ValueError, ZeroDivisionError):
        return None


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on memory or disk space, and the bytes that are free below it."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    """The names of files and fields in one version of control groups."""

    limit: str
    usage: str
    reclaimable: str  # Field of memory.stat that counts memory which the kernel can free.


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def memory_limits(budget_bytes: int | None = None, process: int | None = None) -> list[Limit]:
    """Return all limits on host memory, the one with the fewest free bytes first.

    Args:
        budget_bytes: A further limit, which the user set.
        process: Id of the process. None: this one.
    """
    memory = psutil.virtual_memory()
    limits = [Limit("free memory of this machine", int(memory.available), int(memory.total))]
    limits += control_groups(process=process)
    if budget_bytes is not None:
        limits.append(Limit("--budget", budget_bytes, budget_bytes))
    return sorted(limits, key=lambda limit: limit.free_bytes)


def available_bytes() -> int:
    """Return the bytes that this process can still allocate: below the limit with the fewest free bytes."""
    return memory_limits()[0].free_bytes


def control_groups(proc: Path = Path("/proc"), process: int | None = None) -> list[Limit]:
    """Return the memory limits of all control groups of the process with the id `process`. None: this process."""
    limits = []
    for directory, files in list_control_groups(proc / ("self" if process is None else str(process))):
        limit = _read_number(directory / files.limit)
        usage = _read_number(directory / files.usage)
        if limit is None or usage is None or limit >= _NO_LIMIT:
            continue
        free = limit - usage + _read_field(directory / "memory.stat", files.reclaimable)
        limits.append(Limit(f"control group {directory}", min(max(free, 0), limit), limit))
    return limits


def largest_mapping(proc: Path = Path("/proc")) -> int | None:
    """Return the size in bytes of the largest array that can be allocated. None: the kernel does not check sizes.

    Pages take no memory before they are written, but the kernel refuses an array that is larger than all memory and
    swap.
    """
    if _read_number(proc / "sys/vm/overcommit_memory") == 1:
        return None
    return int(psutil.virtual_memory().total) + int(psutil.swap_memory().total)


def disk(directory: Path) -> Limit | None:
    """Return the limit of the disk of `directory`, which need not exist. None: it cannot be read."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return None
    return Limit(f"disk at {directory}", usage.free, usage.total)


def list_control_groups(process: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the directory of the memory control group of a process, and of all groups that contain this group."""
    paths = _read_paths(process / "cgroup")
    for mount, root, kind, controllers in _read_mounts(process / "mountinfo"):
        if kind == "cgroup2":
            files = _V2
            path = paths.get("")
        elif "memory" in controllers:
            files = _V1
            path = paths.get("memory")
        else:
            continue
        if path is None:
            continue
        # In a container, the mount shows only a part of the tree. Groups outside of it cannot be read.
        if root != "/":
            path = path.removeprefix(root)
        group = mount / path.strip("/")
        if not group.is_dir():
            group = mount
        while True:
            yield group, files
            if group == mount:
                break
            group = group.parent


def _read_paths(file: Path) -> dict[str, str]:
    """Return the path of a process in every hierarchy, by controller. Version 2 has one hierarchy, with the name ""."""
    paths = {}
    for line in read_text(file).splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _read_mounts(file: Path) -> Iterator[tuple[Path, str, str, set[str]]]:
    """Yield mount point, root, kind and options of the mounted control group hierarchies."""
    for line in read_text(file).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind in {"cgroup", "cgroup2"}:
            fields = before.split()
            yield Path(fields[4]), fields[3], kind, set(options.split()[-1].split(","))


def _read_field(file: Path, name: str) -> int:
    """Return the number that follows `name` in a file of names and numbers. 0: the file does not have the name."""
    for line in read_text(file).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0


def _read_number(file: Path) -> int | None:
    """Return the number in a file, or None if the file has no number."""
    text = read_text(file).strip()
    return int(text) if text.isdigit() else None  # The file has "max" in place of a limit.


def read_text(file: Path) -> str:
    """Return the text of a small system file. Empty if the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes of memory that a process holds at one moment."""

    resident: int
    proportional: int  # Shared pages divided by the number of their processes, so sums over processes are correct.
    unique: int  # Bytes that would be freed if the process ended now.
    anonymous: int  # Pages without a file. Only forked processes can share them.


@dataclass(frozen=True, slots=True)
class Mapping:
    """One range of addresses of a process."""

    start: int
    end: int
    permissions: str
    name: str  # A file, a name that the kernel gives in brackets, such as [heap], or empty.
    resident: int
    proportional: int
    unique: int

    @property
    def nbytes(self) -> int:
        """Length of the range. Pages that take no memory count, too."""
        return self.end - self.start


def held_bytes(pid: int | None = None) -> HeldMemory:
    """Return the memory of the process with the id `pid`. None: this process."""
    if not LINUX:
        info = psutil.Process(pid).memory_full_info()
        return HeldMemory(int(info.rss), int(info.uss), int(info.uss), int(info.uss))
    sums = [0] * 4
    for line in _find_process_file(pid, "smaps_rollup").read_bytes().splitlines():
        _add_field(line, sums)
    return HeldMemory(*sums)


def anonymous_bytes() -> int:
    """Return the bytes of this process's pages without a file. Takes microseconds: the kernel has counters."""
    if not LINUX:
        return held_bytes().anonymous
    _, resident, shared, *_ = _find_process_file(None, "statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


class HeldReader:
    """Reads the memory of this process for frequent callers. Uses at most a fiftieth of a core."""

    def __init__(self) -> None:
        self._held: HeldMemory | None = None
        self._next_read = 0.0  # Time of the monotonic clock.

    def read(self) -> HeldMemory:
        """Return the memory of this process, perhaps as it was at an earlier call."""
        now = time.monotonic()
        if self._held is None or now >= self._next_read:
            self._held = held_bytes()  # The kernel walks all pages of the process.
            self._next_read = now + (time.monotonic() - now) / _MAX_CORE_SHARE
        return self._held


def peak_bytes(pid: int | None = None) -> int:
    """Return the largest number of resident bytes since the process started, or since `begin_peak`."""
    if LINUX:
        return _read_field(_find_process_file(pid, "status"), "VmHWM:") * 1024 or held_bytes(pid).resident
    info = psutil.Process(pid).memory_info()
    if hasattr(info, "peak_wset"):  # Windows
        return int(info.peak_wset)
    if pid is not None and pid != os.getpid():  # macOS reports only the peak of the calling process.
        return int(info.rss)
    import resource  # noqa: PLC0415 does not exist on Windows

    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)  # bytes on macOS


def begin_peak() -> bool:
    """Start a new measurement of this process's peak. Return False if the kernel does not allow it."""
    try:
        _find_process_file(None, "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def mappings(pid: int | None = None) -> list[Mapping]:
    """Return all mappings of a process, sorted by address. Only on Linux.

    The kernel walks the page tables, so a call takes milliseconds.
    """
    return list(_parse_mappings(_find_process_file(pid, "smaps").read_bytes()))


def _parse_mappings(text: bytes) -> Iterator[Mapping]:
    """Yield the mappings in the text of smaps: a line with the addresses, and then one line for each field."""
    header: list[bytes] = []
    sums = [0] * 4
    for line in [*text.splitlines(), b"0"]:  # The additional header ends the last mapping.
        if line[:1] not in _HEXADECIMAL:  # Lines of fields begin with a capital letter.
            _add_field(line, sums)
            continue
        if header:
            start, _, end = header[0].partition(b"-")
            name = header[5].decode("utf-8", "replace") if len(header) > 5 else ""
            yield Mapping(int(start, 16), int(end, 16), header[1].decode("ascii", "replace"), name, *sums[:3])
        header = line.split(None, 5)
        sums = [0] * 4


def _add_field(line: bytes, sums: list[int]) -> None:
    """Add the bytes of a line of smaps to their sum, if there is one for its field."""
    words = line.split(None, 2)
    if len(words) > 1 and words[0] in _SUM_BY_FIELD:
        sums[_SUM_BY_FIELD[words[0]]] += int(words[1]) * 1024


def _find_process_file(pid: int | None, name: str) -> Path:
    return Path(f"/proc/{'self' if pid is None else pid}/{name}")

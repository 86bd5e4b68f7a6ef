"""What a run must stay under: the machine, its containers, the user's budget, the disk.

In:  the kernel's files.  Out: limits by name, each with the bytes that are still free under it.
Invariant: every enclosing control group counts, of version 1 and 2; the page cache that the kernel would give up
first does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2^63 where there is no limit."""


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
    cache: str  # another


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_cache")
_V2 = _Files("memory.max", "memory.current", "inactive_file", "file")


def memory_limits(
    budget_bytes: int | None = None, proc: Path = Path("/proc"), process: int | None = None
) -> list[Limit]:
    """Return every bound on host memory, the smallest first; of another process if that is named."""
    memory = psutil.virtual_memory()
    limits = [Limit("free memory of this machine", int(memory.available), int(memory.total))]
    limits += control_groups(proc, process)
    if budget_bytes is not None:
        limits.append(Limit("--budget", budget_bytes, budget_bytes))
    return sorted(limits, key=lambda limit: limit.free_bytes)


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


def page_cache(process: int | None = None, proc: Path = Path("/proc")) -> int | None:
    """Return what files take in the cache of a process's control group; None where it has none of its own."""
    for directory, files in _directories(proc / ("self" if process is None else str(process))):
        if (directory / "memory.stat").is_file():
            return _stat(directory / "memory.stat", files.cache)
    return None


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
    for line in _text(file).splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _mounts(file: Path) -> Iterator[tuple[Path, str, str, set[str]]]:
    """Yield mount point, root, kind and options of the mounted control group hierarchies."""
    for line in _text(file).splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind in {"cgroup", "cgroup2"}:
            fields = before.split()
            yield Path(fields[4]), fields[3], kind, set(options.split()[-1].split(","))


def _stat(file: Path, name: str) -> int:
    for line in _text(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

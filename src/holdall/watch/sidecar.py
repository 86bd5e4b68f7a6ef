"""The sidecar: what a watched process tells of itself, in one small file.

In:  arrays and their names, counters, what the allocators say.  Out: the same, checked, in another process.
Invariant: a file is believed only if it is of the process that is asked for (an id is used again), and of the shape
that is written here. It is JSON; nothing of it is run.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from holdall.watch.allocators import Heap, PythonObjects
from holdall.watch.places import folders_of, own_folder, read_small, replace

_FORMAT = "holdall-agent-1"
_LONGEST_NAME = 200
_MOST_REGIONS = 100_000
_MOST_EVENTS = 100


class Region(NamedTuple):
    """Bytes of the watched process that have a name."""

    group: str  # "buffers" or "torch"
    name: str
    address: int
    nbytes: int
    fill: float | None = None  # of what it is a part of
    in_heap: bool = True  # whether the C library's allocator was asked for it


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """A phase of training, over all of its turns."""

    peak: int  # most that was resident
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Told:
    """What a process said of itself at one moment."""

    pid: int
    started: int  # of the process, in the kernel's ticks: an id may be used again
    time: float
    step: int | None = None
    goal: int | None = None  # steps at which training ends
    phase: str | None = None
    regions: tuple[Region, ...] = ()
    heap: Heap | None = None
    python: PythonObjects | None = None
    gpu: dict[str, int] = field(default_factory=dict)
    torch_threads: int | None = None
    spilled: dict[str, int] = field(default_factory=dict)  # bytes on disk, by folder
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    events: tuple[tuple[float, str], ...] = ()
    seconds_spent: float = 0.0  # in the watched process, so far


def tell(told: Told) -> None:
    """Publish what this process says of itself."""
    words: dict[str, Any] = {name: getattr(told, name) for name in Told.__slots__}  # asdict would copy every region
    words["phases"] = {name: asdict(phase) for name, phase in told.phases.items()}
    words["format"] = _FORMAT
    replace(_path(own_folder(), told.pid), json.dumps(words, separators=(",", ":")).encode())


def withdraw(pid: int) -> None:
    """Remove what this process said of itself."""
    _path(own_folder(), pid).unlink(missing_ok=True)


def sweep() -> None:
    """Remove what processes left behind that are no more."""
    for path in own_folder().glob("*-*.json"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def told_by(pid: int) -> Told | None:
    """Return what a process says of itself; None if it says nothing, or nothing that can be believed."""
    started = process_start(pid)
    for folder in folders_of(pid):
        content = read_small(_path(folder, pid))
        found = None if content is None else _checked(content)
        if found is not None and found.pid == pid and found.started == started:
            return found
    return None


def process_start(pid: int) -> int:
    """Return when a process began, in the kernel's ticks; 0 where that is not told."""
    content = read_small(Path(f"/proc/{pid}/stat"))
    # The name of the program is in brackets and may itself hold brackets and blanks.
    fields = (content or b"").rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def _path(folder: Path, pid: int) -> Path:
    return folder / f"agent-{pid}.json"


def _checked(content: bytes) -> Told | None:
    try:
        words = json.loads(content)
        if words["format"] != _FORMAT or len(words["regions"]) > _MOST_REGIONS or len(words["events"]) > _MOST_EVENTS:
            return None
        return Told(
            pid=_count(words["pid"]),
            started=_count(words["started"]),
            time=_finite(words["time"]),
            step=_maybe(words["step"]),
            goal=_maybe(words["goal"]),
            phase=None if words["phase"] is None else _name(words["phase"]),
            regions=tuple(_region(*one) for one in words["regions"]),
            heap=None if words["heap"] is None else Heap(*map(_count, words["heap"])),
            python=None if words["python"] is None else PythonObjects(*map(_count, words["python"])),
            gpu={_name(name): _count(number) for name, number in words["gpu"].items()},
            torch_threads=_maybe(words["torch_threads"]),
            spilled={_name(name): _count(number) for name, number in words["spilled"].items()},
            phases={_name(name): _phase(**one) for name, one in words["phases"].items()},
            events=tuple((_finite(moment), _name(text)) for moment, text in words["events"]),
            seconds_spent=_finite(words["seconds_spent"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _region(group: Any, name: Any, address: Any, nbytes: Any, fill: Any, in_heap: Any) -> Region:
    if group not in {"buffers", "torch"} or not isinstance(in_heap, bool):
        raise ValueError(group)
    share = None if fill is None else min(max(_finite(fill), 0.0), 1.0)
    return Region(group, _name(name), _count(address), _count(nbytes), share, in_heap)


def _phase(peak: Any, count: Any, seconds: Any) -> PhasePeak:
    return PhasePeak(_count(peak), _count(count), _finite(seconds))


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value


def _maybe(value: Any) -> int | None:
    return None if value is None else _count(value)


def _finite(value: Any) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise ValueError(value)
    return "".join(letter if letter.isprintable() else "?" for letter in value)

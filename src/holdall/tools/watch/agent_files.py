"""The files that a watched process and its watcher exchange: agent reports, trim requests and answers.

In:  a process id.  Out: what that process reported about itself, checked; or a trim that it ran on request.
Invariant: the folder belongs to one user alone; a folder that others could write to is not used. A file is trusted only
if it comes from the process asked for (ids are reused) and has the expected shape. It is JSON; nothing in it is run.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from holdall.errors import WatchError
from holdall.machine import held_bytes
from holdall.tools.watch.reading import GrowingLine, Heap, PythonObjects, heap, return_free_heap

_FOLDER_VARIABLE = "HOLDALL_RUNTIME_DIR"
LARGEST_FILE_BYTES = 16 * 2**20
_REPORT_FORMAT = "holdall-agent-1"
_LONGEST_NAME = 200
_MOST_REGIONS = 100_000
_MOST_EVENTS = 100
_MOST_LINES = 10
_TRIM_TIMEOUT_S = 10.0


def own_folder() -> Path:
    """Return this user's folder, made if it is not there."""
    folder = next(_candidate_folders(_user_id()))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WatchError(
            f"{folder} cannot be made ({error.strerror}); set {_FOLDER_VARIABLE} to a folder of your own"
        ) from error
    if not is_private(folder, _user_id()):
        raise WatchError(
            f"{folder} is open to other users, and a watch trusts what is in it; remove it, or set "
            f"{_FOLDER_VARIABLE} to a folder of your own"
        )
    return folder


def folders_of(pid: int) -> list[Path]:
    """Return the folders in which a process may have left its files; only those that can be trusted."""
    try:
        user = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        user = _user_id()
    return [folder for folder in dict.fromkeys(_candidate_folders(user)) if is_private(folder, user)]


def is_private(folder: Path, user: int) -> bool:
    """Whether a folder is there, belongs to the user, and nobody else may write to it."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    if sys.platform == "win32":  # the temporary folder there is the user's own
        return stat.S_ISDIR(found.st_mode)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077


def read_small_file(path: Path) -> bytes | None:
    """Return what a file holds; None if it is not there, is a link, or is larger than anything that is written here."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_FILE_BYTES:
            return None
        return file.read(LARGEST_FILE_BYTES)


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in the place of the one before: a reader sees either, never half of one."""
    written = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    written.replace(path)


def _candidate_folders(user: int) -> Iterator[Path]:
    """Yield where the folder of a user may be, the first one being where it is made."""
    if wish := os.environ.get(_FOLDER_VARIABLE):
        yield Path(wish)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        yield Path(runtime) / "holdall"
    if Path(f"/run/user/{user}").is_dir():
        yield Path(f"/run/user/{user}/holdall")
    yield Path(tempfile.gettempdir()) / f"holdall-{user}"


def _user_id() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


class Region(NamedTuple):
    """Bytes of the watched process that have a name."""

    group: str  # "buffers" or "torch"
    name: str
    address: int
    nbytes: int
    fill: float | None = None  # of what it is a part of
    in_heap: bool = True  # whether the C library's allocator was asked for it
    grows: bool = False  # whether more is allocated for the same name as it fills


class HeldField(NamedTuple):
    """One field of one of holdall's memories, as the memory's report counts it. Its addresses are not known."""

    name: str
    nbytes: int
    fill: float  # Fraction of the memory's capacity that is filled.


@dataclass(frozen=True, slots=True)
class PhasePeak:
    """A phase of training, over all the times that it ran."""

    peak: int  # most that was resident
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What a process reported about itself at one moment."""

    pid: int
    started: int  # of the process, in the kernel's ticks: an id may be used again
    time: float
    step: int | None = None
    goal: int | None = None  # steps at which training ends
    phase: str | None = None
    regions: tuple[Region, ...] = ()
    held: tuple[HeldField, ...] = ()  # Fields of holdall's own memories.
    held_in_heap: int = 0  # Bytes of them that the C library's allocator was asked for.
    heap: Heap | None = None
    python: PythonObjects | None = None
    gpu: dict[str, int] = field(default_factory=dict)
    torch_threads: int | None = None
    spilled: dict[str, int] = field(default_factory=dict)  # bytes on disk, by folder
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    events: tuple[tuple[float, str], ...] = ()
    growing: tuple[GrowingLine, ...] = ()  # what the last trace found, the largest first
    seconds_spent: float = 0.0  # in the watched process, so far


def write_agent_report(report: AgentReport) -> None:
    """Publish the report of this process."""
    # `asdict` would copy every region.
    values: dict[str, Any] = {name: getattr(report, name) for name in AgentReport.__slots__}
    values["phases"] = {name: asdict(phase) for name, phase in report.phases.items()}
    values["format"] = _REPORT_FORMAT
    replace_file(_path(own_folder(), "agent", report.pid), json.dumps(values, separators=(",", ":")).encode())


def remove_agent_report(pid: int) -> None:
    """Remove the report of a process."""
    _path(own_folder(), "agent", pid).unlink(missing_ok=True)


def remove_stale_files() -> None:
    """Remove the files of processes that have ended."""
    for path in own_folder().glob("*-*.json"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            path.unlink(missing_ok=True)


def read_agent_report(pid: int) -> AgentReport | None:
    """Return the report of a process; None if there is none, or none that can be trusted."""
    started = process_start(pid)
    for folder in folders_of(pid):
        content = read_small_file(_path(folder, "agent", pid))
        found = None if content is None else _parse_report(content)
        if found is not None and found.pid == pid and found.started == started:
            return found
    return None


def process_start(pid: int) -> int:
    """Return when a process began, in the kernel's ticks; 0 where that is unknown."""
    content = read_small_file(Path(f"/proc/{pid}/stat"))
    # The name of the program is in brackets and may itself hold brackets and blanks.
    fields = (content or b"").rpartition(b")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def _path(folder: Path, kind: str, pid: int) -> Path:
    """Return where a process leaves its report ("agent"), a request to it ("trim", "trace") or its answer lies."""
    return folder / f"{kind}-{pid}.json"


def _parse_report(content: bytes) -> AgentReport | None:
    try:
        values = json.loads(content)
        is_large = len(values["events"]) > _MOST_EVENTS
        is_large |= len(values["regions"]) > _MOST_REGIONS or len(values["held"]) > _MOST_REGIONS
        if values["format"] != _REPORT_FORMAT or is_large:
            return None
        optional = {name: None if values[name] is None else check(values[name]) for name, check in _OPTIONAL.items()}
        return AgentReport(
            pid=_checked_count(values["pid"]),
            started=_checked_count(values["started"]),
            time=_checked_float(values["time"]),
            regions=tuple(_checked_region(*one) for one in values["regions"]),
            held=tuple(_checked_field(*one) for one in values["held"]),
            held_in_heap=_checked_count(values["held_in_heap"]),
            gpu=_checked_counts(values["gpu"]),
            spilled=_checked_counts(values["spilled"]),
            phases={_checked_name(name): _checked_phase(**phase) for name, phase in values["phases"].items()},
            events=tuple((_checked_float(moment), _checked_name(text)) for moment, text in values["events"]),
            growing=tuple(_checked_line(*one) for one in values["growing"][:_MOST_LINES]),
            seconds_spent=_checked_float(values["seconds_spent"]),
            **optional,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _checked_region(group: Any, name: Any, address: Any, nbytes: Any, fill: Any, in_heap: Any, grows: Any) -> Region:
    if group not in {"buffers", "torch"} or not isinstance(in_heap, bool) or not isinstance(grows, bool):
        raise ValueError(group)
    share = None if fill is None else min(max(_checked_float(fill), 0.0), 1.0)
    return Region(group, _checked_name(name), _checked_count(address), _checked_count(nbytes), share, in_heap, grows)


def _checked_field(name: Any, nbytes: Any, fill: Any) -> HeldField:
    return HeldField(_checked_name(name), _checked_count(nbytes), min(max(_checked_float(fill), 0.0), 1.0))


def _checked_line(file: Any, line: Any, code: Any, nbytes: Any, count: Any, seconds: Any) -> GrowingLine:
    counts = _checked_count(nbytes), _checked_count(count)
    return GrowingLine(_checked_name(file), _checked_count(line), _checked_name(code), *counts, _checked_float(seconds))


def _checked_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value


def _checked_counts(values: Any) -> dict[str, int]:
    return {_checked_name(name): _checked_count(number) for name, number in values.items()}


def _checked_phase(peak: Any, count: Any, seconds: Any) -> PhasePeak:
    return PhasePeak(_checked_count(peak), _checked_count(count), _checked_float(seconds))


def _checked_float(value: Any) -> float:
    if type(value) not in {int, float} or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _checked_name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise ValueError(value)
    return "".join(letter if letter.isprintable() else "?" for letter in value)


_OPTIONAL: dict[str, Callable[[Any], Any]] = {
    "step": _checked_count, "goal": _checked_count, "torch_threads": _checked_count, "phase": _checked_name,
    "heap": lambda counts: Heap(*map(_checked_count, counts)),
    "python": lambda counts: PythonObjects(*map(_checked_count, counts)),
}  # fmt: skip
"""What may be None in a report, and how it is checked."""


@dataclass(frozen=True, slots=True)
class TrimResult:
    """The result of a trim."""

    free: int  # in the C library's lists before; some of these pages may have been returned already
    before: int  # unique set size
    after: int

    @property
    def returned(self) -> int:
        """Bytes that went back to the system."""
        return self.before - self.after


def trim_self() -> TrimResult:
    """Trim this process."""
    found = heap()
    before = held_bytes().unique
    if not return_free_heap():
        raise WatchError("this system's C library has no malloc_trim; nothing was done")
    return TrimResult(0 if found is None else found.free, before, held_bytes().unique)


def trim_process(pid: int) -> TrimResult:
    """Ask a process to trim itself: only a process itself can trim its heap."""
    if pid == os.getpid():
        return trim_self()
    folders = folders_of(pid)
    if read_agent_report(pid) is None or not folders:
        raise WatchError(
            f"pid ({pid}) has no agent, and only a process itself can trim its heap; call holdall.watch.start() or "
            "use holdall.sb3.WatchCallback in it, or start it with 'holdall watch -- ...'"
        )
    for folder in folders:
        _path(folder, "trimmed", pid).unlink(missing_ok=True)
        replace_file(_path(folder, "trim", pid), b"{}")
    end = time.monotonic() + _TRIM_TIMEOUT_S
    while time.monotonic() < end:
        for folder in folders:
            if (content := read_small_file(_path(folder, "trimmed", pid))) is not None:
                return TrimResult(**{name: int(value) for name, value in json.loads(content).items()})
        time.sleep(0.05)
    raise WatchError(f"pid ({pid}) did not answer within {_TRIM_TIMEOUT_S:.0f} s; is it stopped, or in one long call?")


def answer_trim_request() -> None:
    """Trim this process if another one asked for it; called by its agent."""
    if take_request("trim"):
        answer = json.dumps(asdict(trim_self())).encode()
        replace_file(_path(own_folder(), "trimmed", os.getpid()), answer)


def request_trace(pid: int) -> None:
    """Ask the agent of a process to trace what it allocates; its report then says which lines grow."""
    for folder in folders_of(pid):
        replace_file(_path(folder, "trace", pid), b"{}")


def take_request(kind: str) -> bool:
    """Return whether another process asked this one for a "trim" or a "trace"; called by its agent."""
    path = _path(own_folder(), kind, os.getpid())
    is_there = path.exists()
    path.unlink(missing_ok=True)
    return is_there

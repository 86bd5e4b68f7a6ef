"""Files that a watched process and its watcher exchange: agent reports, and the latest reading.

The files are JSON in a folder of this user alone; a folder that other users can write to is not used. A report is used
only if it was written by the process that has the id now, and if every value has the declared type.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import psutil

from holdall.errors import WatchError
from holdall.machine import LINUX, read_text
from holdall.tools.part_groups import GROUP_NAMES

_FOLDER_VARIABLE = "HOLDALL_RUNTIME_DIR"
_REPORT_FORMAT = "holdall-agent-4"
_MAX_FILE_BYTES = 16 * 2**20
_MAX_TEXT_LENGTH = 200
"""The writer of a report cuts longer names and texts. The reader refuses a report with a longer one."""
_MAX_ITEMS = 100_000


class Region(NamedTuple):
    """A named range of addresses in the watched process."""

    group: str  # Name of a group in `PART_GROUPS`.
    name: str
    address: int
    nbytes: int
    fill: float | None = None  # Fraction of the buffer that is filled.
    is_malloc: bool = True  # Whether the C library's allocator provided the addresses.


class HeldField(NamedTuple):
    """One field of one of holdall's memories, which reports sizes and no addresses."""

    name: str
    nbytes: int
    fill: float  # Fraction of the transitions that the memory can hold.
    budget: int | None = None  # Bytes that the whole memory may hold in RAM.


class PhasePeak(NamedTuple):
    """A phase of training, over all its occurrences."""

    peak: int  # Highest resident set size.
    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Report of a process about itself at one moment."""

    pid: int
    started: int  # Start time of the process, since ids are reused.
    time: float
    step: int | None = None
    goal: int | None = None  # Step at which training ends.
    phase: str | None = None
    regions: tuple[Region, ...] = ()
    held: tuple[HeldField, ...] = ()
    held_in_heap: int = 0  # Bytes of holdall's memories that the C library's allocator provided.
    heap_used: int | None = None  # Live bytes in the heap of the C library.
    heap_mapped: int = 0  # Live bytes in large blocks, which the C library maps one by one.
    python_objects: int = 0  # Blocks of up to 512 bytes that Python's own allocator has given out.
    gpu: dict[str, int] = field(default_factory=dict)
    torch_threads: int | None = None
    spilled: int = 0  # Bytes that memories moved to disk.
    disk_free: int | None = None  # Free bytes of the fullest disk that memories spill to.
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    events: tuple[tuple[float, str], ...] = ()
    seconds_spent: float = 0.0  # CPU time of the agent so far.


# ---------------------------------------------------------------- the folder


def make_folder() -> Path:
    """Return this user's folder. It is created if it does not exist."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = _name_folder(user)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise WatchError(
            f"{folder} cannot be created ({error.strerror}). Set {_FOLDER_VARIABLE} to a folder of your own."
        ) from error
    if not _is_private(folder, user):
        raise WatchError(
            f"{folder} is open to other users, and a watch trusts its files. Remove it, or set {_FOLDER_VARIABLE} to a "
            "folder of your own."
        )
    return folder


def _name_folder(user: int) -> Path:
    chosen = os.environ.get(_FOLDER_VARIABLE)
    return Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"holdall-{user}"


def _is_private(folder: Path, user: int) -> bool:
    try:
        status = folder.lstat()
    except OSError:
        return False
    if sys.platform == "win32":  # The temporary folder belongs to the user.
        return stat.S_ISDIR(status.st_mode)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & 0o077


def _read_file(path: Path) -> bytes | None:
    """Return the content of a file. None if it is missing, or belongs to a user whose files may not be read.

    Raise WatchError if it is a link or no file, or is larger than `_MAX_FILE_BYTES`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except (FileNotFoundError, PermissionError):
        return None
    except OSError as error:  # A link, for example.
        raise WatchError(f"{path} cannot be read ({error.strerror}). Remove it.") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_FILE_BYTES:
            raise WatchError(f"{path} is not a file of at most {_MAX_FILE_BYTES:,} bytes. Remove it.")
        return file.read(_MAX_FILE_BYTES)


def _replace_file(path: Path, values: Any) -> None:
    """Write `values` as JSON. A reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(values, file, separators=(",", ":"))
    temporary.replace(path)


def remove_stale_files() -> None:
    """Remove the files of processes that have ended."""
    for path in make_folder().glob("*-*.json"):
        number = path.stem.rpartition("-")[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


# ---------------------------------------------------------------- agent reports


def get_start_time(pid: int) -> int:
    """Return when a process started: in ticks of the kernel on Linux, in seconds elsewhere."""
    if not LINUX:
        return int(psutil.Process(pid).create_time())
    after_name = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(after_name[19]) if after_name else 0


def write_agent_report(report: AgentReport) -> None:
    """Publish the report of this process."""
    values = {"format": _REPORT_FORMAT}
    values |= {one.name: _cut_texts(getattr(report, one.name)) for one in fields(report)}
    _replace_file(make_folder() / f"agent-{report.pid}.json", values)


def _cut_texts(value: Any) -> Any:
    """Return `value` with all texts in it cut to the length that the reader accepts."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT_LENGTH else value[: _MAX_TEXT_LENGTH - 1] + "…"
    if isinstance(value, dict):
        return {_cut_texts(name): _cut_texts(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_cut_texts(item) for item in value]
    return value


def remove_agent_report(pid: int) -> None:
    """Remove the report of this process."""
    (make_folder() / f"agent-{pid}.json").unlink(missing_ok=True)


def read_agent_report(pid: int) -> AgentReport | None:
    """Return the report of a process.

    None if it is missing, of an earlier process with the same id, or open to other users. Raise WatchError if it
    cannot be understood.
    """
    try:
        user = psutil.Process(pid).uids().real if sys.platform != "win32" else 0
        started = get_start_time(pid)
    except psutil.Error:
        return None
    folder = _name_folder(user)
    content = _read_file(folder / f"agent-{pid}.json") if _is_private(folder, user) else None
    if content is None:
        return None
    try:
        report = _parse_agent_report(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WatchError(
            f"The report of the agent in process {pid} cannot be used, so buffers and steps are unknown. The process "
            "may use another version of holdall."
        ) from error
    return report if report.pid == pid and report.started == started else None


def _parse_agent_report(content: bytes) -> AgentReport:
    """Return a report with checked values. Raise an error of Python for a value that does not fit."""
    values = json.loads(content)
    if values.pop("format") != _REPORT_FORMAT:
        raise ValueError("format")
    hints = get_type_hints(AgentReport)
    report = AgentReport(**{name: _convert(value, hints[name]) for name, value in values.items()})
    for region in report.regions:
        if region.group not in GROUP_NAMES:
            raise ValueError(region.group)
    return report


def _convert(value: Any, kind: Any) -> Any:
    """Return `value` as an object of the annotated type `kind`. Raise ValueError or TypeError if it does not fit."""
    origin = get_origin(kind)
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if value is None else _convert(value, arguments[0])
    if origin is dict and isinstance(value, dict):
        return {_convert(name, str): _convert(item, arguments[1]) for name, item in value.items()}
    if isinstance(value, list) and len(value) <= _MAX_ITEMS:
        if origin is tuple and arguments[-1] is Ellipsis:
            return tuple(_convert(item, arguments[0]) for item in value)
        if origin is tuple:
            return tuple(_convert(item, one) for item, one in zip(value, arguments, strict=True))
        if issubclass(kind, tuple):
            hints = get_type_hints(kind)
            return kind(*(_convert(item, one) for item, one in zip(value, hints.values(), strict=True)))
    if kind is str and isinstance(value, str) and len(value) <= _MAX_TEXT_LENGTH:
        return replace_unprintable(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and type(value) is int and 0 <= value < 1 << 63:
        return value
    if kind is float and type(value) in {int, float} and math.isfinite(value):
        return float(value)
    raise ValueError(value)


def replace_unprintable(text: str) -> str:
    """Return `text` with `?` for control characters, because any process chooses its own names."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# ---------------------------------------------------------------- the latest reading


def write_latest(pid: int, values: dict[str, Any]) -> None:
    """Publish the latest reading and its verdicts for the watched process."""
    _replace_file(make_folder() / f"reading-{pid}.json", values)


def read_latest(pid: int) -> dict[str, Any] | None:
    """Return the latest published reading and its verdicts. None before the first reading."""
    content = _read_file(make_folder() / f"reading-{pid}.json")
    if content is None:
        return None
    values: dict[str, Any] = json.loads(content)
    return values

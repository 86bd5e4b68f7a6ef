"""Bench: which settings and which buffers are best on this machine, measured in fresh processes.

Memory that one measurement leaves behind cannot affect the next. A child prints one JSON object a line; the parent
reads them as they come. A child never outlives its reader, and its last error message is in the error that is raised.
settings.py says what is measured; run.py measures and ranks whole trainings, of which training.py is one; search.py
looks for the best settings. compare_buffers.py compares replay buffers alone; trace.py is the experience that they are
given. A measured process must load nothing that it does not use, so only what all of them share is here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from holdall.errors import HoldallError
from holdall.machine import begin_peak, held_bytes, peak_bytes, read_text
from holdall.threads import usable_cores

_CHANNEL: dict[str, TextIO] = {}

OnProgress = Callable[[str, float], None]
"""Gets what is being done, and how much of it is done: a share, or the seconds that it was expected to take."""
_DISTRIBUTIONS = ("holdall", "numpy", "torch", "stable-baselines3", "gymnasium")


class ChildError(HoldallError, RuntimeError):
    """A measurement in a process of its own did not end well."""


def emit(message: Mapping[str, Any]) -> None:
    """Write one JSON line and push it out at once: the parent's progress bar waits for it.

    Libraries print greetings on stdout; from the first line on, whatever else is printed goes to stderr.
    """
    if not _CHANNEL:
        sys.stdout.flush()
        _CHANNEL["lines"] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    print(json.dumps(message), file=_CHANNEL["lines"], flush=True)


def messages(command: list[str]) -> Generator[dict[str, Any], None, None]:
    """Yield the JSON lines that `command` prints; raise ChildError with its last error line if it fails."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8") as child,
    ):
        try:
            for line in child.stdout or ():
                yield json.loads(line)
        except BaseException:  # Ctrl-C, or nobody reads on: the child must not outlive its parent
            child.kill()
            raise
        if child.wait() != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["it printed nothing"])[-1]
            ended = f"was killed by signal {-child.returncode}" if child.returncode < 0 else "ended"
            msg = f"The process {ended} with exit code {child.returncode} ({last}); run `{shlex.join(command)}` alone."
            raise ChildError(msg)


def read_result(
    lines: Iterable[dict[str, Any]], on_message: Callable[[dict[str, Any]], None] = lambda _message: None
) -> dict[str, Any]:
    """Pass on what a child prints as it comes; return its result, which is the last line."""
    found: dict[str, Any] = {}
    for message in lines:
        found = message.get("result", found)
        on_message(message)
    return found


def module_command(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of holdall with this Python; -P: no module of the working directory."""
    return [sys.executable, "-P", "-m", f"holdall.{name}", *map(str, arguments)]


@dataclass(frozen=True, slots=True)
class Task:
    """What one process trains."""

    env_id: str
    algo: str
    buffer: str
    size: int  # capacity of a replay buffer, or steps of a rollout
    batch_size: int
    timesteps: int
    seed: int
    fills: bool
    features: str
    policy_kwargs: dict[str, Any]
    threads: int  # of torch; 0: as many as it takes by itself
    num_envs: int = 1


def run_task(task: Task) -> Generator[dict[str, Any], None, None]:
    """Run one training in a process of its own; yield its messages."""
    return messages(module_command("tools.bench.training", json.dumps(asdict(task))))


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measured_save(save: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """Save into an empty folder; return the seconds, the bytes, and the extra memory, None if it cannot be known."""
    before = held_bytes().resident
    has_peak = begin_peak()
    start = time.perf_counter()
    save(folder)
    seconds = time.perf_counter() - start
    extra = max(peak_bytes() - before, 0) if has_peak else None
    return {"seconds": seconds, "bytes": folder_bytes(folder), "extra": extra}


def header_of(form: str, *distributions: str) -> dict[str, Any]:
    """Return the first line of a file of results: its format, the command, the machine, and all versions."""
    measured_on = {"machine": machine(), "versions": versions(*distributions)}
    return {"kind": "header", "format": form, "command": sys.argv[1:], **measured_on}


def machine() -> dict[str, Any]:
    """Describe this machine, and how busy it is."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }


def versions(*more: str) -> dict[str, str | None]:
    """Return the versions of everything whose speed or memory is in the figures; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: version_of(name) for name in (*_DISTRIBUTIONS, *more)}


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    if not (text := read_text(Path("/proc/cpuinfo"))):
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown"
    )

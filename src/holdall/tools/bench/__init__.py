"""Bench: which settings and which buffers are best on this machine, measured in fresh processes.

Memory that one measurement still holds cannot affect the next one. A child prints one JSON object per line, and the
parent reads each one at once. A child never outlives its reader. The error about a failed child has its last message.

    settings          what is measured
    run               measures and ranks whole trainings
    training          one training, in a process of its own
    search            searches for the best settings
    compare_buffers   compares replay buffers alone
    trace             the experience that these buffers get

A measured process must load nothing that it does not use, so this module has only the functions that all of them share.
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
"""Gets the name of the current work, and its progress: a share, or seconds of the expected time."""
_DISTRIBUTIONS = ("holdall", "numpy", "torch", "stable-baselines3", "gymnasium")


class ChildError(HoldallError, RuntimeError):
    """A measurement in a process of its own failed."""


def emit(message: Mapping[str, Any]) -> None:
    """Write one JSON line and flush it, because the parent's progress bar waits for it.

    Libraries print greetings on stdout. After the first line, all other output goes to stderr.
    """
    if not _CHANNEL:
        sys.stdout.flush()
        _CHANNEL["lines"] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    print(json.dumps(message), file=_CHANNEL["lines"], flush=True)


def messages(command: list[str]) -> Generator[dict[str, Any], None, None]:
    """Yield the JSON lines that `command` prints. Raise ChildError with its last error line if it fails."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8") as child,
    ):
        try:
            for line in child.stdout or ():
                yield json.loads(line)
        except BaseException:  # After Ctrl-C, or if the reader stops, the child must not outlive its parent.
            child.kill()
            raise
        if child.wait() != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["it printed nothing"])[-1]
            ended = f"was killed by signal {-child.returncode}" if child.returncode < 0 else "ended"
            msg = f"The process {ended} with exit code {child.returncode} ({last}). Run `{shlex.join(command)}` alone."
            raise ChildError(msg)


def read_result(
    lines: Iterable[dict[str, Any]], on_message: Callable[[dict[str, Any]], None] = lambda _message: None
) -> dict[str, Any]:
    """Pass every message of a child to `on_message`. Return the result, which is the last message."""
    found: dict[str, Any] = {}
    for message in lines:
        found = message.get("result", found)
        on_message(message)
    return found


def module_command(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of holdall with this Python.

    With -P, modules of the working directory cannot replace others.
    """
    return [sys.executable, "-P", "-m", f"holdall.{name}", *map(str, arguments)]


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of the training of one process."""

    env_id: str
    algo: str
    buffer: str
    size: int  # Capacity of a replay buffer, or steps of a rollout.
    batch_size: int
    timesteps: int
    seed: int
    fills: bool
    features: str
    policy_kwargs: dict[str, Any]
    threads: int  # Threads of torch. 0: torch's default.
    num_envs: int = 1


def run_task(task: Task) -> Generator[dict[str, Any], None, None]:
    """Run one training in a process of its own. Yield its messages."""
    return messages(module_command("tools.bench.training", json.dumps(asdict(task))))


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measured_save(save: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """Save into an empty folder. Return the seconds, the bytes, and the extra memory, which is None if unknown."""
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
    """Return the versions of Python and of the measured packages. The version of a missing package is None."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: version_of(name) for name in (*_DISTRIBUTIONS, *more)}


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    text = read_text(Path("/proc/cpuinfo"))
    if not text:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown"
    )

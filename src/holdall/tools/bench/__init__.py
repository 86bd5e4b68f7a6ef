"""Bench: measure which settings and which buffers are best on this machine.

Every measurement runs in a process of its own, so the memory of one measurement cannot affect the next one. A child
process prints one JSON object per line, and the parent reads each line at once. A child never outlives its reader. The
error about a failed child has the child's last line.

    settings          settings of a bench, and the calibration of its profiles
    run               measures and ranks whole trainings
    training          one training, in a process of its own
    search            searches for the best settings
    compare_buffers   compares replay buffers alone
    buffer_libraries  the compared libraries
    trace             the recorded experience that the compared buffers get

A measured process must import only what it uses, so this module has only the functions that all of these modules share.
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

_channel: dict[str, TextIO] = {}
"""The stream of messages to the parent, as `lines`. Empty until the first message."""

OnProgress = Callable[[str, float], None]
"""Called with the name of the current work, and its progress: a share, or seconds of the expected time."""
_DISTRIBUTIONS = ("holdall", "numpy", "torch", "stable-baselines3", "gymnasium")
"""Packages whose versions every file of results has."""


class ChildError(HoldallError, RuntimeError):
    """A measurement in a process of its own failed."""


def emit(message: Mapping[str, Any]) -> None:
    """Write one JSON line and flush it, because the parent's progress bar waits for it.

    Libraries print greetings on stdout. After the first line, all other output goes to stderr.
    """
    if not _channel:
        sys.stdout.flush()
        _channel["lines"] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    print(json.dumps(message), file=_channel["lines"], flush=True)


def run_child(command: list[str]) -> Generator[dict[str, Any], None, None]:
    """Yield the JSON lines that `command` prints. Raise ChildError with its last error line if it fails."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8") as child,
    ):
        try:
            for line in child.stdout or ():
                yield json.loads(line)
        except BaseException:  # After Ctrl-C, or if the reader stops, the child must not outlive its parent.
            child.kill()
            raise
        if child.wait() != 0:
            errors.seek(0)
            last_line = (errors.read().strip().splitlines() or ["it printed nothing"])[-1]
            end = f"ended with exit code {child.returncode}"
            if child.returncode < 0:
                end = f"was killed by signal {-child.returncode}"
            raise ChildError(f"The process {end} ({last_line}). Run `{shlex.join(command)}` alone.")


def read_result(
    lines: Iterable[dict[str, Any]], on_message: Callable[[dict[str, Any]], None] = lambda _message: None
) -> dict[str, Any]:
    """Pass every message of a child to `on_message`. Return the result, which the last message has."""
    result: dict[str, Any] = {}
    for message in lines:
        result = message.get("result", result)
        on_message(message)
    return result


def make_module_command(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of holdall with this Python.

    Because of -P, modules of the working directory cannot replace other modules.
    """
    return [sys.executable, "-P", "-m", f"holdall.{name}", *map(str, arguments)]


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of one training."""

    env_id: str
    algo: str
    buffer: str
    size: int  # Capacity of a replay buffer, or steps of a rollout.
    batch_size: int
    timesteps: int
    seed: int
    fills: bool  # Whether random actions fill the buffer before training.
    features: str  # Class of the features extractor, as module:Class. Empty: the default of the algorithm.
    policy_kwargs: dict[str, Any]
    threads: int  # Threads of torch. 0: torch's default.
    num_envs: int = 1


def run_task(task: Task) -> Generator[dict[str, Any], None, None]:
    """Run one training in a process of its own. Yield its messages."""
    return run_child(make_module_command("tools.bench.training", json.dumps(asdict(task))))


def count_folder_bytes(folder: Path) -> int:
    """Add up the sizes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure_save(save: Callable[[Path], None], folder: Path) -> dict[str, Any]:
    """Save into an empty folder. Return the seconds, the bytes, and the extra memory, which is None if unknown."""
    before = held_bytes().resident
    has_peak = begin_peak()
    start = time.perf_counter()
    save(folder)
    seconds = time.perf_counter() - start
    extra = max(peak_bytes() - before, 0) if has_peak else None
    return {"seconds": seconds, "bytes": count_folder_bytes(folder), "extra": extra}


def make_header(form: str, *distributions: str) -> dict[str, Any]:
    """Return the first line of a file of results: its format, the command, the machine, and all versions."""
    measured_on = {"machine": machine(), "versions": versions(*distributions)}
    return {"kind": "header", "format": form, "command": sys.argv[1:], **measured_on}


def machine() -> dict[str, Any]:
    """Describe this machine and its load."""
    return {
        "processor": _find_processor(),
        "cores": usable_cores(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }


def versions(*more: str) -> dict[str, str | None]:
    """Return the versions of Python and of the measured packages. The version of a missing package is None."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: find_version(name) for name in (*_DISTRIBUTIONS, *more)}


def find_version(distribution: str) -> str | None:
    """Return the version of an installed distribution."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_processor() -> str:
    text = read_text(Path("/proc/cpuinfo"))
    if not text:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown"

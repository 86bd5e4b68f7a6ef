"""Bench: measure which settings and which buffers are best on this machine.

Every measurement runs in a process of its own, so the memory of one measurement cannot affect the next one.

    settings          settings of a bench, and the calibration of its profiles
    run               measures and ranks whole trainings
    task, training    one training: its settings and figures, and its process
    search            searches for the best settings
    compare_buffers   compares replay buffers alone
    measure_buffer    one buffer in its process
    buffer_libraries  the compared libraries
    trace             the recorded experience that the compared buffers get
    child             processes that measure, and their messages

A measured process must import only what it uses, so this module has only the functions that all of these modules share.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from holdall.machine import begin_peak, held_bytes, peak_bytes, read_text
from holdall.threads import usable_cores

OnProgress = Callable[[str, float], None]
"""Called with the name of the current work, and its progress: a share, or seconds of the expected time."""
_DISTRIBUTIONS = ("holdall", "numpy", "torch", "stable-baselines3", "gymnasium")
"""Packages whose versions every file of results has."""


@dataclass(frozen=True, slots=True)
class SaveFigures:
    """Figures of saving."""

    seconds: float
    nbytes: int
    extra_bytes: int | None
    """Memory that saving took for a while; None if it is unknown."""


def count_folder_bytes(folder: Path) -> int:
    """Add up the sizes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure_save(save: Callable[[Path], None], folder: Path) -> SaveFigures:
    """Save into an empty folder, and measure it."""
    before = held_bytes().resident
    has_peak = begin_peak()
    start = time.perf_counter()
    save(folder)
    seconds = time.perf_counter() - start
    extra = max(peak_bytes() - before, 0) if has_peak else None
    return SaveFigures(seconds, count_folder_bytes(folder), extra)


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

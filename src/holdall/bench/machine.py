"""Where a measurement was made: the machine, how busy it was, and the versions of what was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

_DISTRIBUTIONS = ("holdall", "numpy", "torch", "stable-baselines3", "gymnasium")


def machine() -> dict[str, Any]:
    """Describe this machine, and how busy it is."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
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
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")

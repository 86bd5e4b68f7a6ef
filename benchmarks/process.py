"""This process and this machine: where it runs, and lines to whoever started it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_DISTRIBUTIONS = ("holdall", "numpy", "torch", "stable-baselines3", "gymnasium", "ale-py", "opencv-python-headless")


def emit(message: dict[str, Any]) -> None:
    """Write one JSON line, at once: the parent's progress bar waits for it."""
    print(json.dumps(message), flush=True)


def machine() -> dict[str, Any]:
    """Describe where this runs, and how busy it is."""
    return {
        "processor": _first_match("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_kib": int((_first_match("/proc/meminfo", "MemTotal") or "0 kB").split()[0]),
        "system": platform.platform(),
        "huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load_average": list(os.getloadavg()),
    }


def versions(*others: str) -> dict[str, str | None]:
    """Return the versions of everything whose speed or memory is in the figures."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in (*_DISTRIBUTIONS, *others):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """Return the commit that is measured, marked if files differ from it; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _first_match(path: str, name: str) -> str | None:
    for line in _text(path).splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

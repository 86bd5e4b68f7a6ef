"""Descriptions of the commit, the versions and the machine of a run, and messages to the parent process."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from holdall.tools import bench

_HERE = Path(__file__).parent


def emit(message: dict[str, Any]) -> None:
    """Print `message` as one JSON line, unbuffered, for the parent process."""
    print(json.dumps(message), flush=True)


def machine() -> dict[str, Any]:
    """Describe the machine, and how busy it is."""
    return bench.machine() | {"huge_pages": _text("/sys/kernel/mm/transparent_hugepage/enabled")}


def versions(*others: str) -> dict[str, str | None]:
    """Return the versions of all packages whose speed or memory is part of the figures."""
    return bench.versions("ale-py", "opencv-python-headless", *others)


def commit() -> str | None:
    """Return the commit that is measured, marked if its code differs, or None outside a repository.

    Results of earlier runs do not count as a difference.
    """
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_HERE, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""

"""A story is told in a process of its own: much of a cluster's environment is read when Ray is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..nodes import settings

ROOT = Path(__file__).parents[3]
STORIES = ("lost", "frozen", "cut")


def told(story: str) -> dict[str, Any]:
    """Play a story, see story.py, and return how long it took. Raise RuntimeError if it does not end well."""
    with tempfile.TemporaryDirectory(prefix="hr", dir="/tmp") as folder:  # names of sockets must be short
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        played = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.shards.chaos.story", story],
            cwd=ROOT,
            env=os.environ | settings(Path(folder)) | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=360,
            check=False,
        )
    if played.returncode:
        raise RuntimeError(f"{story}: {played.stderr[-4_000:]}")
    found: dict[str, Any] = json.loads(played.stdout.splitlines()[-1])
    return found

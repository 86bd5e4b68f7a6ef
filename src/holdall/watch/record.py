"""A recorded run: one JSON object a line, which `holdall report` turns into a page. The format is in docs/watch.md.

In:  readings and verdicts as they come.  Out: a file to which only whole lines are added.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdall.errors import WatchError
from holdall.machine import Limit, memory_limits
from holdall.watch.turn import Turn

FORMAT = "holdall-watch-1"


def header(pid: int, command: Sequence[str], interval_s: float, gpu_limit: int | None = None) -> dict[str, Any]:
    """Return the first line of a record."""
    limits = memory_limits(process=pid)
    groups = [limit.total_bytes for limit in limits if limit.name.startswith("control group")]
    machine = next((limit for limit in limits if limit.name.startswith("free memory")), Limit("", 0, 0))
    return {
        "kind": "header",
        "format": FORMAT,
        "pid": pid,
        "command": list(command),
        "host": socket.gethostname(),
        "started": time.time(),
        "interval": interval_s,
        "limits": {
            "memory": machine.total_bytes, "cgroup": min(groups, default=None), "vram": gpu_limit, "disk": None,
        },
        "system": platform.system(),
    }  # fmt: skip


class Recorder:
    """Writes a record."""

    def __init__(self, path: Path, first: dict[str, Any]) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise WatchError(f"--record ({path}) cannot be written ({error.strerror}); name another file") from error
        self._write([first])

    def show(self, turn: Turn) -> None:
        """Add a turn."""
        self._write(turn.lines())

    def close(self) -> None:
        """End the file."""
        self._file.close()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        self._file.write("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
        self._file.flush()

"""Measurements in processes of their own: what one leaves behind cannot weigh on the next.

In:  a command that prints one JSON object a line.  Out: those objects, as they come.
Invariant: a child never outlives whoever reads it, and what it complained of is in the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from typing import Any, TextIO

from holdall.errors import HoldallError


class ChildError(HoldallError, RuntimeError):
    """A measurement in a process of its own did not end well."""


_CHANNEL: dict[str, TextIO] = {}


def emit(message: Mapping[str, Any]) -> None:
    """Write one JSON line and push it out at once: the parent's progress bar waits for it.

    Libraries greet on stdout, too; from the first line on, whatever else is printed goes to stderr.
    """
    if not _CHANNEL:
        sys.stdout.flush()
        _CHANNEL["lines"] = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    print(json.dumps(message), file=_CHANNEL["lines"], flush=True)


def messages(command: list[str], environment: Mapping[str, str] | None = None) -> Generator[dict[str, Any], None, None]:
    """Yield the JSON lines that `command` prints; raise what it complained of if it fails."""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=complaints, text=True, encoding="utf-8", env=environment
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                yield json.loads(line)
        except BaseException:  # Ctrl-C, or nobody reads on: the child must not outlive its parent
            child.kill()
            raise
        if child.wait() != 0:
            complaints.seek(0)
            last = (complaints.read().strip().splitlines() or ["it said nothing"])[-1]
            ended = f"was killed by signal {-child.returncode}" if child.returncode < 0 else "ended"
            msg = f"The process {ended} with exit code {child.returncode} ({last}); run `{' '.join(command)}` alone."
            raise ChildError(msg)


def module(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module of holdall with this Python."""
    return [sys.executable, "-m", f"holdall.{name}", *map(str, arguments)]

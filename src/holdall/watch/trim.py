"""Trimming: free memory that the C library keeps goes back to the system.

In:  a process, this one or one with an agent.  Out: what a trim would return at most, and what it did.
Only a process itself can trim its heap: another one is asked through the private folder, and answers there.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from holdall.errors import WatchError
from holdall.machine import held_bytes
from holdall.watch.allocators import give_back, heap
from holdall.watch.places import folders_of, own_folder, read_small, replace
from holdall.watch.sidecar import told_by

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Trimmed:
    """What came of a trim."""

    free: int  # in the C library's lists before, pages long given back among them
    before: int  # unique set size
    after: int

    @property
    def returned(self) -> int:
        """Bytes that went back to the system."""
        return self.before - self.after


def trim_self() -> Trimmed:
    """Trim this process."""
    found = heap()
    before = held_bytes().unique
    if not give_back():
        raise WatchError("this system's C library has no malloc_trim; nothing was done")
    return Trimmed(0 if found is None else found.free, before, held_bytes().unique)


def trim(pid: int) -> Trimmed:
    """Have a process trim itself."""
    if pid == os.getpid():
        return trim_self()
    folders = folders_of(pid)
    if told_by(pid) is None or not folders:
        raise WatchError(
            f"pid ({pid}) has no agent, and only a process itself can trim its heap; call holdall.watch.start() or "
            "use holdall.sb3.WatchCallback in it, or start it with 'holdall watch -- ...'"
        )
    for folder in folders:
        _answer(folder, pid).unlink(missing_ok=True)
        replace(_request(folder, pid), b"{}")
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        for folder in folders:
            if (content := read_small(_answer(folder, pid))) is not None:
                return Trimmed(**{name: int(value) for name, value in json.loads(content).items()})
        time.sleep(0.05)
    raise WatchError(f"pid ({pid}) did not answer within {_PATIENCE_S:.0f} s; is it stopped, or in one long call?")


def answer_request() -> None:
    """Trim this process if somebody asked for it; called by its agent."""
    folder = own_folder()
    request = _request(folder, os.getpid())
    if not request.exists():
        return
    request.unlink(missing_ok=True)
    done = trim_self()
    words = {"free": done.free, "before": done.before, "after": done.after}
    replace(_answer(folder, os.getpid()), json.dumps(words).encode())


def _request(folder: Path, pid: int) -> Path:
    return folder / f"trim-{pid}.json"


def _answer(folder: Path, pid: int) -> Path:
    return folder / f"trimmed-{pid}.json"

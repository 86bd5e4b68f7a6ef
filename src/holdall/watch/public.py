"""The watch of this process: started, told of arrays, asked for readings.

In:  what to call arrays, and what to do when memory runs short.  Out: readings and verdicts of this very process, made
in another one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import holdall
from holdall.errors import ArgumentError
from holdall.units import parse_bytes
from holdall.watch.agent import Agent, agent
from holdall.watch.guard import Guard, OnPressure
from holdall.watch.named import Fill
from holdall.watch.newest import newest
from holdall.watch.reading import Reading
from holdall.watch.verdicts import Verdict


def track(name: str, array: Any, fill: Fill | None = None) -> None:
    """Give an array or a tensor a name under which every watch shows it.

    Args:
        name: `features`, or `expert.actions` for a part of something.
        array: Kept track of for as long as it lives; it is not kept alive. A torch module or an optimizer may be given,
            too: what it holds is shown as parameters, gradients and optimizer state, of all that were given together.
        fill: Returns how full it is, of 1; without it, growth of what was touched counts as a leak.
    """
    if not 1 <= len(name) <= 100:
        raise ArgumentError(f"name ({name!r}) must be a text of 1 to 100 letters")
    if hasattr(array, "param_groups") or (hasattr(array, "parameters") and hasattr(array, "modules")):
        agent().follow_network(array)
        return
    if not hasattr(array, "__array_interface__") and not hasattr(array, "untyped_storage"):
        raise ArgumentError(f"array ({type(array).__name__}) is neither a NumPy array nor a tensor; pass one of these")
    agent().track(name, array, fill)


def start(
    *,
    interval_s: float = 2.0,
    record: str | os.PathLike[str] | None = None,
    prometheus: int | None = None,
    limit: str | int | None = None,
    on_pressure: OnPressure = "warn",
    pressure_at: float = 0.9,
    checkpoint: Callable[[], Any] | None = None,
) -> Watch:
    """Watch this process from a small one beside it, until it ends or `stop` is called.

    Args:
        interval_s: Seconds between two readings.
        record: A file for `holdall report`.
        prometheus: A port of the loopback on which the newest reading is served.
        limit: Memory that this process and its workers may use, beside the system's own limits: "8GiB" or bytes.
        on_pressure: What is done when memory runs short: "warn" logs it; "spill" has holdall's memories compress more
            and move more to their `spill_dir`; "checkpoint" calls `checkpoint`.
        pressure_at: Share of a limit from which on memory is short.
        checkpoint: Saves what is worth saving; called in a thread of its own, once each time memory runs short.
    """
    if not interval_s >= 0.1:
        raise ArgumentError(f"interval_s ({interval_s}) must be at least 0.1; a reading takes some of that itself")
    limit_bytes = None if limit is None else parse_bytes(limit, "limit")
    own = agent()
    guard = Guard(own, on_pressure, pressure_at, limit_bytes, checkpoint)
    return Watch(own, guard, interval_s, record, prometheus, limit_bytes)


class Watch:
    """A watch of this process under way; also a context manager."""

    def __init__(
        self,
        own: Agent,
        guard: Guard,
        interval_s: float,
        record: str | os.PathLike[str] | None,
        prometheus: int | None,
        limit_bytes: int | None,
    ) -> None:
        self.agent, self._guard = own, guard
        own.publish()
        command = [sys.executable, "-m", "holdall.watch.beside", str(os.getpid()), "--interval", str(interval_s)]
        for name, value in (("--record", record), ("--prometheus", prometheus), ("--limit", limit_bytes)):
            if value is not None:
                command += [name, os.fspath(value) if name == "--record" else str(value)]  # type: ignore[arg-type]  # so
        # The package may have been found in a way that another Python does not know of.
        home = str(Path(holdall.__file__).parent.parent)
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._beside = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the training
        )
        self._end = weakref.finalize(self, _end, self._beside)

    @property
    def pid(self) -> int:
        """The process beside this one that reads it."""
        return self._beside.pid

    def reading(self) -> Reading | None:
        """Return the newest reading; None before the first."""
        found = newest(os.getpid())
        return None if found is None else found[0]

    def verdicts(self) -> list[Verdict]:
        """Return what the newest readings mean."""
        found = newest(os.getpid())
        return [] if found is None else found[1]

    def stop(self) -> None:
        """End the watcher and the guard; names stay known."""
        self._guard.stop()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _end(beside: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        beside.terminate()
    beside.wait()

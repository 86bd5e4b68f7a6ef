"""Watch the memory of a training from inside with `start`, and name its large objects with `track`.

`holdall watch -- command` starts and watches a training whose code is not changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import holdall
from holdall.errors import ArgumentError
from holdall.tools.watch import exchange
from holdall.tools.watch.agent import FillFunction, get_agent
from holdall.tools.watch.guard import MemoryGuard, OnPressure
from holdall.tools.watch.reading import MemoryReading
from holdall.tools.watch.verdicts import WatchVerdict
from holdall.units import parse_bytes

__all__ = ["Watch", "start", "track"]


def track(name: str, array: Any, fill: FillFunction | None = None) -> None:
    """Give an array or a tensor a name under which every watch shows it.

    Args:
        name: `features`, or `expert.actions` for a part of something.
        array: An array or a tensor. It is followed for as long as it exists, and is not kept alive. A torch module or
            an optimizer is shown as parameters, gradients and optimizer state.
        fill: Function that returns which fraction of the array is filled, from 0 to 1. Without it, growth of the part
            that was written to counts as a leak.

    Examples:
        >>> from holdall import watch
        >>> features = np.zeros(1_000)
        >>> watch.track("features", features)
    """
    if not 1 <= len(name) <= 100:
        raise ArgumentError(f"name ({name!r}) must be a text of 1 to 100 letters.")
    if hasattr(array, "param_groups") or (hasattr(array, "parameters") and hasattr(array, "modules")):
        get_agent().follow_network(array)
        return
    if not hasattr(array, "__array_interface__") and not hasattr(array, "untyped_storage"):
        raise ArgumentError(f"array ({type(array).__name__}) is neither a NumPy array nor a tensor. Pass one of these.")
    get_agent().track(name, array, fill)


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
    """Watch this process from a small second process, until this process ends or `stop` is called.

    Args:
        interval_s: Seconds between two readings.
        record: A file for `holdall report`.
        prometheus: Port on 127.0.0.1 at which the newest reading is served. Needs `holdall[prometheus]`.
        limit: Memory that this process and its workers may use, besides the system's own limits: "8GiB" or bytes.
        on_pressure: What to do when memory runs short: "warn" logs it; "spill" makes holdall's memories compress more
            and move more to their `spill_dir`; "checkpoint" calls `checkpoint`. Of several watches with "spill",
            memories ask only the newest one whether to wait.
        pressure_at: Share of a limit from which on memory is short.
        checkpoint: Function that saves. It is called in a thread of its own, once each time memory runs short.

    Examples:
        >>> from holdall import watch
        >>> with watch.start(interval_s=0.5) as watched:
        ...     reading = watched.reading()  # None before the first one
    """
    if not interval_s >= 0.1:
        raise ArgumentError(f"interval_s ({interval_s}) must be at least 0.1, because a reading itself takes time.")
    limit_bytes = None if limit is None else parse_bytes(limit, "limit")
    guard = MemoryGuard(get_agent(), on_pressure, pressure_at, limit_bytes, checkpoint)
    options = {
        "interval_s": interval_s,
        "record": None if record is None else os.fspath(record),
        "prometheus": prometheus,
        "limit_bytes": limit_bytes,
    }
    return Watch(guard, options)


class Watch:
    """A watch of this process, and a context manager. `holdall.watch.start` makes it."""

    def __init__(self, guard: MemoryGuard, options: dict[str, Any]) -> None:
        self.agent = get_agent()
        self._guard = guard
        self.agent.publish()
        command = [sys.executable, "-P", "-m", "holdall.tools.watch.watcher", str(os.getpid()), json.dumps(options)]
        # holdall may be in a folder of sys.path that a new Python process does not search.
        package_folder = str(Path(holdall.__file__).parent.parent)
        python_path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
        self._watcher = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": python_path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # An interrupt at the terminal is for the training.
        )
        self.pid = self._watcher.pid  # Id of the watcher's process.
        self._end_watcher = weakref.finalize(self, _end_watcher, self._watcher)

    def reading(self) -> MemoryReading | None:
        """Return the newest reading. None before the first one."""
        latest = exchange.read_latest(os.getpid())
        return None if latest is None else MemoryReading.from_dict(latest["reading"])

    def verdicts(self) -> list[WatchVerdict]:
        """Return the verdicts on the newest readings."""
        latest = exchange.read_latest(os.getpid())
        if latest is None:
            return []
        names = WatchVerdict.__slots__
        return [WatchVerdict(**{name: verdict[name] for name in names}) for verdict in latest["verdicts"]]

    def stop(self) -> None:
        """End the watcher and the guard. A later watch still shows the names that `track` gave."""
        self._guard.stop()
        self._end_watcher()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end_watcher(watcher: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        watcher.terminate()
    watcher.wait()

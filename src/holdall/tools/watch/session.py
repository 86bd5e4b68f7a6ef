"""How a watch starts: `start()` in the training process itself, or `holdall watch -- command` around it.

In:  names for arrays, a limit, a command line.  Out: a watcher process, or a running command with an agent in it.
A launched Python finds `startup/sitecustomize.py` on its path. That module starts the agent, which follows every model
of Stable-Baselines3, and then runs the user's own sitecustomize. The training itself is not changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import holdall
from holdall.errors import ArgumentError
from holdall.tools.watch.agent import Agent, FillFunction, agent
from holdall.tools.watch.guard import MemoryGuard, OnPressure
from holdall.tools.watch.process_watcher import latest_reading
from holdall.tools.watch.reading import MemoryReading
from holdall.tools.watch.verdicts import WatchVerdict
from holdall.units import parse_bytes

_STARTUP_FOLDER = Path(__file__).parent / "startup"
WATCHED_VARIABLE = "HOLDALL_WATCHED"
_PASSED_ON = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_MODEL_MODULE = "stable_baselines3.common.base_class"


def track(name: str, array: Any, fill: FillFunction | None = None) -> None:
    """Give an array or a tensor a name under which every watch shows it.

    Args:
        name: `features`, or `expert.actions` for a part of something.
        array: Kept track of for as long as it lives; it is not kept alive. A torch module or an optimizer may be given,
            too: what it holds is shown as parameters, gradients and optimizer state, of all that were given together.
        fill: Returns how full it is, from 0 to 1; without it, growth of what was touched counts as a leak.
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
    """Watch this process from a small second one, until it ends or `stop` is called.

    Args:
        interval_s: Seconds between two readings.
        record: A file for `holdall report`.
        prometheus: A port of the loopback on which the newest reading is served.
        limit: Memory that this process and its workers may use, besides the system's own limits: "8GiB" or bytes.
        on_pressure: What to do when memory runs short: "warn" logs it; "spill" makes holdall's memories compress more
            and move more to their `spill_dir`; "checkpoint" calls `checkpoint`.
        pressure_at: Share of a limit from which on memory is short.
        checkpoint: A function that saves; called in a thread of its own, once each time memory runs short.
    """
    if not interval_s >= 0.1:
        raise ArgumentError(f"interval_s ({interval_s}) must be at least 0.1; a reading takes some of that itself")
    limit_bytes = None if limit is None else parse_bytes(limit, "limit")
    own = agent()
    guard = MemoryGuard(own, on_pressure, pressure_at, limit_bytes, checkpoint)
    path = None if record is None else os.fspath(record)
    options = {"interval_s": interval_s, "record": path, "prometheus": prometheus, "limit_bytes": limit_bytes}
    return Watch(own, guard, options)


class Watch:
    """A watch of this process under way; also a context manager.

    Args:
        options: Those of the watcher process.
    """

    def __init__(self, own: Agent, guard: MemoryGuard, options: Mapping[str, Any]) -> None:
        self.agent, self._guard = own, guard
        own.publish()
        module, pid = "holdall.tools.watch.watcher_process", str(os.getpid())
        command = [sys.executable, "-m", module, pid, json.dumps(dict(options))]
        # The package may have been found in a way that another Python does not know.
        home = str(Path(holdall.__file__).parent.parent)
        search = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._watcher = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": search},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt at the terminal is for the training
        )
        self.pid = self._watcher.pid  # of the watcher process
        self._end = weakref.finalize(self, _end_watcher_process, self._watcher)

    def reading(self) -> MemoryReading | None:
        """Return the newest reading; None before the first."""
        found = latest_reading(os.getpid())
        return None if found is None else found[0]

    def verdicts(self) -> list[WatchVerdict]:
        """Return the verdicts on the newest readings."""
        found = latest_reading(os.getpid())
        return [] if found is None else found[1]

    def stop(self) -> None:
        """End the watcher and the guard; names stay known."""
        self._guard.stop()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end_watcher_process(watcher: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        watcher.terminate()
    watcher.wait()


class LaunchedCommand:
    """A command under way.

    Args:
        captured: Whether its output is passed on line by line, so that a live view can stay below it.
    """

    def __init__(self, command: Sequence[str], *, captured: bool = False) -> None:
        if not command or shutil.which(command[0]) is None:
            raise ArgumentError(f"command ({' '.join(command)}) is neither a process id nor a program; see --help")
        search = os.pathsep.join(filter(None, [str(_STARTUP_FOLDER), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {WATCHED_VARIABLE: "1", "PYTHONPATH": search}
        environment |= {"PYTHONUNBUFFERED": "1"} if captured else {}
        out, errors = (subprocess.PIPE, subprocess.STDOUT) if captured else (None, None)
        self._process = subprocess.Popen(list(command), env=environment, stdout=out, stderr=errors)
        self.pid = self._process.pid
        for number in _PASSED_ON:  # who ends the watch wants the command to end
            signal.signal(number, lambda number, _: self._process.send_signal(number))
        self._relay: threading.Thread | None = None
        if captured:
            self._relay = threading.Thread(target=self._pass_on, name="holdall-output", daemon=True)
            self._relay.start()

    def ended_within(self, seconds: float) -> bool:
        """Wait at most so long; return whether it ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> int:
        """Wait for its end, and return its exit code as a shell would."""
        while True:
            try:
                code = self._process.wait()
                break
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
        if self._relay is not None:
            self._relay.join()
        return code if code >= 0 else 128 - code

    def _pass_on(self) -> None:
        stream = self._process.stdout
        for line in iter(stream.readline, b"") if stream is not None else ():
            with contextlib.suppress(OSError):  # nobody reads any more; the command goes on
                sys.stdout.write(line.decode("utf-8", "replace"))


def start_agent_in_command() -> None:
    """Start the agent in a launched Python; follow models as soon as Stable-Baselines3 is imported."""
    agent()
    if _MODEL_MODULE in sys.modules:
        follow_models(sys.modules[_MODEL_MODULE])
    else:
        sys.meta_path.insert(0, _ModelImportFinder())


def follow_models(module: Any) -> None:
    """Follow every model that is made from now on."""
    kind = module.BaseAlgorithm
    made: Callable[..., None] = kind.__init__

    @functools.wraps(made)
    def make(model: Any, *arguments: Any, **named: Any) -> None:
        made(model, *arguments, **named)
        agent().follow_model(model)

    kind.__init__ = make


class _ModelImportFinder(importlib.abc.MetaPathFinder):
    """Comes before the other finders until the module is imported, then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODEL_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_follow(module: ModuleType) -> None:
                load(module)
                follow_models(module)

            spec.loader.exec_module = load_and_follow  # type: ignore[method-assign]  # of this one loader
        return spec

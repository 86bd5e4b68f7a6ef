"""Watch a training from inside with `start()`, and name its large objects with `track(...)`.

`holdall watch -- command` starts a training and watches it.

In:  names for arrays, a limit, a command line.  Out: a watcher process, or a running command with an agent in it.
A launched Python finds `startup/sitecustomize.py` on its path. That module starts the agent, which follows every model
of Stable-Baselines3, and then runs the user's own sitecustomize. The training itself is not changed.

The guard is what a process does before its memory runs out. It checks the limits that the process is under every half
second, and more often as one comes near; it warns, makes memories spill, or takes a checkpoint. A thread may come too
late on a busy machine. Therefore a memory that grows asks the guard itself, in the thread that adds, as often as its
growth may bring a limit near; and if one is near, `add` waits until the memory has spilled.
Invariant: the guard acts while some memory is left, and it never raises: training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, Self

import holdall
from holdall import report as tracked
from holdall.errors import ArgumentError, ClosedError
from holdall.machine import Limit, held_bytes, memory_limits
from holdall.tools.watch.agent import Agent, FillFunction, agent
from holdall.tools.watch.process_watcher import latest_reading, stalled_percent
from holdall.tools.watch.reading import MemoryReading, return_free_heap
from holdall.tools.watch.verdicts import WatchVerdict
from holdall.units import format_bytes, parse_bytes

__all__ = ["Watch", "start", "track"]

_STARTUP_FOLDER = Path(__file__).parent / "tools" / "watch" / "startup"
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
        command = [sys.executable, "-P", "-m", module, pid, json.dumps(dict(options))]
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


OnPressure = Literal["warn", "spill", "checkpoint"]
PRESSURE_ACTIONS = ("warn", "spill", "checkpoint")

_LOOKS_UNTIL_NEAR = 8
"""A memory asks again after it took this part of what was left until a limit is near."""
_EXTRA_SHARE_TO_FREE = 0.05
"""Share of the limit that is freed beyond what is needed, so that the next check finds something left."""
_STALLED_PERCENT = 40.0
"""Per cent of the time that processes wait for memory: as bad as having none."""
_PAUSE_AFTER_ACTION_S = 1.0
_PAUSE_AFTER_WORDS_S = 10.0  # a memory that fills faster than it spills is short again and again
"""Time after an action in which it takes effect."""

_LOG = logging.getLogger("holdall")
_LOOKAHEAD_S = 1.0
"""A limit that will be near after this time, at the present rate, is near."""
_LONGEST_PAUSE_S = 0.5
_SHORTEST_PAUSE_S = 0.02
_POSSIBLE_BURST_BYTES_PER_S = 512.0 * 2**20
"""Bytes a second that a quiet process may start to take before the next check."""


class MemoryGuard:
    """Looks at the limits, and acts when one comes near.

    Args:
        act: What to do.
        at: Share of a limit from which on it is near.
        limit_bytes: A limit of the user's own, over this process alone.
        checkpoint: Saves what is worth saving; for `act="checkpoint"`, called once each time memory runs short.
    """

    def __init__(
        self,
        agent: Agent,
        act: OnPressure,
        at: float = 0.9,
        limit_bytes: int | None = None,
        checkpoint: Callable[[], Any] | None = None,
    ) -> None:
        if act not in PRESSURE_ACTIONS:
            raise ArgumentError(
                f"on_pressure ({act!r}) must be one of {', '.join(PRESSURE_ACTIONS)}; pass one of these"
            )
        if not 0.1 <= at <= 0.99:
            raise ArgumentError(f"pressure_at ({at}) must be a share of the limit, from 0.1 to 0.99")
        if act == "checkpoint" and checkpoint is None:
            raise ArgumentError("on_pressure is 'checkpoint', but checkpoint is None; pass a function that saves")
        self._agent, self._act = agent, act
        self._limit_bytes, self._checkpoint = limit_bytes, checkpoint
        self._is_near = False
        self._rests_until = self._silent_until = 0.0
        self._approach = LimitTracker(at)
        self._pid = os.getpid()
        self._checking = threading.Lock()
        self._unseen_bytes = 0.0  # that memories may still take before they ask again
        self._pause_s = 0.0
        self._plan_next_look(self._approach.follow(self._limits(), time.monotonic()))
        self._ended = threading.Event()
        tracked.GROWTH_CHECKS.append(self.is_short)
        self._thread = threading.Thread(target=self._run, name="holdall-guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the guard."""
        self._ended.set()
        with contextlib.suppress(ValueError):  # it was stopped before
            tracked.GROWTH_CHECKS.remove(self.is_short)

    def is_short(self, grown: int) -> bool:
        """Return whether memory is short, after one that spills took so much more; asked by the thread that adds."""
        self._unseen_bytes -= grown
        if self._unseen_bytes > 0 or self._act != "spill" or os.getpid() != self._pid:  # a fork has no guard
            return False
        return self._check_or_stop(rests=False)

    def check(self, *, rests: bool = True) -> bool:
        """Check the limits once; return whether one was near and the guard acted.

        Args:
            rests: Whether what was done within the last second is given time to take effect.
        """
        with self._checking:
            now = time.monotonic()
            known = self._approach.follow(self._limits(), now)
            near = nearest_of(known)
            self._plan_next_look(known)
            if rests and now < self._rests_until:
                return False
            if not near.is_near and (stalled_percent() or 0.0) < _STALLED_PERCENT:
                self._is_near = False
                return False
            room = _EXTRA_SHARE_TO_FREE * near.limit.total_bytes
            self._do(near, int(max(room - near.spare_bytes, room) + near.soon_bytes), now)
            self._is_near, self._rests_until = True, now + _PAUSE_AFTER_ACTION_S
            return True

    def _plan_next_look(self, known: list[ApproachedLimit]) -> None:
        """Look again before any limit can be near: the one that is near first may not be the one with least left."""
        self._pause_s = min(one.pause_s for one in known)
        self._unseen_bytes = min(one.spare_bytes for one in known) / _LOOKS_UNTIL_NEAR

    def _limits(self) -> list[Limit]:
        limits = memory_limits()
        if self._limit_bytes is not None:
            left = max(self._limit_bytes - held_bytes().proportional, 0)
            limits.append(Limit("limit", left, self._limit_bytes))
        return limits

    def _do(self, near: ApproachedLimit, wanted: int, now: float) -> None:
        left, total = format_bytes(near.limit.free_bytes), format_bytes(near.limit.total_bytes)
        text = f"memory is short: {left} left of {total} ({near.limit.name})"
        if near.spare_bytes > 0:  # it does not look short yet
            text += f", and {format_bytes(int(near.bytes_per_second))} more is taken every second"
        if self._act == "spill":
            done = self._relieve(wanted)
            return_free_heap()
            text += f"; {done}"
        elif self._act == "checkpoint" and not self._is_near and self._checkpoint is not None:
            self._checkpoint()
            text += "; a checkpoint is being taken"
        if now >= self._silent_until and (self._act == "spill" or not self._is_near):
            self._silent_until = now + (_PAUSE_AFTER_WORDS_S if self._act == "spill" else _PAUSE_AFTER_ACTION_S)
            _LOG.warning("%s", text)
            self._agent.add_event(text)

    def _relieve(self, wanted: int) -> str:
        """Ask every memory to free a share of `wanted` bytes in proportion to its size."""
        sizes: dict[Any, int] = {}
        for memory in list(tracked.LIVING):
            if hasattr(memory, "relieve"):
                with contextlib.suppress(ClosedError):
                    sizes[memory] = memory.report().total_bytes
        total = max(sum(sizes.values()), 1)
        for memory, size in sizes.items():
            with contextlib.suppress(ClosedError):
                memory.relieve(-(-wanted * size // total))
        if not sizes:
            return "no memory of holdall can give some back"
        return f"holdall's memories must hold {format_bytes(wanted)} less"

    def _run(self) -> None:
        while not self._ended.wait(self._pause_s):
            self._check_or_stop()

    def _check_or_stop(self, *, rests: bool = True) -> bool:
        try:
            return self.check(rests=rests)
        except Exception:  # a guard that fails must not end the training
            _LOG.exception("the memory guard failed; training goes on without it")
            self.stop()
            return False


class ApproachedLimit(NamedTuple):
    """A limit, and how near it is."""

    limit: Limit
    spare_bytes: float  # until it is near; below 0: it is
    bytes_per_second: float  # by which use grows

    @property
    def is_near(self) -> bool:
        """Whether it is near, or will be in a second."""
        return self.spare_bytes <= self.soon_bytes

    @property
    def pause_s(self) -> float:
        """Seconds until the next check."""
        pause = self.spare_bytes / (4.0 * self.bytes_per_second + _POSSIBLE_BURST_BYTES_PER_S)
        return min(max(pause, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)

    @property
    def soon_bytes(self) -> float:
        """Bytes that will be taken within the next second."""
        return self.bytes_per_second * _LOOKAHEAD_S


def nearest_of(known: Iterable[ApproachedLimit]) -> ApproachedLimit:
    """Return the limit that is near first, as a share of its size."""
    return min(known, key=lambda near: (near.spare_bytes - near.soon_bytes) / max(near.limit.total_bytes, 1))


class LimitTracker:
    """Follows how fast memory is taken. A rising rate counts at once, a falling one slowly.

    Args:
        at: Share of a limit from which on it is near.
    """

    def __init__(self, at: float) -> None:
        self._at = at
        self._before: dict[str, tuple[float, int, float]] = {}  # when, how much was left, bytes a second

    def follow(self, limits: Iterable[Limit], now: float) -> list[ApproachedLimit]:
        """Return all limits, with what is left of each and how fast it goes."""
        share = 1.0 - self._at
        return [
            ApproachedLimit(limit, limit.free_bytes - share * limit.total_bytes, self._rate(limit, now))
            for limit in limits
        ]

    def _rate(self, limit: Limit, now: float) -> float:
        moment, left, before = self._before.setdefault(limit.name, (now, limit.free_bytes, 0.0))
        if now - moment < _SHORTEST_PAUSE_S:  # a page that was taken in a microsecond would be gigabytes a second
            return before
        rate = max((left - limit.free_bytes) / (now - moment), 0.0)
        rate = max(rate, 0.5 * (before + rate))
        self._before[limit.name] = (now, limit.free_bytes, rate)
        return rate

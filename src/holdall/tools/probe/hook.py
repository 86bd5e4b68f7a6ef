"""The hook inside a probed command: it installs the triggers, and writes the report when one of them is reached.

Every Python of the command's process tree runs `install`. Each process that reaches a trigger, fails or is asked by
holdall's process writes one file, `report-PID.json`, into the folder that HOLDALL_PROBE_DIR names. A process that has
reached a trigger then waits until holdall's process ends it.

This module imports only the standard library.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from .import_hook import AfterImport, call_after_import
from .measurement import (
    MAX_COPIED_BYTES,
    MAX_STEPS,
    Step,
    copy_step,
    count_step_bytes,
    measure_model,
    measure_steps,
    read_status,
)
from .snapshot import Snapshot
from .triggers import TRIGGERS, Trigger

_POLL_S = 0.1
_MAX_STEPPING_S = 20.0
"""Seconds of environment steps after which the command is stopped if no other trigger recognises its loop."""
_READ_EVERY = 16
"""Steps between two readings of the resident set. Environment steps count until the first step is added."""
_WORKER_CODE = re.compile(r"from multiprocessing\.\w+ import (main|spawn_main)\b")
"""The code that `multiprocessing` passes to `python -c` for a worker, a fork server or a resource tracker."""


def install() -> None:
    """Install all triggers in this process."""
    hook = get_hook()
    actions: dict[str, list[AfterImport]] = {}
    for trigger in TRIGGERS:
        actions.setdefault(trigger.module, []).append(functools.partial(hook.install_trigger, trigger))
    call_after_import(actions)
    if _is_worker():
        return
    (hook.folder / f"started-{os.getpid()}").touch()
    atexit.register(hook.report_end)
    threading.Thread(target=hook.wait_for_request, name="holdall-probe", daemon=True).start()


@functools.cache
def get_hook() -> Hook:
    """Return the hook of this process."""
    return Hook(
        Path(os.environ["HOLDALL_PROBE_DIR"]),
        launcher_pid=int(os.environ["HOLDALL_PROBE_PID"]),
        max_env_steps=int(os.environ["HOLDALL_PROBE_ENV_STEPS"]),
        measure_s=float(os.environ["HOLDALL_PROBE_MEASURE_S"]),
        max_buffer_size=int(os.environ["HOLDALL_PROBE_BUFFER_SIZE"]),
    )


def _is_worker() -> bool:
    """Return whether this process serves another Python: a worker, a fork server or a resource tracker."""
    arguments = sys.orig_argv[1:]
    if "--multiprocessing-fork" in arguments or any(Path(word).name == "default_worker.py" for word in arguments):
        return True
    return any(option == "-c" and _WORKER_CODE.match(code) is not None for option, code in pairwise(arguments))


class Hook:
    """State of the probe in one process.

    Args:
        folder: Folder for the reports.
        launcher_pid: Process of holdall that launched the command. If it ends, this process ends, too.
        max_env_steps: Environment steps after which the command is stopped.
        measure_s: Seconds that may be spent on measurements after the first sign of training; 0: no measurements.
        max_buffer_size: Largest `buffer_size` of a model; 0 for no limit.
    """

    def __init__(
        self, folder: Path, launcher_pid: int, max_env_steps: int, measure_s: float, max_buffer_size: int
    ) -> None:
        self.folder = folder
        self.max_buffer_size = max_buffer_size
        self.env_steps = 0
        self._launcher_pid = launcher_pid
        self._max_env_steps = max_env_steps
        self._measure_s = measure_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._is_reported = False
        self._started_at = time.monotonic()
        self._first_sign: tuple[str, str] | None = None  # Name and words of the first trigger that was reached.
        self._first_sign_at = 0.0
        self._stepping_since = 0.0
        self._recorded: list[Step] = []  # Copies of added steps.
        self._recorded_bytes = 0
        self._added_steps = 0
        self._has_updated = False
        self._is_measuring = False
        self._resident_before_update = 0

    def install_trigger(self, trigger: Trigger, module: ModuleType) -> None:
        """Install a trigger in its module. A failure becomes a note of the snapshot."""
        try:
            trigger.install(module, self)
        except Exception as error:
            note = self.folder / f"note-{os.getpid()}-{trigger.module}"
            note.write_text(f"The trigger for {trigger.module} could not be installed: {error!r}", encoding="utf-8")

    # ---------------------------------------------------------------- called by triggers

    def reach(self, trigger: str, words: str, **context: Any) -> None:
        """Stop the command at this event. A probe that measures lets the command continue to its first update."""
        if self._is_measuring:
            return
        if not self._measure_s or trigger == "learn":
            self.stop(trigger, words, **context)
        if self._first_sign is None:
            self._first_sign = (trigger, words)
            self._first_sign_at = time.monotonic()
        if trigger == "add" and self._added_steps % _READ_EVERY == 0:
            self._resident_before_update = read_status("VmRSS")
        is_late = time.monotonic() - self._first_sign_at > self._measure_s
        if self._added_steps >= MAX_STEPS and "torch" not in sys.modules:
            is_late = True  # Without torch, no trigger reports an update, so there is nothing to wait for.
        if trigger == "optimized" or is_late:
            self._has_updated = trigger == "optimized"
            self.stop(*self._first_sign, **context)

    def record(self, method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Count a call that added experience. A probe that measures keeps a copy of the added step."""
        if self._is_measuring:
            return
        self._added_steps += 1
        is_full = len(self._recorded) >= MAX_STEPS or self._recorded_bytes >= MAX_COPIED_BYTES
        if is_full or not self._measure_s:
            return
        step = copy_step(method, arguments, options)
        if step is not None:
            self._recorded.append(step)
            self._recorded_bytes += count_step_bytes(step)

    def step(self, step: Callable[..., Any], env: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `step` of an environment, and count the outermost call.

        A vector environment counts once for all of its environments.
        """
        if getattr(self._local, "is_stepping", False):
            return step(env, *args, **kwargs)
        self._local.is_stepping = True
        try:
            result = step(env, *args, **kwargs)
        finally:
            self._local.is_stepping = False
        self._count_steps(int(getattr(env, "num_envs", 1) or 1))
        return result

    def __reduce__(self) -> Any:
        """Pickle as a reference to the hook of the process that unpickles."""
        return get_hook, ()

    def _count_steps(self, count: int) -> None:
        """Count environment steps, and stop the command after enough of them. Worker processes never stop it."""
        if self._is_measuring:
            return
        self.env_steps += count
        if self._measure_s and not self._added_steps and self.env_steps % _READ_EVERY == 0:
            self._resident_before_update = read_status("VmRSS")
        now = time.monotonic()
        self._stepping_since = self._stepping_since or now
        is_slow = now - self._stepping_since > _MAX_STEPPING_S
        if (self.env_steps < self._max_env_steps and not is_slow) or _is_child():
            return
        if self._first_sign is None or now - self._first_sign_at > self._measure_s:
            self.stop("steps", f"{min(self.env_steps, self._max_env_steps)} environment steps")

    # ---------------------------------------------------------------- reporting

    def stop(self, trigger: str, words: str, **context: Any) -> None:
        """Write the report, and wait until this process is ended. Never returns."""
        self.report(trigger, words, **context)
        while self._is_wanted():
            time.sleep(_POLL_S)
        os._exit(0)

    def report_end(self) -> None:
        """Write a report when the interpreter ends, after an uncaught error or because the command is complete."""
        error = getattr(sys, "last_value", None)
        if error is None:
            self.report("exit", "the command ended before it trained")
        else:
            self.report("error", f"{type(error).__name__}: {error}", error=error)

    def wait_for_request(self) -> None:
        """Report when holdall's process requests it, at the timeout or when memory is nearly full."""
        request = self.folder / "request"
        while self._is_wanted():
            if request.exists():
                trigger, _, words = request.read_text(encoding="utf-8").partition("\n")
                self.report(trigger, words)
                return
            time.sleep(_POLL_S)
        os._exit(1)

    def report(self, trigger: str, words: str, **context: Any) -> None:
        """Inspect the live objects and write the report. Only the first call has an effect."""
        with self._lock:
            if self._is_reported:
                return
            self._is_reported = True
        resident = read_status("VmRSS")
        peak = read_status("VmHWM")
        # The inspection must not count the probe's copies as a buffer of the command.
        steps = self._recorded
        self._recorded = []
        facts: dict[str, Any] = {
            "trigger": trigger,
            "stopped_by": words,
            "env_steps": self.env_steps,
            "resident_bytes": resident,
            "peak_bytes": peak,
            "probe_bytes": self._recorded_bytes,
        }
        error = context.get("error")
        if error is not None:
            facts["error"] = "".join(traceback.format_exception(error))
        try:
            from . import inspection  # noqa: PLC0415  Loaded only where it is needed.

            facts |= inspection.inspect(context, hidden=steps)
        except Exception:
            facts["notes"] = (f"The objects could not be read: {traceback.format_exc()}",)
        if self._measure_s and trigger not in {"exit", "error", "timeout", "memory"}:
            measured = self._measure(context, steps)
            facts |= measured | {"notes": (*facts.get("notes", ()), *measured["notes"])}
        self._write(Snapshot(**facts))

    def _measure(self, context: dict[str, Any], steps: list[Step]) -> dict[str, Any]:
        self._is_measuring = True
        if "model" in context:
            return measure_model(context["model"], self._measure_s)
        resident = self._resident_before_update if self._has_updated else 0
        return measure_steps(steps, resident)

    def _write(self, snapshot: Snapshot) -> None:
        file = self.folder / f"report-{os.getpid()}.json"
        part = file.with_suffix(".part")
        part.write_text(snapshot.as_json(), encoding="utf-8")
        part.replace(file)

    def _is_wanted(self) -> bool:
        """Return whether holdall's process still runs and has not removed the folder."""
        return self.folder.exists() and _is_alive(self._launcher_pid)


def _is_child() -> bool:
    """Return whether `multiprocessing` started this process."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

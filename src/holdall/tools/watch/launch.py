"""Start a command with an agent in it.

The launched Python finds `startup/sitecustomize.py` on its path. That module starts the agent, which follows every
model of Stable-Baselines3. It also runs the user's own sitecustomize. The training itself is not changed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError
from holdall.machine import LINUX, peak_bytes
from holdall.tools.probe.import_hook import call_after_import
from holdall.tools.watch.agent import get_agent

_STARTUP_FOLDER = Path(__file__).parent / "startup"
_FORWARDED_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_MODEL_MODULE = "stable_baselines3.common.base_class"


class LaunchedCommand:
    """A command that runs with an agent in it. Signals that end the watch are forwarded to the command.

    With `is_captured`, this process writes the output of the command line by line, so that a live view can stay below
    the output.
    """

    def __init__(self, command: Sequence[str], *, is_captured: bool = False) -> None:
        if not command or shutil.which(command[0]) is None:
            raise ArgumentError(f"{' '.join(command)!r} is neither a process id nor a program. See --help.")
        environment = dict(os.environ)
        environment["HOLDALL_WATCHED"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTUP_FOLDER), os.environ.get("PYTHONPATH")]))
        if is_captured:
            environment["PYTHONUNBUFFERED"] = "1"
        output = subprocess.PIPE if is_captured else None
        errors = subprocess.STDOUT if is_captured else None
        self._start = time.monotonic()
        self._process = subprocess.Popen(list(command), env=environment, stdout=output, stderr=errors)
        self.pid = self._process.pid
        self.seconds = 0.0  # Duration of the command, after `wait`.
        for number in _FORWARDED_SIGNALS:
            signal.signal(number, lambda received, _: self._process.send_signal(received))
        self._output_thread: threading.Thread | None = None
        if is_captured:
            self._output_thread = threading.Thread(target=self._write_output, name="holdall-output", daemon=True)
            self._output_thread.start()

    def wait_for_end(self, seconds: float) -> bool:
        """Wait at most `seconds`. Return whether the command ended."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait(self) -> int:
        """Wait until the command ends. Return its exit code as a shell would."""
        while True:
            try:
                code = self._process.wait()
                break
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
        self.seconds = time.monotonic() - self._start
        if self._output_thread is not None:
            self._output_thread.join()
        return code if code >= 0 else 128 - code

    def read_peak(self) -> int:
        """Return the largest resident set of any process of the command, which has ended. 0 if it is unknown."""
        if not LINUX:
            return 0
        import resource  # noqa: PLC0415  It does not exist on Windows.

        peak = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        # A command begins as a copy of this process, and the kernel counts the copy, too.
        return peak if peak > peak_bytes() else 0

    def _write_output(self) -> None:
        assert self._process.stdout is not None
        for line in iter(self._process.stdout.readline, b""):
            with contextlib.suppress(OSError):  # The reader of stdout is gone. The command continues.
                sys.stdout.write(line.decode("utf-8", "replace"))


def start_agent_in_command() -> None:
    """Start the agent in a launched Python, and follow models once Stable-Baselines3 is imported."""
    get_agent()
    call_after_import({_MODEL_MODULE: [follow_models]})


def follow_models(module: Any) -> None:
    """Follow every model that is made from now on."""
    kind = module.BaseAlgorithm
    initialize: Callable[..., None] = kind.__init__

    @functools.wraps(initialize)
    def initialize_and_follow(model: Any, *arguments: Any, **named: Any) -> None:
        initialize(model, *arguments, **named)
        get_agent().follow_model(model)

    kind.__init__ = initialize_and_follow

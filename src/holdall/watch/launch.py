"""A command that is started to be watched, with an agent in it that nobody had to write.

In:  a command line.  Out: a running process. Python finds a small start-up module on its path, which begins the agent
and then makes way for the one that would have been found otherwise.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from holdall.errors import ArgumentError

_START_UP = Path(__file__).parent / "startup"
VARIABLE = "HOLDALL_WATCHED"


class Launched:
    """A command under way.

    Args:
        captured: Whether its output is passed on line by line, so that a live view can stay below it.
    """

    def __init__(self, command: Sequence[str], *, captured: bool = False) -> None:
        if not command or shutil.which(command[0]) is None:
            raise ArgumentError(f"command ({' '.join(command)}) is neither a process id nor a program; see --help")
        path = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            VARIABLE: "1",
            "PYTHONPATH": str(_START_UP) if not path else os.pathsep.join([str(_START_UP), path]),
        }
        if captured:
            environment["PYTHONUNBUFFERED"] = "1"
        where = subprocess.PIPE if captured else None
        self._process = subprocess.Popen(
            list(command), env=environment, stdout=where, stderr=subprocess.STDOUT if captured else None
        )
        self._relay: threading.Thread | None = None
        if captured:
            self._relay = threading.Thread(target=self._pass_on, name="holdall-output", daemon=True)
            self._relay.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ended_within(self, seconds: float) -> bool:
        """Wait a while; say whether it ended."""
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
            sys.stdout.write(line.decode("utf-8", "replace"))

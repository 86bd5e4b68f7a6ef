"""Run a training command until training is about to start, and return what it built.

    snapshot = probe(["python", "train.py", "--env", "Dog-v0"], timeout_s=120)

The command runs in a session of its own, with a startup hook (`startup/sitecustomize.py`). The hook reports at the
first event of `triggers.TRIGGERS`, and when the command fails or ends. This module also asks for a report at the
timeout and when memory is nearly full.

Guarantees: the command never trains (with `measure_s`, it makes at most two updates). Every process that it started is
ended. The objects that were found are returned, also after an error. The command really runs: it imports modules, uses
files and steps environments. Callers tell the user so before they call `probe`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from holdall.errors import ArgumentError
from holdall.machine import held_bytes, memory_limits
from holdall.tools.probe.snapshot import FoundProcess, Snapshot

MAX_ENV_STEPS = 1000
_STARTUP_FOLDER = Path(__file__).parent / "startup"
_POLL_S = 0.05
_REQUEST_S = 10.0
"""Seconds that processes have to answer a request."""
_MIN_FREE_SHARE = 0.04
"""Share of a memory limit below which the command is stopped."""
_END_S = 10.0
"""Seconds that processes have to disappear after they were killed."""
_MAX_OUTPUT_BYTES = 20_000
_FOLDER_VARIABLE = "HOLDALL_PROBE_DIR"


def probe(
    command: Sequence[str],
    timeout_s: float = 300.0,
    *,
    max_env_steps: int = MAX_ENV_STEPS,
    measure_s: float = 0.0,
    max_buffer_size: int | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Snapshot:
    """Run `command` until training is about to start. Return what it built.

    Args:
        timeout_s: Seconds after which the command is stopped, even if it is not about to train.
        max_env_steps: Environment steps after which the command is stopped if no other trigger recognises its loop.
        measure_s: Seconds that may be spent on measurements after the first sign of training: a real update, and
            storing a few hundred steps in holdall's memories. 0: no measurements.
        max_buffer_size: Upper bound on the `buffer_size` of models of Stable-Baselines3, for a command whose buffer
            cannot be allocated. None: no bound.
        cwd: Directory in which the command runs.
    """
    if not command:
        raise ArgumentError("command is empty. Write the command after --, as in: holdall plan -- python train.py")
    with tempfile.TemporaryDirectory(prefix="holdall-probe-") as name:
        folder = Path(name)
        environment = _make_environment(folder) | {
            "HOLDALL_PROBE_ENV_STEPS": str(max_env_steps),
            "HOLDALL_PROBE_MEASURE_S": str(measure_s),
            "HOLDALL_PROBE_BUFFER_SIZE": str(max_buffer_size or 0),
        }
        return _Run(command, folder, environment, cwd).finish(timeout_s)


def _make_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of the command."""
    paths = [str(_STARTUP_FOLDER)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "WANDB_MODE": "disabled",
        "HYDRA_FULL_ERROR": "1",  # Otherwise hydra hides the error of the command, and ends the process itself.
        "HOLDALL_PROBE": "1",
        _FOLDER_VARIABLE: str(folder),
        "HOLDALL_PROBE_PID": str(os.getpid()),
    }


class _Run:
    """One probed command."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        cwd: str | os.PathLike[str] | None,
    ) -> None:
        self._folder = folder
        self._output = folder / "output"
        self._started_at = time.monotonic()
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    cwd=cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise ArgumentError(
                f"command ({command[0]}) cannot be started: {error.strerror}. Name a program that exists."
            ) from error

    def finish(self, timeout_s: float) -> Snapshot:
        """Wait for a report, end all processes, and return the report."""
        try:
            snapshot = self._wait(timeout_s)
            after_s = time.monotonic() - self._started_at
            processes = tuple(self._describe_processes())
        finally:
            self._end_processes()
        notes = [file.read_text(encoding="utf-8") for file in sorted(self._folder.glob("note-*"))]
        if not list(self._folder.glob("started-*")):
            notes.append(
                "No Python process of the command loaded the probe. Options such as -I, -E and -S of Python prevent it."
            )
        return replace(
            snapshot,
            after_s=after_s,
            processes=processes,
            notes=(*snapshot.notes, *notes),
            output=self._read_output(),
        )

    def _wait(self, timeout_s: float) -> Snapshot:
        deadline = self._started_at + timeout_s
        while True:
            ready = [snapshot for snapshot in self._read_reports() if snapshot.is_ready]
            if ready:
                return ready[0]
            if self._process.poll() is not None:
                return self._describe_end()
            if time.monotonic() > deadline:
                return self._request("timeout", f"the timeout of {timeout_s:g} s")
            if self._is_memory_short():
                return self._request("memory", "memory is nearly full")
            time.sleep(_POLL_S)

    def _request(self, trigger: str, words: str) -> Snapshot:
        """Ask every process for a report, and return the report with the most objects."""
        request = self._folder / "request.part"
        request.write_text(f"{trigger}\n{words}", encoding="utf-8")
        request.rename(self._folder / "request")
        deadline = time.monotonic() + _REQUEST_S
        count = len(list(self._folder.glob("started-*")))
        while time.monotonic() < deadline and len(self._read_reports()) < count and self._process.poll() is None:
            time.sleep(_POLL_S)
        reports = self._read_reports()
        if not reports:
            return Snapshot(words, trigger, notes=("No process of the command answered.",))
        return max(reports, key=_count_findings)

    def _describe_end(self) -> Snapshot:
        """Return the report of a command that has ended by itself."""
        code = self._process.returncode
        reports = self._read_reports()
        if reports:
            failed = [snapshot for snapshot in reports if snapshot.trigger == "error"]
            fullest = max(failed or reports, key=_count_findings)
            return fullest if code == 0 or fullest.error else replace(fullest, error=self._read_output())
        if code < 0:
            name = signal.Signals(-code).name
            return Snapshot(f"the command was ended by {name}", "killed", error=self._read_output())
        error = self._read_output() if code else None
        return Snapshot(f"the command ended with exit code {code}", "error" if code else "exit", error=error)

    def _read_reports(self) -> list[Snapshot]:
        """Return all complete reports, the oldest first."""
        files = sorted(self._folder.glob("report-*.json"), key=lambda file: file.stat().st_mtime_ns)
        return [Snapshot.from_json(file.read_bytes()) for file in files]

    def _read_output(self) -> str:
        data = self._output.read_bytes()[-_MAX_OUTPUT_BYTES:]
        return data.decode("utf-8", "replace").strip()

    def _is_memory_short(self) -> bool:
        limit = memory_limits()[0]
        return limit.free_bytes < _MIN_FREE_SHARE * limit.total_bytes

    # ---------------------------------------------------------------- processes

    def _find_processes(self) -> list[psutil.Process]:
        """Return the processes of the command: its descendants, and all processes with the variable of the folder."""
        found: dict[int, psutil.Process] = {}
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            found[root.pid] = root
            for child in root.children(recursive=True):
                found[child.pid] = child
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid not in found and process.environ().get(_FOLDER_VARIABLE) == str(self._folder):
                    found[process.pid] = process
        return list(found.values())

    def _find_running(self) -> list[psutil.Process]:
        return [process for process in self._find_processes() if _is_running(process)]

    def _describe_processes(self) -> list[FoundProcess]:
        reporters = {int(file.stem.partition("-")[2]) for file in self._folder.glob("report-*.json")}
        described = []
        for process in self._find_processes():
            with contextlib.suppress(psutil.Error, OSError):
                unique_bytes = held_bytes(process.pid).unique
                is_reporter = process.pid in reporters
                described.append(FoundProcess(process.pid, process.name(), unique_bytes, is_reporter))
        return described

    def _end_processes(self) -> None:
        """End every process of the command, and wait until all are gone."""
        deadline = time.monotonic() + _END_S
        running = self._find_running()
        while running and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)
            running = [process for process in running if _is_running(process)]
            if not running:  # A process may have started another one before it was killed.
                running = self._find_running()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process still runs. A zombie has ended, although its parent has not yet noticed."""
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _count_findings(snapshot: Snapshot) -> tuple[int, int]:
    """Return the number of objects in a report, then its memory, to compare the reports of several processes."""
    objects = len(snapshot.models) + len(snapshot.buffers) + len(snapshot.memories)
    return objects, snapshot.resident_bytes

"""The watcher: readings of another process and their verdicts, in at most 2 % of a core.

`python -m holdall.tools.watch.watcher PID OPTIONS` is the process that `holdall.watch.start` starts. It publishes the
latest reading, writes a record if asked to, and ends with the process that it watches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from holdall.errors import WatchError
from holdall.machine import LINUX, held_bytes, memory_limits, peak_bytes, usable_cores
from holdall.tools.recording_format import RECORDING_FORMAT
from holdall.tools.watch import exchange
from holdall.tools.watch.attribution import attribute_memory
from holdall.tools.watch.exchange import AgentReport, PhasePeak
from holdall.tools.watch.pressure import read_stalled_percent
from holdall.tools.watch.reading import AttributedPart, GpuMemory, LiveObjects, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import WatchVerdict, judge

_MAX_REPORT_AGE_S = 120.0
_MAX_SHARE_OF_CORE = 0.02
_JUDGE_INTERVAL_S = 5.0
_AGENT_INTERVAL_S = 0.25
_REPEAT_INTERVAL_S = 60.0
_HELPER_PROCESSES = ("resource_tracker", "forkserver")
"""Words in the command lines of multiprocessing's helper processes."""
_LOG = logging.getLogger("holdall")


@dataclass(frozen=True, slots=True)
class WatchPass:
    """A reading with its verdicts, and what the agent reported since the pass before."""

    reading: MemoryReading
    verdicts: list[WatchVerdict]
    new_verdicts: list[WatchVerdict]  # Verdicts that were not reported within the last minute.
    phases: dict[str, PhasePeak] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)

    def as_lines(self) -> list[dict[str, Any]]:
        """Return the reading, and everything that is new, as lines of a record."""
        lines = [self.reading.as_dict()]
        for name, phase in self.phases.items():
            lines.append(
                {"kind": "phase", "name": name, "peak": phase.peak, "count": phase.times, "seconds": phase.seconds}
            )
        lines += [verdict.as_dict(self.reading.time) for verdict in self.new_verdicts]
        lines += [{"kind": "event", "time": moment, "text": text} for moment, text in self.events]
        return lines


class Watcher:
    """Reads a process tree again and again, keeps the readings, and judges them.

    Args:
        pid: The process. Its children are its workers.
        interval_s: Seconds between two readings. The interval is longer if readings would take more than 2 % of a core.
        limit_bytes: The user's limit for the memory of the tree, in addition to the limits of the system.
        command: Command line that started the process. By default, it is read from the process.
    """

    def __init__(
        self, pid: int, interval_s: float, limit_bytes: int | None = None, command: Sequence[str] = ()
    ) -> None:
        self.pid = pid
        self.history = ReadingHistory()
        self.latest_report: AgentReport | None = None
        self._report_before: AgentReport | None = None
        self._interval_s = interval_s
        self._limit_bytes = limit_bytes
        self._pause_s = interval_s
        self._peak = 0
        self._verdicts: list[WatchVerdict] = []
        self._next_judgement = 0.0
        self._reported: dict[str, float] = {}  # Time of the last report, by verdict.
        self._phases: dict[str, PhasePeak] = {}
        self._last_event = 0.0
        self._has_ended = False
        self._has_rejected_report = False
        try:
            self._process = psutil.Process(pid)
            self.command = list(command) or list(self._process.cmdline())
        except psutil.Error as error:
            raise WatchError(f"Process {pid} does not run. See 'ps' for its id.") from error

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            is_running = self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return bool(is_running) and not self._has_ended

    def run_pass(self) -> WatchPass:
        """Read the tree and judge it. Raise WatchError if the process has ended or cannot be read."""
        start = time.process_time()
        reading = self._read_safely()
        self.history.add(reading)
        new: list[WatchVerdict] = []
        if reading.time >= self._next_judgement:
            self._next_judgement = reading.time + _JUDGE_INTERVAL_S
            self._verdicts = judge(self.history, self.command)
            new = self._select_new(self._verdicts, reading.time)
        phases: dict[str, PhasePeak] = {}
        events: list[tuple[float, str]] = []
        if self.latest_report is not None:
            reported = self.latest_report.phases
            phases = {name: phase for name, phase in reported.items() if self._phases.get(name) != phase}
            events = [event for event in self.latest_report.events if event[0] > self._last_event]
            self._phases |= phases
            self._last_event = max([self._last_event, *(moment for moment, _ in events)])
        spent_s = time.process_time() - start
        self._pause_s = max(self._interval_s, spent_s / _MAX_SHARE_OF_CORE)
        return WatchPass(reading, self._verdicts, new, phases, events)

    def pause(self, wait_for_end: Callable[[float], bool] | None = None) -> bool:
        """Wait until the next pass is due, and poll the agent meanwhile. Return whether the process ended.

        The first report of an agent ends the pause, because the process had hardly started at the pass before it.
        `wait_for_end` waits at most the given seconds for the end of a process that this process started.
        """
        had_report = self.latest_report is not None
        deadline = time.monotonic() + self._pause_s
        while time.monotonic() < deadline:
            seconds = min(max(deadline - time.monotonic(), 0.0), _AGENT_INTERVAL_S)
            if wait_for_end is None:
                time.sleep(seconds)
            elif wait_for_end(seconds):
                return True
            if self._poll_agent() is not None and not had_report:
                return False
        return False

    def publish(self, latest: WatchPass) -> None:
        """Write a pass to the file that the watched process reads."""
        verdicts = [one.as_dict(latest.reading.time) for one in latest.verdicts]
        exchange.write_latest(self.pid, {"reading": latest.reading.as_dict(), "verdicts": verdicts})

    def _poll_agent(self) -> AgentReport | None:
        """Return the report of the agent. Record the live objects of a new report."""
        report = self._read_agent_report()
        if report is None or time.time() - report.time > _MAX_REPORT_AGE_S:
            return None
        if self.latest_report is None or report.time > self.latest_report.time:
            self._report_before = self.latest_report
            self.latest_report = report
            live = _count_live_objects(report)
            if live is not None:
                self.history.add_live(live)
        return report

    def _read_agent_report(self) -> AgentReport | None:
        """Return the report of the agent. None if there is none, or if it cannot be used, which is logged once."""
        try:
            return exchange.read_agent_report(self.pid)
        except WatchError as error:
            if not self._has_rejected_report:
                _LOG.warning("%s", error)
            self._has_rejected_report = True
            return None

    def _read_safely(self) -> MemoryReading:
        try:
            return self._read()
        except (PermissionError, psutil.AccessDenied) as error:
            raise WatchError(
                f"Process {self.pid} belongs to another user, or may not be traced. Run as its user, or as root."
            ) from error
        except (OSError, psutil.Error) as error:
            self._has_ended = True  # Its memory is gone, though the kernel may still list the process for a moment.
            raise WatchError(f"Process {self.pid} has ended.") from error

    def _read(self) -> MemoryReading:
        report = self._poll_agent()
        now = time.time()
        own = attribute_memory(self.pid, report) if LINUX else attribute_sum(self.pid, report)
        parts = [*own, *_read_workers(self._process)]
        pss = sum(part.resident for part in parts)
        known = report or AgentReport(self.pid, 0, now)
        # An agent that reports phases resets the kernel's peak at every phase.
        phase_peaks = [phase.peak for phase in known.phases.values()]
        self._peak = max(self._peak, pss, peak_bytes(self.pid), *phase_peaks)
        headroom = {limit.name: limit.free_bytes for limit in memory_limits(None, process=self.pid)}
        if self._limit_bytes is not None:
            headroom["--limit"] = self._limit_bytes - pss
        return MemoryReading(
            time=now,
            pss=pss,
            peak=self._peak,
            parts=tuple(parts),
            step=known.step,
            goal=known.goal,
            phase=known.phase,
            gpu=_read_gpu(self.pid, known.gpu),
            steps_per_second=self._measure_rate(),
            pressure=read_stalled_percent(Path(f"/proc/{self.pid}")),
            threads=int(self._process.num_threads()),
            torch_threads=known.torch_threads,
            cores=usable_cores(),
            headroom=headroom,
            spilled=known.spilled,
            disk_free=known.disk_free,
            exact=LINUX,
        )

    def _measure_rate(self) -> float | None:
        before = self._report_before
        newest = self.latest_report
        if before is None or newest is None or before.step is None or newest.step is None:
            return None
        return max(newest.step - before.step, 0) / max(newest.time - before.time, 1e-3)

    def _select_new(self, verdicts: Iterable[WatchVerdict], moment: float) -> list[WatchVerdict]:
        """Return the verdicts that were not reported within the last minute."""
        new = []
        for verdict in verdicts:
            key = f"{verdict.name} {verdict.evidence.get('buffer', '')} {verdict.evidence.get('of', '')}"
            if moment - self._reported.get(key, 0.0) >= _REPEAT_INTERVAL_S:
                self._reported[key] = moment
                new.append(verdict)
        return new


def _count_live_objects(report: AgentReport) -> LiveObjects | None:
    """Return the live objects without buffers: the series in which a leak shows."""
    if report.heap_used is None:
        return None
    named = sum(region.nbytes for region in report.regions if region.is_malloc and region.group == "buffers")
    live = report.heap_used + report.heap_mapped - named - report.held_in_heap
    return LiveObjects(report.time, report.step, report.phase, max(live, 0), report.python_objects)


def attribute_sum(pid: int, report: AgentReport | None) -> list[AttributedPart]:
    """Return named buffers and the rest, where the system reports only the sum. Resident bytes follow from the fill."""
    left = held_bytes(pid).proportional
    parts = []
    if report is not None:
        for region in report.regions:
            fill = 1.0 if region.fill is None else region.fill
            resident = min(int(region.nbytes * fill), left)
            left -= resident
            parts.append(AttributedPart(region.group, region.name, resident, region.nbytes, region.fill))
        for one in report.held:
            resident = min(one.nbytes, left)
            left -= resident
            parts.append(
                AttributedPart("buffers", one.name, resident, one.nbytes, one.fill, grows=True, budget=one.budget)
            )
    return [*parts, AttributedPart("unattributed", "this system reports only the sum", left, left)]


def _read_workers(process: psutil.Process) -> list[AttributedPart]:
    """Return one part for every descendant of `process`, except this process."""
    parts = []
    for worker in process.children(recursive=True):
        if worker.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):  # It ended, or belongs to another user.
            line = " ".join(worker.cmdline())
            name = next((helper for helper in _HELPER_PROCESSES if helper in line), worker.name())[:40]
            resident = held_bytes(worker.pid).proportional
            parts.append(AttributedPart("workers", f"{worker.pid} {name}", resident, int(worker.memory_info().vms)))
    return sorted(parts, key=lambda part: -part.resident)


def _read_gpu(pid: int, agent_gpu: dict[str, int]) -> GpuMemory | None:
    """Return the GPU memory of a process, from its agent and the driver. None if neither has a figure."""
    driver = _read_nvidia(pid)
    if not agent_gpu and driver is None:
        return None
    used, limit = driver or (None, agent_gpu.get("limit"))
    reserved = agent_gpu.get("reserved")
    return GpuMemory(
        requested=agent_gpu.get("requested"),
        allocated=agent_gpu.get("allocated"),
        reserved=reserved,
        fragmented=agent_gpu.get("fragmented"),
        other=None if used is None else max(used - (reserved or 0), 0),
        limit=limit,
    )


def _read_nvidia(pid: int) -> tuple[int | None, int] | None:
    """Return the bytes that the driver counts for the process, and the size of its GPU."""
    nvml = _load_nvml()
    if nvml is None:
        return None
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid == pid:
                    used = process.usedGpuMemory
                    total = int(nvml.nvmlDeviceGetMemoryInfo(device).total)
                    return None if used is None else int(used), total
    except nvml.NVMLError:
        return None
    return None


@cache
def _load_nvml() -> Any:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # No package, no driver, or versions that do not fit each other.
        return None
    return nvml


# ---------------------------------------------------------------- the record, and the process


def make_header(watcher: Watcher, interval_s: float, limit_bytes: int | None) -> dict[str, Any]:
    """Return the first line of a record."""
    limits = memory_limits(process=watcher.pid)
    group_bytes = [limit.total_bytes for limit in limits if limit.name.startswith("control group")]
    machine_bytes = [limit.total_bytes for limit in limits if not limit.name.startswith("control group")]
    return {
        "kind": "header",
        "format": RECORDING_FORMAT,
        "pid": watcher.pid,
        "command": watcher.command,
        "host": socket.gethostname(),
        "started": time.time(),
        "interval": interval_s,
        "system": platform.system(),
        "limits": {
            "memory": min(machine_bytes, default=None),
            "cgroup": min(group_bytes, default=None),
            "given": limit_bytes,
        },
    }


class WatchRecorder:
    """Writer of a record: one JSON object per line, in a file or on standard output."""

    def __init__(self, target: Path | None) -> None:
        try:
            self._file = sys.stdout if target is None else target.open("w", encoding="utf-8")
        except OSError as error:
            raise WatchError(f"{target} cannot be written ({error.strerror}). Name another file.") from error

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines."""
        for line in lines:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not sys.stdout:
            self._file.close()


def main() -> None:
    """Watch the process of the command line until it ends."""
    pid = int(sys.argv[1])
    options = json.loads(sys.argv[2])
    watcher = Watcher(pid, options["interval_s"], options["limit_bytes"])
    recorder = None
    if options["record"] is not None:
        recorder = WatchRecorder(Path(options["record"]))
        recorder.write([make_header(watcher, options["interval_s"], options["limit_bytes"])])
    exporter = None
    if options["prometheus"] is not None:
        from holdall.tools.watch.prometheus import Exporter  # noqa: PLC0415  Its package is an extra.

        exporter = Exporter(options["prometheus"])
    while watcher.is_alive():
        try:
            latest = watcher.run_pass()
        except WatchError:
            break
        with contextlib.suppress(OSError):
            watcher.publish(latest)
        if recorder is not None:
            recorder.write(latest.as_lines())
        if exporter is not None:
            exporter.latest = latest
        watcher.pause()


if __name__ == "__main__":
    main()

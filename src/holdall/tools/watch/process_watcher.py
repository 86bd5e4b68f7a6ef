"""The process watcher: readings of another process, one after the other, and passes: a reading with its verdicts.

In:  a process id.  Out: readings of the process, its workers, its GPU memory, its limits and memory pressure; passes,
in at most 2 % of one core's time, the latest of them in a file that the watched process can read within microseconds.
Everything slow happens here, outside of the watched process. AMD's part is written from the driver's documentation and
was not tested on such a GPU.
Invariant: the parts of a reading add up to its total. A process that ended is an error that says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from holdall.errors import WatchError
from holdall.machine import LINUX, disk, held_bytes, mappings, memory_limits, page_cache, peak_bytes, read_text
from holdall.threads import usable_cores
from holdall.tools.watch import agent_files
from holdall.tools.watch.attribution import ProcessMemory, attribute_memory
from holdall.tools.watch.reading import AttributedPart, GpuMemory, LiveObjects, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import LIVE_OBJECTS, WatchVerdict, verdicts_for

_STALE_S = 120.0
"""An agent report that is older than this is not used."""
_SHARE_OF_A_CORE = 0.02
_SCAN_AGAIN_S = 120.0
"""Arrays of a process without an agent are looked for again after this time."""
_HELPER_PROCESSES = ("resource_tracker", "forkserver")
"""Helpers of multiprocessing, recognised by their command lines."""
_PRESSURE_FILES = (Path("/sys/fs/cgroup/memory.pressure"), Path("/proc/pressure/memory"))


class ProcessWatcher:
    """Reads one process tree.

    Args:
        pid: The process; its children are its workers.
        limit_bytes: A limit of the user's own, besides those of the system, over the tree's memory.
        scans: Whether arrays are looked for in its memory if it has no agent.
    """

    def __init__(self, pid: int, limit_bytes: int | None = None, *, scans: bool = False) -> None:
        self.pid, self._limit_bytes = pid, limit_bytes
        self._before: agent_files.AgentReport | None = None
        self.latest_report: agent_files.AgentReport | None = None  # of the process's agent
        self._cores = usable_cores()
        self._highest = 0
        self._arrays: list[agent_files.Region] = []  # of a process without an agent
        self._scan_due, self.scan_seconds = 0.0 if scans and LINUX else math.inf, 0.0
        self._has_ended = False
        try:
            self._process = psutil.Process(pid)
        except psutil.Error as error:
            raise WatchError(f"pid ({pid}) is no process that runs; see 'ps' for its id") from error

    def is_alive(self) -> bool:
        """Whether the process still runs."""
        try:
            is_there = bool(self._process.is_running()) and self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        return is_there and not self._has_ended

    def poll_agent(self) -> LiveObjects | None:
        """Return the live objects of the process if it reported since the last call; cheap, for frequent calls."""
        before = self.latest_report
        report = self._read_report()
        return None if report is None or self.latest_report is before else _live_objects(report)

    def read(self) -> MemoryReading:
        """Read the tree now."""
        try:
            return self._read()
        except (OSError, psutil.Error) as error:
            if isinstance(error, PermissionError | psutil.AccessDenied):
                raise WatchError(
                    f"pid ({self.pid}) belongs to another user, or may not be traced; run as its user, or as root"
                ) from error
            self._has_ended = True  # its memory is gone, though the kernel may still list it for a moment
            raise WatchError(f"pid ({self.pid}) has ended") from error

    def _read(self) -> MemoryReading:
        report = self._read_report()
        now = time.time()
        if report is None and now >= self._scan_due:
            self._scan(now)
        arrays = self._arrays if report is None else ()
        own = attribute_memory(self.pid, report, arrays) if LINUX else self._sums_alone(report)
        parts = [*own, *worker_parts(self.pid)]
        pss = sum(part.resident for part in parts)
        reported = report or agent_files.AgentReport(self.pid, 0, now)
        # An agent that reports phases resets the kernel's own peak.
        peaks = [phase.peak for phase in reported.phases.values()]
        self._highest = max(self._highest, pss, peak_bytes(self.pid), *peaks)
        own_limit = {} if self._limit_bytes is None else {"--limit": self._limit_bytes - pss}
        limits = {limit.name: limit.free_bytes for limit in memory_limits(None, process=self.pid)}
        return MemoryReading(
            time=now, pss=pss, peak=self._highest, parts=tuple(parts), step=self._step_at(now), goal=reported.goal,
            phase=reported.phase, gpu=gpu_memory(self.pid, reported.gpu), steps_per_second=self._rate(),
            pressure=stalled_percent(), threads=int(self._process.num_threads()), torch_threads=reported.torch_threads,
            cores=self._cores, page_cache=page_cache(self.pid) if LINUX else None, headroom=limits | own_limit,
            spilled=sum(reported.spilled.values()), disk_free=_free_on_disk(reported), exact=LINUX,
        )  # fmt: skip

    def _scan(self, now: float) -> None:
        """Look for the arrays of a process that has no agent to name them."""
        from holdall.tools.watch.object_scan import scan_arrays  # noqa: PLC0415  it needs NumPy, a watch does not

        begun = time.process_time()
        found = mappings(self.pid)
        with ProcessMemory(self.pid) as memory:
            if memory.is_readable and any("_multiarray_umath" in one.name for one in found):
                self._arrays = scan_arrays(memory, found)
        spent = time.process_time() - begun
        self.scan_seconds += spent
        self._scan_due = now + max(_SCAN_AGAIN_S, spent / _SHARE_OF_A_CORE)

    def _read_report(self) -> agent_files.AgentReport | None:
        """Return the newest agent report, and keep the one before it for the rate of steps."""
        report = agent_files.read_agent_report(self.pid)
        if report is None or time.time() - report.time > _STALE_S:
            return None
        if self.latest_report is None or report.time > self.latest_report.time:
            self._before, self.latest_report = self.latest_report, report
        return report

    def _rate(self) -> float | None:
        before, newest = self._before, self.latest_report
        if before is None or newest is None or before.step is None or newest.step is None:
            return None
        return max(newest.step - before.step, 0) / max(newest.time - before.time, 1e-3)

    def _step_at(self, moment: float) -> int | None:
        """Return the step at which a reading was taken: the last one reported, and those made since."""
        newest, rate = self.latest_report, self._rate()
        if newest is None or newest.step is None:
            return None
        return newest.step + int((rate or 0.0) * min(max(moment - newest.time, 0.0), 5.0))

    def _sums_alone(self, report: agent_files.AgentReport | None) -> list[AttributedPart]:
        """Return named regions and the rest, where the system reports only the sum."""
        whole = held_bytes(self.pid).proportional
        left, parts = whole, []
        for region in () if report is None else report.regions:
            # Pages cannot be counted here: what was written to is estimated by how full a buffer is.
            touched = min(int(region.nbytes * (1.0 if region.fill is None else region.fill)), left)
            left -= touched
            parts.append(AttributedPart(region.group, region.name, touched, region.nbytes, region.fill, region.grows))
        for one in () if report is None else report.held:
            touched = min(one.nbytes, left)
            left -= touched
            parts.append(AttributedPart("buffers", one.name, touched, one.nbytes, one.fill, grows=True))
        return [*parts, AttributedPart("unattributed", "this system reports only the sum", left, left)]


def _live_objects(report: agent_files.AgentReport) -> LiveObjects | None:
    """Return what live objects take, without the arrays of buffers: the series in which a leak shows."""
    if report.heap is None:
        return None
    named = sum(region.nbytes for region in report.regions if region.in_heap and region.group == "buffers")
    named += report.held_in_heap
    python = 0 if report.python is None else report.python.in_use
    heap = max(report.heap.in_use + report.heap.mapped + python - named, 0)
    return LiveObjects(report.time, report.step, report.phase, heap, python)


def _free_on_disk(report: agent_files.AgentReport) -> int | None:
    """Return what is left where memories spill to; the least, if that is several places."""
    limits = [disk(Path(folder)) for folder in report.spilled]
    return min((limit.free_bytes for limit in limits if limit is not None), default=None)


def worker_parts(pid: int) -> list[AttributedPart]:
    """Read every process below `pid`, except this one."""
    parts = []
    try:
        workers = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []
    for worker in workers:
        if worker.pid == os.getpid():
            continue
        try:
            held, addresses = held_bytes(worker.pid).proportional, int(worker.memory_info().vms)
            parts.append(AttributedPart("workers", f"{worker.pid} {_worker_name(worker)}", held, addresses))
        except (psutil.Error, OSError):  # it ended, or belongs to somebody else
            continue
    return sorted(parts, key=lambda part: -part.resident)


def _worker_name(worker: psutil.Process) -> str:
    line = " ".join(worker.cmdline())
    return next((helper for helper in _HELPER_PROCESSES if helper in line), worker.name())[:40]


def gpu_memory(pid: int, torch: dict[str, int]) -> GpuMemory | None:
    """Return what a process holds on its GPU; None if it holds nothing there, or that is unknown.

    NVML and sysfs report what the driver counts; torch reports its own pool through the agent.
    """
    driver = _nvidia(pid) or (_amd() if torch else None)
    if not torch and driver is None:
        return None
    used, total = driver or (None, torch.get("limit"))
    reserved = torch.get("reserved")
    other = None if used is None else max(used - (reserved or 0), 0)
    return GpuMemory(torch.get("requested"), torch.get("allocated"), reserved, torch.get("fragmented"), other, total)


def _nvidia(pid: int) -> tuple[int | None, int] | None:
    """Return what NVML counts for the process, and the size of its GPU."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            total = int(nvml.nvmlDeviceGetMemoryInfo(device).total)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid == pid:
                    return None if process.usedGpuMemory is None else int(process.usedGpuMemory), total
    except nvml.NVMLError:
        return None
    return None


@cache
def _nvml() -> Any:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not fit the other
        return None
    return nvml


def _amd() -> tuple[int, int] | None:
    """Return what the first AMD GPU holds, of all processes, and its size."""
    for used in sorted(Path("/sys/class/drm").glob("card*/device/mem_info_vram_used")):
        with contextlib.suppress(ValueError):  # the next one may be read
            return int(read_text(used)), int(read_text(used.parent / "mem_info_vram_total"))
    return None


def stalled_percent() -> float | None:
    """Return the share of the last ten seconds in which something waited for memory, in per cent."""
    found = (re.match(r"some avg10=([\d.]+)", read_text(file)) for file in _PRESSURE_FILES)
    return next((float(one[1]) for one in found if one), None)


_VERDICTS_EVERY_S = 5.0
_POLL_AGENT_EVERY_S = 0.25
_REPEAT_AFTER_S = 60.0
_TRACE_AGAIN_S = 60.0
_MOST_TRACES = 3
"""Traces that are asked for if the ones before found no line."""


@dataclass(frozen=True, slots=True)
class WatchPass:
    """What a watch knows now."""

    reading: MemoryReading
    verdicts: list[WatchVerdict]
    new_verdicts: list[WatchVerdict]  # that were not reported within the last minute
    phases: dict[str, agent_files.PhasePeak] = field(default_factory=dict)  # those that went on
    events: list[tuple[float, str]] = field(default_factory=list)

    def lines(self) -> list[dict[str, Any]]:
        """Return what is new, as lines of a record."""
        return [
            self.reading.as_dict(),
            *({"kind": "phase", "name": name, **asdict(phase)} for name, phase in self.phases.items()),
            *(verdict.as_dict(self.reading.time) for verdict in self.new_verdicts),
            *({"kind": "event", "time": when, "text": text} for when, text in self.events),
        ]


class WatchLoop:
    """Reads a process tree again and again, remembers, and judges, in at most 2 % of one core's time."""

    def __init__(self, pid: int, interval_s: float, limit_bytes: int | None = None, *, scans: bool = False) -> None:
        self.watcher = ProcessWatcher(pid, limit_bytes, scans=scans)
        self.history = ReadingHistory()
        self._interval_s = interval_s
        self._verdicts: list[WatchVerdict] = []
        self._judged = 0.0
        self._alerts = AlertThrottle()
        self._phases: dict[str, agent_files.PhasePeak] = {}
        self._last_event = 0.0
        self._traces, self._trace_due = 0, 0.0
        self.pause_s = interval_s

    def run_pass(self) -> WatchPass:
        """Read and judge."""
        begun = time.process_time() - self.watcher.scan_seconds  # a scan has a time of its own
        self._poll_agent()
        reading = self.watcher.read()
        self.history.add(reading)
        report = self.watcher.latest_report
        self.history.growing = () if report is None else report.growing
        new: list[WatchVerdict] = []
        if reading.time - self._judged >= _VERDICTS_EVERY_S or len(self.history.readings) == 1:
            self._judged = reading.time
            self._verdicts = verdicts_for(self.history)
            new = self._alerts.of(self._verdicts, reading.time)
            self._trace_leaks(reading.time)
        phases = {} if report is None else dict(report.phases)
        changed = {name: phase for name, phase in phases.items() if self._phases.get(name) != phase}
        self._phases = phases
        events = [] if report is None else [event for event in report.events if event[0] > self._last_event]
        self._last_event = max([self._last_event, *(when for when, _ in events)])
        spent = time.process_time() - self.watcher.scan_seconds - begun
        self.pause_s = max(self._interval_s, spent / _SHARE_OF_A_CORE)
        return WatchPass(reading, self._verdicts, new, changed, events)

    def _trace_leaks(self, now: float) -> None:
        """Have the process find the line of a leak, if it has an agent and did not find it yet."""
        is_leaking = any(one.evidence.get("of") == LIVE_OBJECTS for one in self._verdicts)
        if is_leaking and not self.history.growing and self._traces < _MOST_TRACES and now >= self._trace_due:
            self._traces, self._trace_due = self._traces + 1, now + _TRACE_AGAIN_S
            with contextlib.suppress(OSError):
                agent_files.request_trace(self.watcher.pid)

    def pause(self, ended_within: Callable[[float], bool] | None = None) -> bool:
        """Wait until the next pass is due, and poll the agent meanwhile; return whether the process ended.

        Args:
            ended_within: Waits at most this many seconds for a process that this one started.
        """
        end = time.monotonic() + self.pause_s
        while (left := end - time.monotonic()) > 0:
            if ended_within is None:
                time.sleep(min(left, _POLL_AGENT_EVERY_S))
            elif ended_within(min(left, _POLL_AGENT_EVERY_S)):
                return True
            self._poll_agent()
        return False

    def _poll_agent(self) -> None:
        live = self.watcher.poll_agent()
        if live is not None:
            self.history.add_live(live)


class AlertThrottle:
    """Remembers when each verdict was reported last."""

    def __init__(self) -> None:
        self._reported: dict[str, float] = {}

    def of(self, verdicts: Iterable[WatchVerdict], moment: float) -> list[WatchVerdict]:
        """Return the verdicts that must be reported now."""
        due = {}
        for one in verdicts:
            key = " ".join([one.name, *(str(one.evidence.get(word, "")) for word in ("buffer", "of", "line"))])
            if moment - self._reported.get(key, 0.0) >= _REPEAT_AFTER_S:
                due[key], self._reported[key] = one, moment
        return list(due.values())


def publish_latest(pid: int, latest: WatchPass) -> None:
    """Write a pass where the watched process looks for it."""
    reading = latest.reading
    values = {"reading": reading.as_dict(), "verdicts": [one.as_dict(reading.time) for one in latest.verdicts]}
    agent_files.replace_file(
        agent_files.own_folder() / f"reading-{pid}.json", json.dumps(values, separators=(",", ":")).encode()
    )


def latest_reading(pid: int) -> tuple[MemoryReading, list[WatchVerdict]] | None:
    """Return reading and verdicts of the newest pass; None if there is none yet."""
    content = agent_files.read_small_file(agent_files.own_folder() / f"reading-{pid}.json")
    if content is None:
        return None
    try:
        values = json.loads(content)
        reading = {key: value for key, value in values["reading"].items() if key not in {"kind", "attributed"}}
        reading["parts"] = tuple(AttributedPart(**part) for part in reading["parts"])
        reading["gpu"] = None if reading["gpu"] is None else GpuMemory(**reading["gpu"])
        verdicts = [{key: one[key] for key in one if key not in {"kind", "time"}} for one in values["verdicts"]]
        return MemoryReading(**reading), [WatchVerdict(**one) for one in verdicts]
    except (ValueError, KeyError, TypeError):
        return None

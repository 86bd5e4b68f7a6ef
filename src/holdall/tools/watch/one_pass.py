"""One pass of a watch: a reading, its verdicts, and what is new since the pass before.

In:  a process id and an interval.  Out: passes, in at most 2 % of one core's time; the latest of them in a file that
the watched process can read within microseconds. A verdict is repeated after a minute at the earliest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from holdall.tools.watch.agent_files import PhasePeak, own_folder, read_small_file, replace_file
from holdall.tools.watch.process_watcher import ProcessWatcher
from holdall.tools.watch.reading import AttributedPart, GpuMemory, MemoryReading, ReadingHistory
from holdall.tools.watch.verdicts import WatchVerdict, verdicts_for

_VERDICTS_EVERY_S = 5.0
_SHARE_OF_A_CORE = 0.02
_POLL_AGENT_EVERY_S = 0.25
_REPEAT_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class WatchPass:
    """What a watch knows now."""

    reading: MemoryReading
    verdicts: list[WatchVerdict]
    new_verdicts: list[WatchVerdict]  # that were not reported within the last minute
    phases: dict[str, PhasePeak] = field(default_factory=dict)  # those that went on
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

    def __init__(
        self, pid: int, interval_s: float, limit_bytes: int | None = None, without: Collection[int] = ()
    ) -> None:
        self.watcher = ProcessWatcher(pid, limit_bytes, without)
        self.history = ReadingHistory()
        self._interval_s = interval_s
        self._verdicts: list[WatchVerdict] = []
        self._judged = 0.0
        self._alerts = AlertThrottle()
        self._phases: dict[str, PhasePeak] = {}
        self._last_event = 0.0
        self.pause_s = interval_s

    def run_pass(self) -> WatchPass:
        """Read and judge."""
        begun = time.process_time()
        self._poll_agent()
        reading = self.watcher.read()
        self.history.add(reading)
        new: list[WatchVerdict] = []
        if reading.time - self._judged >= _VERDICTS_EVERY_S or len(self.history.readings) == 1:
            self._judged = reading.time
            self._verdicts = verdicts_for(self.history)
            new = self._alerts.of(self._verdicts, reading.time)
        report = self.watcher.latest_report
        phases = {} if report is None else dict(report.phases)
        changed = {name: phase for name, phase in phases.items() if self._phases.get(name) != phase}
        self._phases = phases
        events = [] if report is None else [event for event in report.events if event[0] > self._last_event]
        self._last_event = max([self._last_event, *(when for when, _ in events)])
        self.pause_s = max(self._interval_s, (time.process_time() - begun) / _SHARE_OF_A_CORE)
        return WatchPass(reading, self._verdicts, new, changed, events)

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
            key = f"{one.name} {one.evidence.get('buffer', one.evidence.get('of', ''))}"
            if moment - self._reported.get(key, 0.0) >= _REPEAT_AFTER_S:
                due[key], self._reported[key] = one, moment
        return list(due.values())


def publish_latest(pid: int, latest: WatchPass) -> None:
    """Write a pass where the watched process looks for it."""
    reading = latest.reading
    values = {"reading": reading.as_dict(), "verdicts": [one.as_dict(reading.time) for one in latest.verdicts]}
    replace_file(own_folder() / f"reading-{pid}.json", json.dumps(values, separators=(",", ":")).encode())


def latest_reading(pid: int) -> tuple[MemoryReading, list[WatchVerdict]] | None:
    """Return reading and verdicts of the newest pass; None if there is none yet."""
    content = read_small_file(own_folder() / f"reading-{pid}.json")
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

"""A record of `holdall watch`, read for a page.

In:  lines.  Out: series over time, the parts of the last reading, phases, verdicts, events.
Memory stays small for long records: only the sums of a reading are kept, as numbers in arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdall.tools.report.charts import Floats
from holdall.tools.report.json_lines import JsonLine

RECORDING_FORMAT = "holdall-watch-1"
GROUP_TITLES = {
    "buffers": "buffers",
    "torch": "torch's heap",
    "python": "Python objects",
    "heap_retained": "heap, kept but free",
    "stacks": "thread stacks",
    "libraries": "libraries",
    "shared": "shared memory",
    "workers": "environment workers",
    "other": "other",
    "unattributed": "not attributed",
}
"""Groups in the order in which they are stacked, and what they are called."""
_GPU = ("requested", "allocated", "reserved", "fragmented", "other", "limit")
_NAN = float("nan")
_MOST_NOTICES = 500


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """A part of the last reading."""

    group: str
    name: str
    resident: float
    allocated: float | None
    fill: float | None


@dataclass(frozen=True, slots=True)
class RecordedPhase:
    """A phase of the run."""

    name: str
    peak: float | None
    count: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """What was found about the run, the last time that it was."""

    name: str
    severity: str
    text: str
    evidence: tuple[tuple[str, Any], ...]
    remedy: str
    time: float | None
    first_time: float | None
    times: int


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """Something that happened."""

    time: float | None
    text: str


@dataclass(slots=True)
class _RecordedSeries:
    """Readings, column by column."""

    time: array[float] = field(default_factory=lambda: array("d"))
    step: array[float] = field(default_factory=lambda: array("d"))
    pss: array[float] = field(default_factory=lambda: array("d"))
    rate: array[float] = field(default_factory=lambda: array("d"))
    pressure: array[float] = field(default_factory=lambda: array("d"))
    groups: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in GROUP_TITLES})
    gpu: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in _GPU})


@dataclass(slots=True)
class Recording:
    """Everything of a file that a page shows; what is not known is nan in a series and None elsewhere."""

    header: JsonLine
    series: _RecordedSeries = field(default_factory=_RecordedSeries)
    parts: list[RecordedPart] = field(default_factory=list)
    phases: dict[str, RecordedPhase] = field(default_factory=dict)
    verdicts: dict[str, RecordedVerdict] = field(default_factory=dict)
    events: list[RecordedEvent] = field(default_factory=list)

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> Recording:
        """Read the rest of a file; kinds that are not known are left out."""
        found = cls(header)
        takers = {"reading": found._reading, "phase": found._phase, "verdict": found._verdict, "event": found._event}
        for line in lines:
            taker = takers.get(line.kind)
            if taker is not None:
                taker(line)
        return found

    @property
    def times(self) -> Floats:
        """Seconds since the first reading."""
        times = np.array(self.series.time)
        return times - times[0] if len(times) else times

    @property
    def pss(self) -> Floats:
        """Proportional set size of the process tree."""
        return np.array(self.series.pss)

    @property
    def limit(self) -> tuple[float, str] | None:
        """The smallest limit on the host's memory, and its name; None if none was recorded."""
        limits = self.header.inner("limits")
        names = {"cgroup": "control group", "memory": "memory of the machine"}
        known = [(limits.size(key) or 0.0, name) for key, name in names.items()] if limits else []
        return min((limit for limit in known if limit[0] > 0), default=None)

    @property
    def vram(self) -> float | None:
        """The GPU's memory, if there is a GPU."""
        limits = self.header.inner("limits")
        recorded = np.array(self.series.gpu["limit"])
        known = recorded[np.isfinite(recorded)]
        return float(known[-1]) if len(known) else (limits.size("vram") if limits else None)

    @property
    def has_gpu(self) -> bool:
        """Whether anything was read of a GPU."""
        return any(np.isfinite(np.array(values)).any() for name, values in self.series.gpu.items() if name != "limit")

    def since_start(self, time: float | None) -> float | None:
        """Return the seconds from the first reading to a moment."""
        return None if time is None or not self.series.time else max(time - self.series.time[0], 0.0)

    def _reading(self, line: JsonLine) -> None:
        series = self.series
        previous = series.time[-1] if series.time else 0.0
        time = line.number("time")
        series.time.append(max(time, previous) if time is not None else previous)  # clocks are set back at times
        series.step.append(_or_nan(line.size("step")))
        series.rate.append(_or_nan(line.size("steps_per_second")))
        series.pressure.append(_or_nan(line.size("pressure")))
        self.parts = [
            RecordedPart(
                group if (group := part.text("group") or "") in GROUP_TITLES else "other",
                part.text("name") or "without a name",
                part.size("resident") or 0.0,
                part.size("allocated"),
                part.size("fill"),
            )
            for part in line.inners("parts")
        ]
        sums = dict.fromkeys(GROUP_TITLES, 0.0)
        for part in self.parts:
            sums[part.group] += part.resident
        pss = line.size("pss")
        series.pss.append(sum(sums.values()) if pss is None else pss)
        for name, total in sums.items():
            series.groups[name].append(total)
        gpu = line.inner("gpu")
        for name in _GPU:
            series.gpu[name].append(_NAN if gpu is None else _or_nan(gpu.size(name)))

    def _phase(self, line: JsonLine) -> None:
        name = line.text("name") or "without a name"
        self.phases[name] = RecordedPhase(name, line.size("peak"), line.size("count"), line.size("seconds"))

    def _verdict(self, line: JsonLine) -> None:
        name = line.text("name") or "without a name"
        before = self.verdicts.get(name)
        if before is None and len(self.verdicts) >= _MOST_NOTICES:
            return
        severity = line.text("severity") or "info"
        time = line.number("time")
        self.verdicts[name] = RecordedVerdict(
            name,
            severity if severity in {"info", "warning", "error"} else "info",
            line.text("text") or "",
            tuple(line.facts("evidence")),
            line.text("remedy") or "",
            time,
            time if before is None else before.first_time,
            1 if before is None else before.times + 1,
        )

    def _event(self, line: JsonLine) -> None:
        if len(self.events) < _MOST_NOTICES:
            self.events.append(RecordedEvent(line.number("time"), line.text("text") or ""))

    def graded(self) -> Iterator[RecordedVerdict]:
        """Yield the verdicts, the most severe first."""
        order = ("error", "warning", "info")
        yield from sorted(self.verdicts.values(), key=lambda verdict: order.index(verdict.severity))


def _or_nan(value: float | None) -> float:
    return _NAN if value is None else value

"""A run that `holdall watch` recorded.

In:  lines of a file.  Out: series over time, the parts of the highest reading, phases, verdicts and events.
A long recording takes little memory: of most readings, only the sums by group are kept, as numbers in arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from holdall.tools.part_groups import GROUP_NAMES
from holdall.tools.report import JsonLine
from holdall.tools.report.page import TONES, Floats

GIVEN_LIMIT = "named for this run"
"""Name of the limit that the user gave."""
_FIGURES = ("step", "steps_per_second", "pressure")
_GPU_FIGURES = ("requested", "allocated", "reserved", "fragmented", "other", "limit")
_MAX_NOTICES = 500
"""Most verdicts, and most events, that are read."""
_NO_NAME = "without a name"


@dataclass(frozen=True, slots=True)
class RecordedPart:
    """A part of a reading."""

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


class RecordedEvidence(NamedTuple):
    """A figure or a text that supports a verdict."""

    name: str
    value: Any
    unit: str


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """A verdict about the run, with the text of its last occurrence."""

    name: str
    severity: str
    text: str
    evidence: tuple[RecordedEvidence, ...]
    remedy: str
    time: float | None
    first_time: float | None
    times: int


class _ReadingColumns(dict[str, "array[float]"]):
    """Readings, column by column. An unknown value is nan."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__({name: array("d") for name in names})

    def append(self, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            self[name].append(np.nan if value is None else value)


@dataclass(slots=True)
class Recording:
    """A recorded run. An unknown value is nan in a series and None elsewhere."""

    header: JsonLine
    series: _ReadingColumns = field(default_factory=lambda: _ReadingColumns(("time", "pss", *_FIGURES)))
    groups: _ReadingColumns = field(default_factory=lambda: _ReadingColumns(GROUP_NAMES))
    gpu: _ReadingColumns = field(default_factory=lambda: _ReadingColumns(_GPU_FIGURES))
    parts: list[RecordedPart] = field(default_factory=list)  # Parts of the highest reading.
    kernel_peak: float = 0.0  # Highest peak that the kernel counted. It also sees peaks between two readings.
    phases: dict[str, RecordedPhase] = field(default_factory=dict)
    verdicts: dict[str, RecordedVerdict] = field(default_factory=dict)
    events: list[tuple[float | None, str]] = field(default_factory=list)  # Time and text.
    _highest_pss: float = -1.0

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> Recording:
        """Read the rest of a file. Unknown kinds of lines are ignored."""
        recording = cls(header)
        adders = {
            "reading": recording._add_reading,
            "phase": recording._add_phase,
            "verdict": recording._add_verdict,
            "event": recording._add_event,
        }
        for line in lines:
            if line.kind in adders:
                adders[line.kind](line)
        return recording

    @property
    def times(self) -> Floats:
        """Seconds since the first reading."""
        times = np.array(self.series["time"])
        return times - times[0] if len(times) else times

    @property
    def pss(self) -> Floats:
        """Proportional set size of the process tree."""
        return np.array(self.series["pss"])

    @property
    def peak(self) -> float:
        """Highest recorded peak: of the process tree at a reading, or of the process at any time."""
        return max(self.kernel_peak, float(self.pss.max())) if len(self.pss) else self.kernel_peak

    @property
    def limit(self) -> tuple[float, str] | None:
        """Smallest limit on the host's memory with its name, or None if no limit was recorded."""
        limits = self.header.inner("limits")
        name_by_key = {"given": GIVEN_LIMIT, "cgroup": "control group", "memory": "memory of the machine"}
        known = [(limits.size(key) or 0.0, name) for key, name in name_by_key.items()] if limits else []
        return min((limit for limit in known if limit[0] > 0), default=None)

    @property
    def vram(self) -> float | None:
        """Bytes of the GPU's memory, or None if no GPU was recorded."""
        limits = self.header.inner("limits")
        recorded = np.array(self.gpu["limit"])
        known = recorded[np.isfinite(recorded)]
        if len(known):
            return float(known[-1])
        return limits.size("vram") if limits else None

    def sort_verdicts(self) -> list[RecordedVerdict]:
        """Return the verdicts, the most severe first."""
        order = ("error", "warning", "info")
        return sorted(self.verdicts.values(), key=lambda verdict: order.index(verdict.severity))

    def count_seconds(self, time: float | None) -> float | None:
        """Return the seconds from the first reading to `time`, or None if one of them is unknown."""
        return None if time is None or not self.series["time"] else max(time - self.series["time"][0], 0.0)

    def _add_reading(self, line: JsonLine) -> None:
        parts = [_read_part(part) for part in line.inners("parts")]
        sums = dict.fromkeys(GROUP_NAMES, 0.0)
        for part in parts:
            sums[part.group] += part.resident
        reported_pss = line.size("pss")
        pss = sum(sums.values()) if reported_pss is None else reported_pss
        if pss > self._highest_pss or not self.parts:
            self._highest_pss = pss
            self.parts = parts
        self.kernel_peak = max(self.kernel_peak, line.size("peak") or 0.0)
        # The clock of a machine may be set back.
        previous_time = self.series["time"][-1] if self.series["time"] else 0.0
        time = line.number("time")
        self.series.append({"time": previous_time if time is None else max(time, previous_time), "pss": pss})
        self.series.append({name: line.size(name) for name in _FIGURES})
        self.groups.append(sums)
        gpu = line.inner("gpu")
        self.gpu.append({name: None if gpu is None else gpu.size(name) for name in _GPU_FIGURES})

    def _add_phase(self, line: JsonLine) -> None:
        name = line.text("name") or _NO_NAME
        self.phases[name] = RecordedPhase(name, line.size("peak"), line.size("count"), line.size("seconds"))

    def _add_verdict(self, line: JsonLine) -> None:
        name = line.text("name") or _NO_NAME
        severity = line.text("severity") or ""
        time = line.number("time")
        before = self.verdicts.get(name)
        if before is None and len(self.verdicts) >= _MAX_NOTICES:
            return
        self.verdicts[name] = RecordedVerdict(
            name,
            severity if severity in TONES else "info",
            line.text("text") or "",
            tuple(_read_evidence(line)),
            line.text("remedy") or "",
            time,
            time if before is None else before.first_time,
            1 if before is None else before.times + 1,
        )

    def _add_event(self, line: JsonLine) -> None:
        if len(self.events) < _MAX_NOTICES:
            self.events.append((line.number("time"), line.text("text") or ""))


def _read_evidence(line: JsonLine) -> Iterator[RecordedEvidence]:
    units = dict(line.facts("units"))
    for name, value in line.facts("evidence"):
        yield RecordedEvidence(name, value, str(units.get(name, "")))


def _read_part(line: JsonLine) -> RecordedPart:
    group = line.text("group") or ""
    name = line.text("name") or _NO_NAME
    if group not in GROUP_NAMES:
        group = "other"
    return RecordedPart(group, name, line.size("resident") or 0.0, line.size("allocated"), line.size("fill"))

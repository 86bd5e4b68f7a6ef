"""Contents of the files that pages show: a run that `holdall watch` recorded, and results of `holdall bench`.

In:  lines of a file, or runs as they end.  Out: for a recording, series over time, the parts of the highest reading,
phases, verdicts and events. For a bench, runs, summaries over the seeds and rankings, which the bench itself uses, too.
For a comparison of buffers, one record for each library and case.
A long recording takes little memory: only the sums of a reading are kept, as numbers in arrays.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from holdall.tools.report import JsonLine
from holdall.tools.report.charts import SEVERITY_SIGNS, Floats

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
"""Titles of the groups, in the order of the stack."""
_MEASURED = ("step", "steps_per_second", "pressure")
NAMED_LIMIT = "named for this run"
_GPU = ("requested", "allocated", "reserved", "fragmented", "other", "limit")
_MOST_NOTICES = 500
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


@dataclass(frozen=True, slots=True)
class RecordedVerdict:
    """A verdict about the run, with the text of its last occurrence."""

    name: str
    severity: str
    text: str
    evidence: tuple[tuple[str, Any], ...]
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
    series: _ReadingColumns = field(default_factory=lambda: _ReadingColumns(("time", "pss", *_MEASURED)))
    groups: _ReadingColumns = field(default_factory=lambda: _ReadingColumns(GROUP_TITLES))
    gpu: _ReadingColumns = field(default_factory=lambda: _ReadingColumns(_GPU))
    parts: list[RecordedPart] = field(default_factory=list)  # Parts of the highest reading.
    kernel_peak: float = 0.0  # Highest peak that the kernel counted. It also sees peaks between two readings.
    phases: dict[str, RecordedPhase] = field(default_factory=dict)
    verdicts: dict[str, RecordedVerdict] = field(default_factory=dict)
    events: list[tuple[float | None, str]] = field(default_factory=list)  # Time and text.
    _highest: float = -1.0

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> Recording:
        """Read the rest of a file. Unknown kinds of lines are ignored."""
        found = cls(header)
        takers = {"reading": found._reading, "phase": found._phase, "verdict": found._verdict, "event": found._event}
        for line in lines:
            if line.kind in takers:
                takers[line.kind](line)
        return found

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
        names = {"given": NAMED_LIMIT, "cgroup": "control group", "memory": "memory of the machine"}
        known = [(limits.size(key) or 0.0, name) for key, name in names.items()] if limits else []
        return min((limit for limit in known if limit[0] > 0), default=None)

    @property
    def vram(self) -> float | None:
        """The GPU's memory, if there is a GPU."""
        limits = self.header.inner("limits")
        recorded = np.array(self.gpu["limit"])
        known = recorded[np.isfinite(recorded)]
        if len(known):
            return float(known[-1])
        return limits.size("vram") if limits else None

    def graded(self) -> list[RecordedVerdict]:
        """Return the verdicts, the most severe first."""
        order = ("error", "warning", "info")
        return sorted(self.verdicts.values(), key=lambda verdict: order.index(verdict.severity))

    def since_start(self, time: float | None) -> float | None:
        """Return the seconds from the first reading to a moment."""
        return None if time is None or not self.series["time"] else max(time - self.series["time"][0], 0.0)

    def _reading(self, line: JsonLine) -> None:
        previous = self.series["time"][-1] if self.series["time"] else 0.0
        time = line.number("time")
        parts = [_part(part) for part in line.inners("parts")]
        sums = dict.fromkeys(GROUP_TITLES, 0.0)
        for part in parts:
            sums[part.group] += part.resident
        reported = line.size("pss")
        gpu = line.inner("gpu")
        pss = sum(sums.values()) if reported is None else reported
        self.series.append({name: line.size(name) for name in _MEASURED})
        self.series.append(
            {"time": previous if time is None else max(time, previous), "pss": pss}
        )  # A clock may go back.
        if pss > self._highest or not self.parts:
            self._highest = pss
            self.parts = parts
        self.kernel_peak = max(self.kernel_peak, line.size("peak") or 0.0)
        self.groups.append(sums)
        self.gpu.append({name: None if gpu is None else gpu.size(name) for name in _GPU})

    def _phase(self, line: JsonLine) -> None:
        name = line.text("name") or _NO_NAME
        self.phases[name] = RecordedPhase(name, line.size("peak"), line.size("count"), line.size("seconds"))

    def _verdict(self, line: JsonLine) -> None:
        name = line.text("name") or _NO_NAME
        severity = line.text("severity") or ""
        time = line.number("time")
        before = self.verdicts.get(name)
        if before is None and len(self.verdicts) >= _MOST_NOTICES:
            return
        self.verdicts[name] = RecordedVerdict(
            name,
            severity if severity in SEVERITY_SIGNS else "info",
            line.text("text") or "",
            tuple(line.facts("evidence")),
            line.text("remedy") or "",
            time,
            time if before is None else before.first_time,
            1 if before is None else before.times + 1,
        )

    def _event(self, line: JsonLine) -> None:
        if len(self.events) < _MOST_NOTICES:
            self.events.append((line.number("time"), line.text("text") or ""))


def _part(line: JsonLine) -> RecordedPart:
    group = line.text("group") or ""
    name = line.text("name") or _NO_NAME
    known = group if group in GROUP_TITLES else "other"
    return RecordedPart(known, name, line.size("resident") or 0.0, line.size("allocated"), line.size("fill"))


PHASES = ("construct", "collect", "fill", "flatten", "train", "save", "load")
"""Phases of a training in their order. Other phases follow in the order of the file."""
_MOST_RUNS = 10_000
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1. `_NORMAL` counts for more."""
_NORMAL = 1.96

ProfileAndBuffer = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training, or the reason why it was not done. A figure that was not measured is None."""

    profile: str
    buffer: str
    seed: int
    status: str  # "done", "failed", "stopped" or "does not fit".
    size: int  # Capacity of a replay buffer, or steps of a rollout.
    batch_size: int
    steps: int = 0
    filled: float = 0.0  # Share of the buffer that was full before training was measured.
    steps_per_second: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)
    bytes_per_transition: float | None = None
    rewards: tuple[float, ...] = ()
    checkpoint: Mapping[str, Any] | None = None
    seconds: float | None = 0.0
    reason: str | None = None

    @classmethod
    def read(cls, line: JsonLine) -> TrainingRun:
        """Read a line of a file. Unknown keys are ignored."""
        counts = {name: int(line.size(name) or 0) for name in ("size", "batch_size", "steps")}
        return cls(
            **counts,
            profile=line.text("profile") or "without a name",
            buffer=line.text("buffer") or "without a name",
            seed=int(line.number("seed") or 0),
            status=line.text("status") or "not known",
            filled=line.size("filled") or 0.0,
            steps_per_second=line.size("steps_per_second"),
            peaks={name: size or 0.0 for name, size in (line.sizes("peaks") or {}).items()},
            bytes_per_transition=line.number("bytes_per_transition"),
            rewards=tuple(line.numbers("rewards")),
            checkpoint=line.sizes("checkpoint"),
            seconds=line.size("seconds"),
            reason=line.text("reason"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": "run"} | asdict(self)

    @property
    def key(self) -> tuple[str, str, int]:
        """Profile, buffer and seed, which identify the run."""
        return self.profile, self.buffer, self.seed

    @property
    def reward(self) -> float | None:
        """Mean return of the episodes in the later half of training."""
        return fmean(self.rewards[len(self.rewards) // 2 :]) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and the half width of its 95 % interval, which is None for a single run."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of at least one value."""
        count = len(values)
        if count < 2:
            return cls(fmean(values), None)
        quantile = _QUANTILES[count - 2] if count - 2 < len(_QUANTILES) else _NORMAL
        return cls(fmean(values), quantile * stdev(values) / sqrt(count))

    @property
    def low(self) -> float:
        """Lower end, or the mean of a single run."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """Upper end, or the mean of a single run."""
        return self.mean + (self.half or 0.0)

    def overlaps(self, other: Interval) -> bool:
        """Return whether two means may be equal: their intervals overlap, or one of them is unknown."""
        if self.half is None or other.half is None:
            return True
        return abs(self.mean - other.mean) <= self.half + other.half


@dataclass(frozen=True, slots=True)
class SeedsSummary:
    """All seeds of one profile with one buffer."""

    profile: str
    buffer: str
    runs: tuple[TrainingRun, ...]

    @property
    def name(self) -> ProfileAndBuffer:
        """Profile and buffer."""
        return self.profile, self.buffer

    @property
    def done(self) -> list[TrainingRun]:
        """Runs that were completed."""
        return [run for run in self.runs if run.status == "done"]

    @property
    def peaks(self) -> dict[str, float]:
        """Median peak of every phase."""
        names = dict.fromkeys(name for run in self.done for name in run.peaks)
        ordered = sorted(names, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
        return {name: median(run.peaks.get(name, 0.0) for run in self.done) for name in ordered}

    @property
    def peak(self) -> float | None:
        """Median of the largest peaks."""
        return _median(max(run.peaks.values(), default=None) for run in self.done)

    @property
    def speed(self) -> Interval | None:
        """Steps a second."""
        return _interval(run.steps_per_second for run in self.done)

    @property
    def reward(self) -> Interval | None:
        """Mean return of an episode."""
        return _interval(run.reward for run in self.done)

    @property
    def bytes_per_transition(self) -> float | None:
        """Median over the seeds."""
        return _median(run.bytes_per_transition for run in self.done)

    def checkpoint(self, what: str) -> float | None:
        """Median of one figure of saving: seconds, bytes or extra."""
        return _median((run.checkpoint or {}).get(what) for run in self.done)


def summaries(runs: Iterable[TrainingRun]) -> list[SeedsSummary]:
    """Gather the seeds of every profile and buffer."""
    found: dict[ProfileAndBuffer, list[TrainingRun]] = {}
    for run in runs:
        found.setdefault((run.profile, run.buffer), []).append(run)
    return [SeedsSummary(*name, tuple(seeds)) for name, seeds in found.items()]


@dataclass(frozen=True, slots=True)
class ProfileRanking:
    """An order with the best first, or the reason why nothing is ranked."""

    by: str
    order: Sequence[ProfileAndBuffer]
    refused: str | None = None
    same: Sequence[
        tuple[ProfileAndBuffer, ProfileAndBuffer]
    ] = ()  # Neighbours in the order that do not differ clearly.

    @classmethod
    def read(cls, line: JsonLine) -> ProfileRanking:
        """Read a line of a file."""
        same = tuple(line.pair_pairs("same"))
        return cls(line.text("by") or "something", tuple(line.pairs("order")), line.text("refused"), same)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": "ranking"} | asdict(self)


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a bench."""

    header: JsonLine
    summaries: Sequence[SeedsSummary]
    rankings: Sequence[ProfileRanking]

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> Results:
        """Read the rest of a file. The last of two equal runs or rankings counts."""
        runs: dict[tuple[str, str, int], TrainingRun] = {}
        rankings: dict[str, ProfileRanking] = {}
        for line in lines:
            if line.kind == "run" and len(runs) < _MOST_RUNS:
                run = TrainingRun.read(line)
                runs[run.key] = run
            elif line.kind == "ranking":
                ranking = ProfileRanking.read(line)
                rankings[ranking.by] = ranking
        return cls(header, summaries(runs.values()), list(rankings.values()))

    @property
    def profiles(self) -> list[str]:
        """Names of the profiles, in the file's order."""
        return list(dict.fromkeys(summary.profile for summary in self.summaries))

    @property
    def buffers(self) -> list[str]:
        """Names of the buffers, in the file's order."""
        return list(dict.fromkeys(summary.buffer for summary in self.summaries))

    def of(self, profile: str, buffer: str) -> SeedsSummary | None:
        """Return one summary."""
        return next((one for one in self.summaries if one.name == (profile, buffer)), None)


def _interval(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.of(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


_MOST_RECORDS = 5_000


@dataclass(frozen=True, slots=True)
class BufferFigures:
    """Figures of one library in one case. A figure that was not measured is None."""

    library: str
    version: str
    case: str
    transitions: float | None
    nbytes: float | None
    add_us: float | None
    sample_ms: float | None
    save_s: float | None
    load_s: float | None
    exact: bool | None
    note: str
    laps: float | None  # Number of times that the trace was played, if it was played more than once.

    @property
    def bytes_per_transition(self) -> float | None:
        """Bytes of one transition."""
        return self.nbytes / self.transitions if self.nbytes is not None and self.transitions else None


@dataclass(frozen=True, slots=True)
class BufferResults:
    """Results of a comparison of buffers."""

    header: JsonLine
    measured: tuple[BufferFigures, ...]
    absent: tuple[tuple[str, str], ...]  # Library and case, and the reason.

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> BufferResults:
        """Read the rest of a file. The last of two equal records counts."""
        found: dict[tuple[str, str], BufferFigures] = {}
        absent: dict[tuple[str, str], str] = {}
        for line in lines:
            if line.kind == "buffer" and len(found) < _MOST_RECORDS:
                one = _read_figures(line)
                found[one.case, one.library] = one
            elif line.kind == "absent" and len(absent) < _MOST_RECORDS:
                absent[line.text("case") or "", line.text("library") or ""] = line.text("reason") or ""
        named = {" on ".join(part for part in (library, case) if part): why for (case, library), why in absent.items()}
        return cls(header, tuple(found.values()), tuple(named.items()))

    @property
    def cases(self) -> list[str]:
        """Names of the cases, in the file's order."""
        return list(dict.fromkeys(one.case for one in self.measured))


def _read_figures(line: JsonLine) -> BufferFigures:
    values: dict[str, Any] = {name: line.text(name) or "without a name" for name in ("library", "case")}
    values |= {name: line.text(name) or "" for name in ("version", "note")}
    values |= {name: line.size(name) for name in ("transitions", "add_us", "sample_ms", "save_s", "load_s", "laps")}
    return BufferFigures(**values, nbytes=line.size("bytes"), exact=line.flag("exact"))

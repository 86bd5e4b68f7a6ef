"""Results of `holdall bench` and `holdall bench buffers`, as they are recorded.

In:  lines of a file, or runs as they end.  Out: runs, what the seeds of one profile come to, and rankings, which the
bench and its page share; of buffers one record for each library and case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from holdall.tools.report.json_lines import JsonLine

BENCH_FORMAT = "holdall-bench-1"
PHASES = ("construct", "collect", "fill", "flatten", "train", "save", "load")
"""Phases in the order in which they come; others follow in the file's order."""
_MOST_RUNS = 10_000
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 % on both sides, by degrees of freedom from 1 on; the normal one beyond."""
_NORMAL = 1.96

ProfileAndBuffer = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training, or why there is none; what was not measured is None."""

    profile: str
    buffer: str
    seed: int
    status: str  # done, failed, stopped, does not fit
    size: int  # capacity of a replay buffer, or steps of a rollout
    batch_size: int
    steps: int = 0
    filled: float = 0.0  # share of the buffer that was full before training was measured
    steps_per_second: float | None = None
    peaks: Mapping[str, float] = field(default_factory=dict)
    bytes_per_transition: float | None = None
    rewards: tuple[float, ...] = ()
    checkpoint: Mapping[str, Any] | None = None
    seconds: float | None = 0.0
    reason: str | None = None

    @classmethod
    def read(cls, line: JsonLine) -> TrainingRun:
        """Read a line of a file; keys that are not known are skipped."""
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
        """What names it."""
        return self.profile, self.buffer, self.seed

    @property
    def reward(self) -> float | None:
        """Mean return of the episodes in the later half of training."""
        return fmean(self.rewards[len(self.rewards) // 2 :]) if self.rewards else None


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where the true one lies with 95 %; None: one run alone does not show it."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Work it out; there is at least one value."""
        count = len(values)
        if count < 2:
            return cls(fmean(values), None)
        quantile = _QUANTILES[count - 2] if count - 2 < len(_QUANTILES) else _NORMAL
        return cls(fmean(values), quantile * stdev(values) / sqrt(count))

    @property
    def low(self) -> float:
        """The lower end; the mean itself if there is no interval."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """The upper end, likewise."""
        return self.mean + (self.half or 0.0)

    def overlaps(self, other: Interval) -> bool:
        """Whether the two do not differ clearly."""
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
        """The runs that ended."""
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
    """An order, the best first; or why there is none."""

    by: str
    order: Sequence[ProfileAndBuffer]
    refused: str | None = None
    same: Sequence[tuple[ProfileAndBuffer, ProfileAndBuffer]] = ()  # neighbours in the order with no clear difference

    @classmethod
    def read(cls, line: JsonLine) -> ProfileRanking:
        """Read a line of a file."""
        order, refused = tuple(line.pairs("order")), line.text("refused")
        return cls(line.text("by") or "something", order, refused, tuple(line.pair_pairs("same")))

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": "ranking"} | asdict(self)


@dataclass(frozen=True, slots=True)
class Results:
    """Everything of a file that a page shows."""

    header: JsonLine
    summaries: Sequence[SeedsSummary]
    rankings: Sequence[ProfileRanking]

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> Results:
        """Read the rest of a file; of runs and rankings that are there twice the last counts."""
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


BUFFERS_FORMAT = "holdall-bench-buffers-1"
_MOST_RECORDS = 5_000


@dataclass(frozen=True, slots=True)
class BufferFigures:
    """One library on one case; what was not measured is None."""

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
    laps: float | None  # how often the trace was played over, if more than once

    @property
    def bytes_per_transition(self) -> float | None:
        """What one transition takes."""
        return self.nbytes / self.transitions if self.nbytes is not None and self.transitions else None


@dataclass(frozen=True, slots=True)
class BufferResults:
    """Everything of a file that a page shows."""

    header: JsonLine
    measured: tuple[BufferFigures, ...]
    absent: tuple[tuple[str, str], ...]  # what, and why

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> BufferResults:
        """Read the rest of a file; of records that are there twice the last counts."""
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

"""Results of `holdall bench`, for the bench and for its pages.

In:  lines of a file, or runs as they end.  Out: runs, summaries over the seeds of a profile, and rankings. For a
comparison of buffers, one record for each library and case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from statistics import fmean, median, stdev
from typing import Any

from holdall.tools.report import JsonLine

PHASES = ("construct", "collect", "fill", "flatten", "train", "save", "load")
"""Phases of a training in their order. Other phases follow in the order of the file."""
_MAX_RUNS = 10_000
_MAX_RECORDS = 5_000
_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for a two-sided 95 % interval, for 1 degree of freedom and more."""
_NORMAL_QUANTILE = 1.96
"""Quantile for more degrees of freedom than `_QUANTILES` has."""

ProfileAndBuffer = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training, or the reason why it was not done. A figure that was not measured is None."""

    profile: str
    buffer: str
    seed: int
    status: str  # "done", "failed", "stopped" or "does not fit".
    size: int  # Capacity of a replay buffer in transitions, or steps of a rollout.
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
            peaks={name: size for name, size in (line.sizes("peaks") or {}).items() if size is not None},
            bytes_per_transition=line.number("bytes_per_transition"),
            rewards=tuple(line.numbers("rewards")),
            checkpoint=line.sizes("checkpoint"),
            seconds=line.size("seconds"),
            reason=line.text("reason"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the run as plain data, as it is written to a file."""
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
        quantile = _QUANTILES[count - 2] if count - 2 < len(_QUANTILES) else _NORMAL_QUANTILE
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
        """Median peak of every phase, over the runs in which it was measured."""
        names = dict.fromkeys(name for run in self.done for name in run.peaks)
        ordered = sorted(names, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
        return {name: median(run.peaks[name] for run in self.done if name in run.peaks) for name in ordered}

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

    def compute_checkpoint(self, figure: str) -> float | None:
        """Return the median of one figure of saving: `seconds`, `bytes` or `extra`."""
        return _median((run.checkpoint or {}).get(figure) for run in self.done)


def summarize_seeds(runs: Iterable[TrainingRun]) -> list[SeedsSummary]:
    """Return one summary of all seeds for every profile and buffer."""
    runs_by_name: dict[ProfileAndBuffer, list[TrainingRun]] = {}
    for run in runs:
        runs_by_name.setdefault((run.profile, run.buffer), []).append(run)
    return [SeedsSummary(*name, tuple(seeds)) for name, seeds in runs_by_name.items()]


@dataclass(frozen=True, slots=True)
class ProfileRanking:
    """An order with the best first, or the reason why nothing is ranked."""

    by: str
    order: Sequence[ProfileAndBuffer]
    refused: str | None = None
    same: Sequence[tuple[ProfileAndBuffer, ProfileAndBuffer]] = ()
    """Neighbours in the order that do not differ clearly."""

    @classmethod
    def read(cls, line: JsonLine) -> ProfileRanking:
        """Read a line of a file."""
        same = tuple(line.pair_pairs("same"))
        return cls(line.text("by") or "something", tuple(line.pairs("order")), line.text("refused"), same)

    def as_dict(self) -> dict[str, Any]:
        """Return the ranking as plain data, as it is written to a file."""
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
            if line.kind == "run" and len(runs) < _MAX_RUNS:
                run = TrainingRun.read(line)
                runs[run.key] = run
            elif line.kind == "ranking":
                ranking = ProfileRanking.read(line)
                rankings[ranking.by] = ranking
        return cls(header, summarize_seeds(runs.values()), list(rankings.values()))

    @property
    def profiles(self) -> list[str]:
        """Names of the profiles, in the file's order."""
        return list(dict.fromkeys(summary.profile for summary in self.summaries))

    @property
    def buffers(self) -> list[str]:
        """Names of the buffers, in the file's order."""
        return list(dict.fromkeys(summary.buffer for summary in self.summaries))

    def find_summary(self, profile: str, buffer: str) -> SeedsSummary | None:
        """Return the summary of a profile with a buffer."""
        return next((one for one in self.summaries if one.name == (profile, buffer)), None)


def _interval(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.of(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


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
        measured: dict[tuple[str, str], BufferFigures] = {}
        absent: dict[str, str] = {}
        for line in lines:
            if line.kind == "buffer" and len(measured) < _MAX_RECORDS:
                one = _read_figures(line)
                measured[one.case, one.library] = one
            elif line.kind == "absent" and len(absent) < _MAX_RECORDS:
                name = " on ".join(filter(None, (line.text("library"), line.text("case"))))
                absent[name] = line.text("reason") or ""
        return cls(header, tuple(measured.values()), tuple(absent.items()))

    @property
    def cases(self) -> list[str]:
        """Names of the cases, in the file's order."""
        return list(dict.fromkeys(one.case for one in self.measured))


def _read_figures(line: JsonLine) -> BufferFigures:
    values: dict[str, Any] = {name: line.text(name) or "without a name" for name in ("library", "case")}
    values |= {name: line.text(name) or "" for name in ("version", "note")}
    values |= {name: line.size(name) for name in ("transitions", "add_us", "sample_ms", "save_s", "load_s", "laps")}
    return BufferFigures(**values, nbytes=line.size("bytes"), exact=line.flag("exact"))

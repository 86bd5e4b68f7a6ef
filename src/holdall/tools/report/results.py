"""Results of `holdall bench`, read for a page.

In:  lines.  Out: one summary for each profile and buffer, the rankings, and the runs that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from holdall.tools.interval import Interval
from holdall.tools.report.json_lines import JsonLine

BENCH_FORMAT = "holdall-bench-1"
PHASES = ("construct", "collect", "fill", "flatten", "train", "save", "load")
"""Phases in the order in which they come; others follow in the file's order."""
SummaryName = tuple[str, str]  # profile and buffer
_MOST_RUNS = 10_000


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """One training; what was not measured is None."""

    profile: str
    buffer: str
    seed: int
    status: str
    reason: str
    filled: float | None
    speed: float | None
    bytes_per_transition: float | None
    reward: float | None  # mean of the episodes in the later half of training
    peaks: tuple[tuple[str, float], ...]
    checkpoint: tuple[tuple[str, float | None], ...]
    seconds: float | None

    @classmethod
    def read(cls, line: JsonLine) -> ReportedRun:
        """Read one."""
        rewards = line.numbers("rewards")
        peaks, checkpoint = line.inner("peaks"), line.inner("checkpoint")
        return cls(
            line.text("profile") or "without a name",
            line.text("buffer") or "without a name",
            int(line.number("seed") or 0),
            line.text("status") or "not known",
            line.text("reason") or "",
            line.size("filled"),
            line.size("steps_per_second"),
            line.size("bytes_per_transition"),
            fmean(rewards[len(rewards) // 2 :]) if rewards else None,
            tuple((name, peaks.size(name) or 0.0) for name in peaks.names()) if peaks else (),
            tuple((name, checkpoint.size(name)) for name in ("seconds", "bytes", "extra")) if checkpoint else (),
            line.size("seconds"),
        )


@dataclass(frozen=True, slots=True)
class SeedsSummary:
    """All seeds of one profile with one buffer."""

    profile: str
    buffer: str
    runs: tuple[ReportedRun, ...]

    @property
    def name(self) -> SummaryName:
        """Profile and buffer."""
        return self.profile, self.buffer

    @property
    def done(self) -> list[ReportedRun]:
        """The runs that ended."""
        return [run for run in self.runs if run.status == "done"]

    @property
    def peaks(self) -> dict[str, float]:
        """Median peak of every phase."""
        names = dict.fromkeys(name for run in self.done for name, _ in run.peaks)
        ordered = sorted(names, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
        return {name: median(dict(run.peaks).get(name, 0.0) for run in self.done) for name in ordered}

    @property
    def peak(self) -> float | None:
        """Median of the largest peaks."""
        found = [max((size for _, size in run.peaks), default=0.0) for run in self.done if run.peaks]
        return median(found) if found else None

    @property
    def speed(self) -> Interval | None:
        """Steps a second."""
        return _interval(run.speed for run in self.done)

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
        return _median(dict(run.checkpoint).get(what) for run in self.done)


@dataclass(frozen=True, slots=True)
class ReportedRanking:
    """An order, the best first; or why there is none."""

    by: str
    order: tuple[SummaryName, ...]
    refused: str
    tied_with_next: frozenset[SummaryName]  # that cannot be told apart from what follows


@dataclass(frozen=True, slots=True)
class Results:
    """Everything of a file that a page shows."""

    header: JsonLine
    summaries: tuple[SeedsSummary, ...]
    rankings: tuple[ReportedRanking, ...]

    @classmethod
    def read(cls, header: JsonLine, lines: Iterable[JsonLine]) -> Results:
        """Read the rest of a file; of runs and rankings that are there twice the last counts."""
        runs: dict[tuple[str, str, int], ReportedRun] = {}
        rankings: dict[str, ReportedRanking] = {}
        for line in lines:
            if line.kind == "run" and len(runs) < _MOST_RUNS:
                run = ReportedRun.read(line)
                runs[run.profile, run.buffer, run.seed] = run
            elif line.kind == "ranking":
                by = line.text("by") or "something"
                tied = frozenset(pair[0] for pair in line.pair_pairs("same"))
                rankings[by] = ReportedRanking(by, tuple(line.pairs("order")), line.text("refused") or "", tied)
        names = dict.fromkeys((run.profile, run.buffer) for run in runs.values())
        summaries = (
            SeedsSummary(*name, tuple(run for run in runs.values() if (run.profile, run.buffer) == name))
            for name in names
        )
        return cls(header, tuple(summaries), tuple(rankings.values()))

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

    def not_done(self) -> Iterator[ReportedRun]:
        """Yield what did not end well."""
        for summary in self.summaries:
            yield from (run for run in summary.runs if run.status != "done")


def _interval(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.of(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None

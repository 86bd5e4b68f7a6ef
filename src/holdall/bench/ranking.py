"""Which is best, where that can be told: medians, intervals, and refusals.

In:  runs.  Out: an order by memory, by speed and by reward; or why there is none.
Invariant: nothing is ranked by memory that was not filled, and by nothing where the seeds do not tell it apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from holdall.bench.result import Run
from holdall.tools.interval import Interval

_SAME = 0.05
"""Peaks that differ by less count as the same: two benches of one setting differed by up to 2.6 % in one profile, since
its size follows from what the trials happened to take."""
_NEARLY_FULL = 0.999

Name = tuple[str, str]  # profile and buffer


@dataclass(frozen=True, slots=True)
class Summary:
    """All seeds of one profile with one buffer."""

    name: Name
    runs: tuple[Run, ...]

    @property
    def done(self) -> tuple[Run, ...]:
        """Those that ended."""
        return tuple(run for run in self.runs if run.status == "done")

    @property
    def peak_bytes(self) -> int:
        """Median of the peaks."""
        return int(median(run.peak_bytes for run in self.done)) if self.done else 0

    @property
    def bytes_per_transition(self) -> float | None:
        """Median of the slopes."""
        found = [run.bytes_per_transition for run in self.done if run.bytes_per_transition is not None]
        return median(found) if found else None

    @property
    def speed(self) -> Interval | None:
        """Steps per second."""
        found = [run.steps_per_second for run in self.done if run.steps_per_second is not None]
        return Interval.of(found) if found else None

    @property
    def reward(self) -> Interval | None:
        """What episodes of the later half of training returned, on average."""
        means = [fmean(run.rewards[len(run.rewards) // 2 :]) for run in self.done if run.rewards]
        return Interval.of(means) if means else None

    def checkpoint(self, what: str) -> float | None:
        """Median of one figure of saving."""
        found = [run.checkpoint[what] for run in self.done if run.checkpoint and run.checkpoint.get(what) is not None]
        return median(found) if found else None


@dataclass(frozen=True, slots=True)
class Ranking:
    """An order, the best first; or why there is none."""

    by: str
    order: tuple[Name, ...]
    refused: str | None = None
    same: tuple[tuple[Name, Name], ...] = ()  # neighbours in the order that cannot be told apart

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": "ranking",
            "by": self.by,
            "order": [list(name) for name in self.order],
            "refused": self.refused,
            "same": [[list(one), list(other)] for one, other in self.same],
        }


def summaries(runs: Sequence[Run]) -> list[Summary]:
    """Gather the seeds of every profile and buffer."""
    names = dict.fromkeys((run.profile, run.buffer) for run in runs)
    return [Summary(name, tuple(run for run in runs if (run.profile, run.buffer) == name)) for name in names]


def rankings(runs: Sequence[Run], missing: int = 0) -> list[Ranking]:
    """Rank by memory, speed and reward; nothing, while runs are missing."""
    if missing:
        why = f"{missing} runs are missing; --resume makes them"
        return [Ranking(by, (), why) for by in ("memory", "speed", "reward")]
    known = summaries(runs)
    measured = [summary for summary in known if summary.done]
    return [_by_memory(known, measured), _by_speed(measured), _by_reward(measured)]


def _by_memory(known: Sequence[Summary], measured: Sequence[Summary]) -> Ranking:
    for summary in known:
        for run in summary.runs:
            if run.status == "done" and run.filled < _NEARLY_FULL:
                held, named = int(run.filled * run.size), " with ".join(summary.name)
                why = f"{named} held {held:,} of {run.size:,} transitions when it was measured"
                return Ranking("memory", (), f"{why}: fill the buffers, or what they would take is not seen")
            if run.status in {"failed", "stopped"}:
                return Ranking("memory", (), f"{' with '.join(summary.name)} {run.status}; --resume runs it again")
    if not measured:
        return Ranking("memory", (), "nothing was measured")
    groups = _alike(measured)
    names = tuple(summary.name for group in groups for summary in group)
    same = tuple((one.name, other.name) for group in groups for one, other in pairwise(group))
    return Ranking("memory", names, None, same)


def _alike(measured: Sequence[Summary]) -> list[list[Summary]]:
    """Group peaks that count as the same; within a group, the order is that of the profiles, in every bench."""
    groups: list[list[Summary]] = []
    last = 0
    for summary in sorted(measured, key=lambda summary: summary.peak_bytes):
        if groups and summary.peak_bytes - last < _SAME * last:
            groups[-1].append(summary)
        else:
            groups.append([summary])
        last = summary.peak_bytes
    return [sorted(group, key=measured.index) for group in groups]


def _by_speed(measured: Sequence[Summary]) -> Ranking:
    return _by_interval("speed", [(summary.name, summary.speed) for summary in measured])


def _by_reward(measured: Sequence[Summary]) -> Ranking:
    return _by_interval("reward", [(summary.name, summary.reward) for summary in measured])


def _by_interval(by: str, found: Sequence[tuple[Name, Interval | None]]) -> Ranking:
    known = sorted(((name, value) for name, value in found if value is not None), key=lambda pair: -pair[1].mean)
    if not known:
        return Ranking(by, (), f"no {by} was measured")
    if any(interval.half is None for _, interval in known):
        return Ranking(by, (), "one seed says nothing of how far another would be from it; give --seeds 3 or more")
    pairs = list(pairwise(known))
    same = [(one[0], other[0]) for one, other in pairs if one[1].overlaps(other[1])]
    if pairs and len(same) == len(pairs):
        return Ranking(by, (), "the intervals of all neighbours overlap; more seeds or steps would tell them apart")
    return Ranking(by, tuple(name for name, _ in known), None, tuple(same))

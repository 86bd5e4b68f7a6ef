"""Rank profiles and buffers by memory, speed and reward, and print the table.

Runs are not ranked by memory if a buffer was not full, and not ranked at all where the seeds do not separate them;
then the reason is given instead of an order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdall.tools.bench.run import TrainingRun
from holdall.tools.interval import Interval
from holdall.units import format_bytes

_SAME_PEAK_SHARE = 0.05
"""Peaks that differ by less count as the same: two benches of one setting differed by up to 2.6 % in one profile, since
its size follows from what the trials happened to take."""
_NEARLY_FULL = 0.999

ProfileAndBuffer = tuple[str, str]  # profile and buffer
_HEADS = ("profile", "buffer", "holds", "batch", "peak memory", "per transition", "steps/s", "reward", "checkpoint")
_BEST = {"memory": "Least memory", "speed": "Fastest", "reward": "Highest reward"}


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """All seeds of one profile with one buffer."""

    name: ProfileAndBuffer
    runs: tuple[TrainingRun, ...]

    @property
    def done(self) -> tuple[TrainingRun, ...]:
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
class ProfileRanking:
    """An order, the best first; or why there is none."""

    by: str
    order: tuple[ProfileAndBuffer, ...]
    refused: str | None = None
    same: tuple[
        tuple[ProfileAndBuffer, ProfileAndBuffer], ...
    ] = ()  # neighbours in the order that cannot be told apart

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": "ranking",
            "by": self.by,
            "order": [list(name) for name in self.order],
            "refused": self.refused,
            "same": [[list(one), list(other)] for one, other in self.same],
        }


def summaries(runs: Sequence[TrainingRun]) -> list[ProfileSummary]:
    """Gather the seeds of every profile and buffer."""
    names = dict.fromkeys((run.profile, run.buffer) for run in runs)
    return [ProfileSummary(name, tuple(run for run in runs if (run.profile, run.buffer) == name)) for name in names]


def rankings(runs: Sequence[TrainingRun], missing: int = 0) -> list[ProfileRanking]:
    """Rank by memory, speed and reward; nothing, while runs are missing."""
    if missing:
        why = f"{missing} runs are missing; --resume makes them"
        return [ProfileRanking(by, (), why) for by in ("memory", "speed", "reward")]
    known = summaries(runs)
    measured = [summary for summary in known if summary.done]
    return [_by_memory(known, measured), _by_speed(measured), _by_reward(measured)]


def _by_memory(known: Sequence[ProfileSummary], measured: Sequence[ProfileSummary]) -> ProfileRanking:
    for summary in known:
        for run in summary.runs:
            if run.status == "done" and run.filled < _NEARLY_FULL:
                held, named = int(run.filled * run.size), " with ".join(summary.name)
                why = f"{named} held {held:,} of {run.size:,} transitions when it was measured"
                return ProfileRanking("memory", (), f"{why}: fill the buffers, or what they would take is not seen")
            if run.status in {"failed", "stopped"}:
                return ProfileRanking(
                    "memory", (), f"{' with '.join(summary.name)} {run.status}; --resume runs it again"
                )
    if not measured:
        return ProfileRanking("memory", (), "nothing was measured")
    groups = _group_similar_peaks(measured)
    names = tuple(summary.name for group in groups for summary in group)
    same = tuple((one.name, other.name) for group in groups for one, other in pairwise(group))
    return ProfileRanking("memory", names, None, same)


def _group_similar_peaks(measured: Sequence[ProfileSummary]) -> list[list[ProfileSummary]]:
    """Group peaks that count as the same; within a group, the order is that of the profiles, in every bench."""
    groups: list[list[ProfileSummary]] = []
    last = 0
    for summary in sorted(measured, key=lambda summary: summary.peak_bytes):
        if groups and summary.peak_bytes - last < _SAME_PEAK_SHARE * last:
            groups[-1].append(summary)
        else:
            groups.append([summary])
        last = summary.peak_bytes
    return [sorted(group, key=measured.index) for group in groups]


def _by_speed(measured: Sequence[ProfileSummary]) -> ProfileRanking:
    return _by_interval("speed", [(summary.name, summary.speed) for summary in measured])


def _by_reward(measured: Sequence[ProfileSummary]) -> ProfileRanking:
    return _by_interval("reward", [(summary.name, summary.reward) for summary in measured])


def _by_interval(by: str, found: Sequence[tuple[ProfileAndBuffer, Interval | None]]) -> ProfileRanking:
    known = sorted(((name, value) for name, value in found if value is not None), key=lambda pair: -pair[1].mean)
    if not known:
        return ProfileRanking(by, (), f"no {by} was measured")
    if any(interval.half is None for _, interval in known):
        return ProfileRanking(
            by, (), "one seed says nothing of how far another would be from it; give --seeds 3 or more"
        )
    pairs = list(pairwise(known))
    same = [(one[0], other[0]) for one, other in pairs if one[1].overlaps(other[1])]
    if pairs and len(same) == len(pairs):
        return ProfileRanking(
            by, (), "the intervals of all neighbours overlap; more seeds or steps would tell them apart"
        )
    return ProfileRanking(by, tuple(name for name, _ in known), None, tuple(same))


def bench_tables(
    header: dict[str, Any], runs: Sequence[TrainingRun], rankings: Sequence[ProfileRanking]
) -> Iterator[RenderableType]:
    """Yield everything that is said about a bench."""
    title = f"{header['algo'].upper()} on {header['env']}, profiles of {format_bytes(header['limit'])}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
    for summary in summaries(runs):
        table.add_row(*_summary_cells(summary), style="" if summary.done else "dim")
    yield table
    for ranking in rankings:
        yield _ranking_text(ranking)
    yield from (Text(f"{' with '.join(run.key[:2])}, seed {run.seed}: {run.reason}", "yellow") for run in _failed(runs))


def _summary_cells(summary: ProfileSummary) -> tuple[str, ...]:
    profile, buffer = summary.name
    run = summary.runs[0]
    if not summary.done:
        return profile, buffer, f"{run.size:,}", f"{run.batch_size:,}", run.status, "", "", "", ""
    each, saved, seconds = summary.bytes_per_transition, summary.checkpoint("bytes"), summary.checkpoint("seconds")
    return (
        profile,
        buffer,
        f"{run.size:,}",
        f"{run.batch_size:,}",
        format_bytes(summary.peak_bytes),
        "-" if each is None else f"{each:,.0f} B",
        _interval(summary.speed),
        _interval(summary.reward),
        "-" if saved is None or seconds is None else f"{seconds:.1f} s, {format_bytes(saved)}",
    )


def _interval(value: Interval | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.1f}" + ("" if value.half is None else f" ± {value.half:.1f}")


def _ranking_text(ranking: ProfileRanking) -> Text:
    if ranking.refused is not None:
        return Text(f"Not ranked by {ranking.by}: {ranking.refused}.", style="yellow")
    first = " with ".join(ranking.order[0])
    tied = next((" with ".join(other) for one, other in ranking.same if one == ranking.order[0]), None)
    doubt = f" (not told apart from {tied})" if tied else ""
    return Text.assemble((f"{_BEST[ranking.by]}: ", "bold"), f"{first}{doubt}.")


def _failed(runs: Sequence[TrainingRun]) -> list[TrainingRun]:
    return [run for run in runs if run.status == "failed"]

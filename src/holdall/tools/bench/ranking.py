"""Rank profiles and buffers by memory, speed and reward, and print the table.

Runs are not ranked by memory if a buffer was not full, and not ranked at all where the seeds do not separate them;
then the reason is given instead of an order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdall.tools.report.results import (
    Interval,
    ProfileAndBuffer,
    ProfileRanking,
    SeedsSummary,
    TrainingRun,
    summaries,
)
from holdall.units import format_bytes

_SAME_PEAK_SHARE = 0.05
"""Peaks that differ by less count as the same: two benches of one setting differed by up to 2.6 % in one profile, since
its size follows from what the trials happened to take."""
_NEARLY_FULL = 0.999
_HEADS = ("profile", "buffer", "holds", "batch", "peak memory", "per transition", "steps/s", "reward", "checkpoint")
_BEST = {"memory": "Least memory", "speed": "Fastest", "reward": "Highest reward"}


def rankings(runs: Sequence[TrainingRun], missing: int = 0) -> list[ProfileRanking]:
    """Rank by memory, speed and reward; nothing, while runs are missing."""
    if missing:
        why = f"{missing} runs are missing; --resume makes them"
        return [ProfileRanking(by, (), why) for by in ("memory", "speed", "reward")]
    known = summaries(runs)
    measured = [summary for summary in known if summary.done]
    speeds, rewards = ([(one.name, getattr(one, name)) for one in measured] for name in ("speed", "reward"))
    return [_by_memory(known, measured), _by_interval("speed", speeds), _by_interval("reward", rewards)]


def _by_memory(known: Sequence[SeedsSummary], measured: Sequence[SeedsSummary]) -> ProfileRanking:
    refused = None if measured else "nothing was measured"
    for run in (run for summary in known for run in summary.runs):
        named = f"{run.profile} with {run.buffer}"
        if run.status == "done" and run.filled < _NEARLY_FULL:
            held = f"{int(run.filled * run.size):,} of {run.size:,} transitions when it was measured"
            refused = f"{named} held {held}: fill the buffers, or what they would take is not seen"
            break
        if run.status in {"failed", "stopped"}:
            refused = f"{named} {run.status}; --resume runs it again"
            break
    if refused is not None:
        return ProfileRanking("memory", (), refused)
    groups = _group_similar_peaks(measured)
    names = tuple(summary.name for group in groups for summary in group)
    same = tuple((one.name, other.name) for group in groups for one, other in pairwise(group))
    return ProfileRanking("memory", names, None, same)


def _group_similar_peaks(measured: Sequence[SeedsSummary]) -> list[list[SeedsSummary]]:
    """Group peaks that count as the same; within a group, the order is that of the profiles, in every bench."""
    groups: list[list[SeedsSummary]] = []
    last = 0.0
    for peak, summary in sorted(((one.peak or 0.0, one) for one in measured), key=lambda pair: pair[0]):
        if groups and peak - last < _SAME_PEAK_SHARE * last:
            groups[-1].append(summary)
        else:
            groups.append([summary])
        last = peak
    return [sorted(group, key=measured.index) for group in groups]


def _by_interval(by: str, found: Sequence[tuple[ProfileAndBuffer, Interval | None]]) -> ProfileRanking:
    known = sorted(((name, value) for name, value in found if value is not None), key=lambda pair: -pair[1].mean)
    if not known:
        return ProfileRanking(by, (), f"no {by} was measured")
    if any(interval.half is None for _, interval in known):
        return ProfileRanking(by, (), "one seed does not show how much seeds differ; give --seeds 3 or more")
    pairs = list(pairwise(known))
    same = [(one[0], other[0]) for one, other in pairs if one[1].overlaps(other[1])]
    if pairs and len(same) == len(pairs):
        return ProfileRanking(by, (), "the intervals of all neighbours overlap; more seeds or steps may separate them")
    return ProfileRanking(by, tuple(name for name, _ in known), None, tuple(same))


def bench_tables(
    header: dict[str, Any], runs: Sequence[TrainingRun], rankings: Sequence[ProfileRanking]
) -> Iterator[RenderableType]:
    """Yield the table of a bench, its rankings, and what failed."""
    title = f"{header['algo'].upper()} on {header['env']}, profiles of {format_bytes(header['limit'])}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
    for summary in summaries(runs):
        table.add_row(*_summary_cells(summary), style="" if summary.done else "dim")
    yield table
    for ranking in rankings:
        yield _ranking_text(ranking)
    for run in runs:
        if run.status == "failed":
            yield Text(f"{run.profile} with {run.buffer}, seed {run.seed}: {run.reason}", "yellow")


def _summary_cells(summary: SeedsSummary) -> tuple[str, ...]:
    run = summary.runs[0]
    sizes = (*summary.name, f"{run.size:,}", f"{run.batch_size:,}")
    if not summary.done:
        return *sizes, run.status, "", "", "", ""
    each, saved, seconds = summary.bytes_per_transition, summary.checkpoint("bytes"), summary.checkpoint("seconds")
    memory = (format_bytes(summary.peak or 0), "-" if each is None else f"{each:,.0f} B")
    checkpoint = "-" if saved is None or seconds is None else f"{seconds:.1f} s, {format_bytes(saved)}"
    return *sizes, *memory, _interval(summary.speed), _interval(summary.reward), checkpoint


def _interval(value: Interval | None) -> str:
    if value is None:
        return "-"
    return f"{value.mean:.1f}" + ("" if value.half is None else f" ± {value.half:.1f}")


def _ranking_text(ranking: ProfileRanking) -> Text:
    if ranking.refused is not None:
        return Text(f"Not ranked by {ranking.by}: {ranking.refused}.", style="yellow")
    first = " with ".join(ranking.order[0])
    tied = next((" with ".join(other) for one, other in ranking.same if one == ranking.order[0]), None)
    doubt = f" (no clear difference to {tied})" if tied else ""
    return Text.assemble((f"{_BEST[ranking.by]}: ", "bold"), f"{first}{doubt}.")

"""A bench in the terminal: one table, what is best, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdall.bench.ranking import Ranking, Summary, summaries
from holdall.bench.result import Run
from holdall.tools.interval import Interval
from holdall.units import format_bytes

_HEADS = ("profile", "buffer", "holds", "batch", "peak memory", "per transition", "steps/s", "reward", "checkpoint")
_BEST = {"memory": "Least memory", "speed": "Fastest", "reward": "Highest reward"}


def tables(header: dict[str, Any], runs: Sequence[Run], rankings: Sequence[Ranking]) -> Iterator[RenderableType]:
    """Yield everything that is said about a bench."""
    title = f"{header['algo'].upper()} on {header['env']}, profiles of {format_bytes(header['limit'])}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, head in enumerate(_HEADS):
        table.add_column(head, justify="left" if number < 2 else "right", no_wrap=True)
    for summary in summaries(runs):
        table.add_row(*_cells(summary), style="" if summary.done else "dim")
    yield table
    for ranking in rankings:
        yield _said(ranking)
    yield from (Text(f"{' with '.join(run.key[:2])}, seed {run.seed}: {run.reason}", "yellow") for run in _failed(runs))


def _cells(summary: Summary) -> tuple[str, ...]:
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


def _said(ranking: Ranking) -> Text:
    if ranking.refused is not None:
        return Text(f"Not ranked by {ranking.by}: {ranking.refused}.", style="yellow")
    first = " with ".join(ranking.order[0])
    tied = next((" with ".join(other) for one, other in ranking.same if one == ranking.order[0]), None)
    doubt = f" (not told apart from {tied})" if tied else ""
    return Text.assemble((f"{_BEST[ranking.by]}: ", "bold"), f"{first}{doubt}.")


def _failed(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.status == "failed"]

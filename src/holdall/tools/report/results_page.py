"""The pages of a bench and of a comparison of buffers: memory, speed, reward, rankings and exactness.

In:  `Results` or `BufferResults`.  Out: the page, and a summary as plain data.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from holdall.tools.report import BENCH_FORMAT, BUFFERS_FORMAT, JsonLine
from holdall.tools.report.page import (
    BarPiece,
    BarRow,
    Block,
    Tone,
    bars,
    bullets,
    card,
    cards,
    columns,
    legend,
    number,
    or_dash,
    section,
    sentence,
    table,
    tile,
    tiles,
    toned_cell,
    write_page,
)
from holdall.tools.report.results import BufferFigures, BufferResults, Interval, ProfileRanking, Results, SeedsSummary
from holdall.units import counted, format_bytes, format_seconds

_COLOURS = ("c1", "c0", "c2", "c4", "c7", "c6", "c3", "c5")
_BEST = {"memory": "least memory", "speed": "fastest", "reward": "highest reward"}
_NOT_MEASURED = "not measured"
_SPEED_LEAD = (
    "Environment steps a second after the warm-up. Whiskers: 95 % over the seeds, as far as twice the longest bar."
)


def write_bench_page(results: Results) -> str:
    """Write the page."""
    parts = (_tiles, _rankings, _memory, _speed, _reward, _buffer_comparison, _all, _not_done)
    sections = [*(part(results) for part in parts), machine_section(results.header)]
    return write_page(_title(results), "bench", _facts(results), sections)


def summarize_bench(results: Results) -> dict[str, Any]:
    """Return the page in short, as plain data."""
    return {
        "profiles": [
            {
                "profile": one.profile,
                "buffer": one.buffer,
                "runs": len(one.runs),
                "done": len(one.done),
                "peak_bytes": one.peak,
                "peaks": one.peaks,
                "bytes_per_transition": one.bytes_per_transition,
                "steps_per_second": _plain(one.speed),
                "reward": _plain(one.reward),
            }
            for one in results.summaries
        ],
        "rankings": [
            {"by": ranking.by, "order": [list(name) for name in ranking.order], "refused": ranking.refused}
            for ranking in results.rankings
        ],
    }


def _plain(interval: Interval | None) -> dict[str, float | None] | None:
    return None if interval is None else {"mean": interval.mean, "half_width_95": interval.half}


def _title(results: Results) -> str:
    algo = results.header.text("algo")
    env = results.header.text("env")
    return f"{algo.upper() if algo else 'A bench'} on {env}" if env else "A bench"


def _facts(results: Results) -> list[str]:
    limit = results.header.size("limit")
    seeds = {run.seed for one in results.summaries for run in one.runs}
    return [
        f"profiles of {format_bytes(limit)}" if limit else "",
        ", ".join(
            counted(len(found), noun)
            for found, noun in ((results.profiles, "profile"), (results.buffers, "buffer"), (seeds, "seed"))
        ),
        shlex.join(results.header.texts("command")[:12]),
    ]


def machine_section(header: JsonLine) -> Block | None:
    """Describe where figures were measured, and with which versions."""
    shown = []
    for key in ("machine", "versions"):
        rows = [
            [name.removesuffix("_bytes").replace("_", " "), _value(name, value)] for name, value in header.facts(key)
        ]
        if rows:
            shown.append(("", table([key.capitalize(), ""], rows, key.capitalize(), words=2)))
    return section("Measured on", columns(*shown)) if shown else None


def _value(name: str, value: Any) -> str:
    if isinstance(value, float):
        return format_bytes(value) if name.endswith("bytes") else number(value)
    return "none" if value is None else str(value)


def _display_name(name: Sequence[str]) -> str:
    return " with ".join(part for part in name if part)


def _tiles(results: Results) -> Block:
    best = []
    for ranking in results.rankings:
        title = _BEST.get(ranking.by, ranking.by)
        if ranking.order and not ranking.refused:
            first = ranking.order[0]
            best.append(tile(title, _figure(ranking.by, results.of(*first)), _display_name(first)))
        else:
            best.append(tile(title, "not ranked", "see why below", "warning"))
    runs = [run for one in results.summaries for run in one.runs]
    done = sum(run.status == "done" for run in runs)
    best.append(tile("runs", f"{done} of {len(runs)}", "done", "" if done == len(runs) else "warning"))
    return section("", tiles(*best))


def _figure(by: str, found: SeedsSummary | None) -> str:
    if found is None or by == "memory":
        return _bytes(None if found is None else found.peak)
    interval = found.speed if by == "speed" else found.reward
    if interval is None:
        return _NOT_MEASURED
    return f"{number(interval.mean)} steps/s" if by == "speed" else number(interval.mean)


def _bytes(value: float | None) -> str:
    return _NOT_MEASURED if value is None else format_bytes(value)


def _rankings(results: Results) -> Block | None:
    if not results.rankings:
        return None
    lead = "The best first. Nothing is ranked by a figure that was not measured, or that does not differ clearly."
    shown = [(f"By {ranking.by}", _ranking(ranking, results)) for ranking in results.rankings]
    return section("Rankings", columns(*shown), lead=lead)


def _ranking(ranking: ProfileRanking, results: Results) -> Block:
    if ranking.refused or not ranking.order:
        return cards(card("warning", "Not ranked", sentence(ranking.refused or "nothing was measured")))
    tied = {one for one, _ in ranking.same}
    rows = []
    for name in ranking.order:
        note = " (no clear difference to the next)" if name in tied else ""
        rows.append([f"{_display_name(name)}{note}", _figure(ranking.by, results.of(*name))])
    return table(["", ranking.by], rows, f"Ranking by {ranking.by}")


def _legend(results: Results) -> list[tuple[str, str]]:
    return [(buffer, _colour(results, buffer)) for buffer in results.buffers]


def _colour(results: Results, buffer: str) -> str:
    return _COLOURS[results.buffers.index(buffer) % len(_COLOURS)]


def _memory(results: Results) -> Block | None:
    known = [one for one in results.summaries if one.peak is not None]
    if not known:
        return None
    limit = results.header.size("limit") or 0.0
    rows = []
    for one in results.summaries:
        peaks = "\n".join(f"{phase}: {format_bytes(size)}" for phase, size in one.peaks.items())
        piece = BarPiece(one.peak or 0.0, _colour(results, one.buffer), f"{_display_name(one.name)}\n{peaks}")
        text = _bytes(one.peak) if one.done else one.runs[0].status
        each = one.bytes_per_transition
        note = "" if each is None else f"{each:,.0f} B a transition"
        rows.append(BarRow(_display_name(one.name), [piece] if one.done else [], text, note))
    named = (limit, f"limit {format_bytes(limit)}") if limit else None
    chart = bars(rows, "Peak memory", "bytes", keys=_legend(results), limit=named)
    phases = list(dict.fromkeys(phase for one in known for phase in one.peaks))
    cells = [[one.profile, one.buffer, *(_bytes(one.peaks.get(phase)) for phase in phases)] for one in known]
    heads = ["profile", "buffer", *phases]
    figures = table(heads, cells, "Peak memory by phase", words=2, fold="By phase, as a table")
    return section(
        "Memory", chart, figures, lead="The largest resident peak of the training process, median over seeds."
    )


def _speed(results: Results) -> Block | None:
    if all(one.speed is None for one in results.summaries):
        return None
    return section("Speed", _intervals(results, lambda one: one.speed), lead=_SPEED_LEAD)


def _reward(results: Results) -> Block | None:
    known = [one.reward for one in results.summaries if one.reward is not None]
    if not known:
        return None
    low = min(interval.low for interval in known)
    high = max(interval.high for interval in known)
    begin = low - ((high - low or abs(high) or 1.0) * 0.08)  # The zero of rewards has no meaning.
    chart = _intervals(results, lambda one: one.reward, dots=True, begin=begin)
    lead = (
        f"Mean return of an episode in the later half of training, from {number(begin)} (left) to {number(high)} "
        "(right). Whiskers: 95 % over the seeds; with one seed there are none."
    )
    return section("Reward", chart, lead=lead)


def _intervals(
    results: Results,
    figure: Callable[[SeedsSummary], Interval | None],
    *,
    dots: bool = False,
    begin: float = 0.0,
) -> Block:
    rows = []
    for one in results.summaries:
        interval = figure(one)
        name = _display_name(one.name)
        if interval is None:
            rows.append(BarRow(name, [], _NOT_MEASURED if one.done else one.runs[0].status))
            continue
        text = _written(interval)
        tip = f"{name}\n{text}\n{counted(len(one.done), 'seed')}"
        piece = BarPiece(interval.mean, _colour(results, one.buffer), tip)
        ends = None if interval.half is None else (interval.low, interval.high)
        rows.append(BarRow(name, [piece], text, interval=ends))
    return bars(rows, "By profile and buffer", "number", keys=_legend(results), dots=dots, begin=begin)


def _written(interval: Interval) -> str:
    return number(interval.mean) + ("" if interval.half is None else f" ± {number(interval.half)}")


def _buffer_comparison(results: Results) -> Block | None:
    """Compare the first buffer with every other one, profile by profile."""
    if len(results.buffers) < 2:
        return None
    first = results.buffers[0]
    rows = []
    for profile in results.profiles:
        base = results.of(profile, first)
        for buffer in results.buffers[1:]:
            other = results.of(profile, buffer)
            if base is not None and other is not None:
                rows.append([profile, f"{buffer} against {first}", *_compared(base, other)])
    heads = ["profile", "", "peak memory", "a transition", "steps a second", "reward"]
    lead = f"Figures of a profile with another buffer, in percent of its figures with {first}."
    return section("Buffer against buffer", table(heads, rows, "Buffers compared", words=2), lead=lead)


def _compared(base: SeedsSummary, other: SeedsSummary) -> list[str]:
    reward = "-"
    if base.reward is not None and other.reward is not None:
        change = other.reward.mean - base.reward.mean
        same = base.reward.overlaps(other.reward)
        reward = "no clear difference" if same else f"{'+' if change > 0 else ''}{number(change)}"
    figures = [(one.peak, one.bytes_per_transition, getattr(one.speed, "mean", None)) for one in (base, other)]
    pairs = zip(*figures, strict=True)
    return [*("-" if not one or two is None else f"{100 * two / one:.0f} %" for one, two in pairs), reward]


def _all(results: Results) -> Block:
    heads = ["profile", "buffer", "runs", "peak", "a transition", "steps a second", "reward", "saved", "in", "extra"]
    rows = [
        [
            one.profile,
            one.buffer,
            f"{len(one.done)} of {len(one.runs)}",
            or_dash(one.peak, format_bytes),
            or_dash(one.bytes_per_transition, "{:,.0f} B".format),
            or_dash(one.speed, _written),
            or_dash(one.reward, _written),
            or_dash(one.checkpoint("bytes"), format_bytes),
            or_dash(one.checkpoint("seconds"), format_seconds),
            or_dash(one.checkpoint("extra"), format_bytes),
        ]
        for one in results.summaries
    ]
    lead = "Medians, or means with the half width of their 95 % interval. Extra: memory that saving took for a while."
    return section("All figures", table(heads, rows, "All figures", words=2), lead=lead)


def _not_done(results: Results) -> Block | None:
    runs = [run for one in results.summaries for run in one.runs if run.status != "done"]
    rows = [[_display_name(run.key[:2]), f"{run.seed}", run.status, run.reason or ""] for run in runs]
    heads = ["run", "seed", "status", "why"]
    shown = table(heads, rows, "Runs without figures", words=3, prose=True)
    return section("What was not measured", shown) if rows else None


_OURS = "holdall"
_EXACT = {True: "every row came back right", False: "rows came back wrong", None: "not compared"}


def _transition_bytes(value: float) -> str:
    return f"{value:,.0f} B" if value < 100_000 else format_bytes(value)


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("memory of a transition", "bytes_per_transition", _transition_bytes),
    ("add, of one step", "add_us", lambda value: f"{number(value)} µs"),
    ("sample, of one batch", "sample_ms", lambda value: f"{number(value)} ms"),
    ("save", "save_s", format_seconds),
    ("load", "load_s", format_seconds),
)


def write_buffers_page(results: BufferResults) -> str:
    """Write the page."""
    sections = [
        _buffer_tiles(results),
        *(_buffer_case(results, case) for case in results.cases),
        _buffers_absent(results),
    ]
    libraries = {one.library for one in results.measured}
    facts = [counted(len(results.cases), "case"), counted(len(libraries), "library", "libraries")]
    return write_page("Replay buffers alone", "bench buffers", facts, [*sections, machine_section(results.header)])


def summarize_buffers(results: BufferResults) -> dict[str, Any]:
    """Return the page in short, as plain data."""
    return {
        "buffers": [asdict(one) | {"bytes_per_transition": one.bytes_per_transition} for one in results.measured],
        "absent": [{"what": what, "why": why} for what, why in results.absent],
    }


def _figures_of_case(results: BufferResults, case: str) -> list[BufferFigures]:
    return [one for one in results.measured if one.case == case]


def _buffer_tiles(results: BufferResults) -> Block:
    shown = []
    for case in results.cases[:4]:
        known = [one for one in _figures_of_case(results, case) if one.bytes_per_transition is not None and one.exact]
        if known:
            least = min(known, key=lambda one: one.bytes_per_transition or 0.0)
            size = _transition_bytes(least.bytes_per_transition or 0.0)
            shown.append(tile(f"{case}, least and exact", size, f"a transition, {least.library}"))
    wrong = [one for one in results.measured if one.exact is False]
    tone: Tone = "error" if wrong else "good"
    shown.append(tile("data came back wrong", f"{len(wrong)} of {len(results.measured)}", "library and case", tone))
    return section("", tiles(*shown))


def _buffer_case(results: BufferResults, case: str) -> Block:
    known = _figures_of_case(results, case)
    measured = [figure for figure in _FIGURES if any(getattr(one, figure[1]) is not None for one in known)]
    charts = [(name.capitalize(), _buffer_chart(known, name, key, written)) for name, key, written in measured]
    count = max((one.transitions or 0.0 for one in known), default=0.0)
    lead = f"{count:,.0f} transitions. Shorter is better, if the data came back right."
    laps = max((one.laps or 0.0 for one in known), default=0.0)
    if laps > 1:
        lead += f" They were played {laps:.1f} times over: a buffer that shares what repeats gains by that."
    keys = legend(("holdall", "c0"), ("others", "c5"), ("rows came back wrong", "unused"))
    return section(case, keys, columns(*charts), _buffer_table(known), lead=lead)


def _buffer_chart(known: Sequence[BufferFigures], name: str, key: str, written: Callable[[float], str]) -> Block:
    rows = []
    for one in known:
        value = getattr(one, key)
        text = or_dash(value, written)
        colour = "c0" if one.library.startswith(_OURS) else "c5"
        if one.exact is False:
            colour = "unused"
        tip = f"{one.library} {one.version}\n{name}: {text}\n{_EXACT[one.exact]}"
        rows.append(BarRow(one.library, [] if value is None else [BarPiece(value, colour, tip)], text))
    return bars(rows, name, "number")


def _buffer_table(known: Sequence[BufferFigures]) -> Block:
    heads = ["library", "version", "a transition", "add", "sample", "save", "load", "exact", "note"]
    exact: dict[bool | None, str | Block] = {
        None: "not compared",
        True: toned_cell("yes", "good"),
        False: toned_cell("no", "error"),
    }
    rows: list[list[str | Block]] = []
    for one in known:
        figures = [or_dash(getattr(one, key), written) for _, key, written in _FIGURES]
        rows.append([one.library, one.version or "-", *figures, exact[one.exact], one.note])
    return table(heads, rows, "All figures", words=2, prose=True)


def _buffers_absent(results: BufferResults) -> Block | None:
    items = [f"{what}: {why}" if why else what for what, why in results.absent]
    return section("Not measured", bullets(items)) if items else None


KINDS = {
    BENCH_FORMAT: (Results.read, write_bench_page, summarize_bench),
    BUFFERS_FORMAT: (BufferResults.read, write_buffers_page, summarize_buffers),
}
"""How a file of each format is read, and what writes its page and its summary."""

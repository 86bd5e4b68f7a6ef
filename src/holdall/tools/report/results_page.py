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
    format_number,
    format_or_dash,
    format_sentence,
    legend,
    section,
    table,
    tile,
    tiles,
    toned_cell,
    write_page,
)
from holdall.tools.report.results import BufferFigures, BufferResults, Interval, ProfileRanking, Results, SeedsSummary
from holdall.units import count_noun, format_bytes, format_seconds

_COLOURS = ("c1", "c0", "c2", "c4", "c7", "c6", "c3", "c5")
_BEST = {"memory": "least memory", "speed": "fastest", "reward": "highest reward"}
_NOT_MEASURED = "not measured"
_SPEED_LEAD = (
    "Environment steps a second after the warm-up. Whiskers: 95 % over the seeds, as far as twice the longest bar."
)


def write_bench_page(results: Results) -> str:
    """Return the page of a bench as HTML."""
    describers = (
        _describe_best,
        _describe_rankings,
        _describe_memory,
        _describe_speed,
        _describe_reward,
        _describe_buffer_comparison,
        _describe_figures,
        _describe_failures,
    )
    sections = [*(describe(results) for describe in describers), _describe_machine(results.header)]
    return write_page(_make_title(results), "bench", _list_facts(results), sections)


def summarize_bench(results: Results) -> dict[str, Any]:
    """Return the figures of the page as plain data."""
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


def _make_title(results: Results) -> str:
    algo = results.header.text("algo")
    env = results.header.text("env")
    return f"{algo.upper() if algo else 'A bench'} on {env}" if env else "A bench"


def _list_facts(results: Results) -> list[str]:
    limit = results.header.size("limit")
    seeds = {run.seed for one in results.summaries for run in one.runs}
    return [
        f"profiles of {format_bytes(limit)}" if limit else "",
        ", ".join(
            count_noun(len(names), noun)
            for names, noun in ((results.profiles, "profile"), (results.buffers, "buffer"), (seeds, "seed"))
        ),
        shlex.join(results.header.texts("command")[:12]),
    ]


def _describe_machine(header: JsonLine) -> Block | None:
    """Describe the machine of the measurements, and the versions of libraries."""
    tables = []
    for key in ("machine", "versions"):
        facts = header.facts(key)
        rows = [[name.removesuffix("_bytes").replace("_", " "), _format_fact(name, value)] for name, value in facts]
        if rows:
            tables.append(("", table([key.capitalize(), ""], rows, key.capitalize(), words=2)))
    return section("Measured on", columns(*tables)) if tables else None


def _format_fact(name: str, value: Any) -> str:
    if isinstance(value, float):
        return format_bytes(value) if name.endswith("bytes") else format_number(value)
    return "none" if value is None else str(value)


def _format_name(name: Sequence[str]) -> str:
    """Write a profile and a buffer."""
    return " with ".join(part for part in name if part)


def _describe_best(results: Results) -> Block:
    best = []
    for ranking in results.rankings:
        title = _BEST.get(ranking.by, ranking.by)
        if ranking.order and not ranking.refused:
            first = ranking.order[0]
            best.append(tile(title, _format_figure(ranking.by, results.find_summary(*first)), _format_name(first)))
        else:
            best.append(tile(title, "not ranked", "see why below", "warning"))
    runs = [run for one in results.summaries for run in one.runs]
    done = sum(run.status == "done" for run in runs)
    best.append(tile("runs", f"{done} of {len(runs)}", "done", "" if done == len(runs) else "warning"))
    return section("", tiles(*best))


def _format_figure(by: str, summary: SeedsSummary | None) -> str:
    """Write the figure by which a ranking orders: `memory`, `speed` or `reward`."""
    if summary is None:
        return _NOT_MEASURED
    if by == "memory":
        return _format_measured_bytes(summary.peak)
    interval = summary.speed if by == "speed" else summary.reward
    if interval is None:
        return _NOT_MEASURED
    return f"{format_number(interval.mean)} steps/s" if by == "speed" else format_number(interval.mean)


def _format_measured_bytes(value: float | None) -> str:
    return _NOT_MEASURED if value is None else format_bytes(value)


def _describe_rankings(results: Results) -> Block | None:
    if not results.rankings:
        return None
    lead = "The best first. Nothing is ranked by a figure that was not measured, or that does not differ clearly."
    blocks = [(f"By {ranking.by}", _describe_ranking(ranking, results)) for ranking in results.rankings]
    return section("Rankings", columns(*blocks), lead=lead)


def _describe_ranking(ranking: ProfileRanking, results: Results) -> Block:
    if ranking.refused or not ranking.order:
        return cards(card("warning", "Not ranked", format_sentence(ranking.refused or "nothing was measured")))
    tied = {one for one, _ in ranking.same}
    rows = []
    for name in ranking.order:
        note = " (no clear difference to the next)" if name in tied else ""
        rows.append([f"{_format_name(name)}{note}", _format_figure(ranking.by, results.find_summary(*name))])
    return table(["", ranking.by], rows, f"Ranking by {ranking.by}")


def _list_keys(results: Results) -> list[tuple[str, str]]:
    """Return the buffers with their colours."""
    return [(buffer, _get_colour(results, buffer)) for buffer in results.buffers]


def _get_colour(results: Results, buffer: str) -> str:
    return _COLOURS[results.buffers.index(buffer) % len(_COLOURS)]


def _describe_memory(results: Results) -> Block | None:
    known = [one for one in results.summaries if one.peak is not None]
    if not known:
        return None
    limit = results.header.size("limit") or 0.0
    rows = []
    for one in results.summaries:
        peaks = "\n".join(f"{phase}: {format_bytes(size)}" for phase, size in one.peaks.items())
        piece = BarPiece(one.peak or 0.0, _get_colour(results, one.buffer), f"{_format_name(one.name)}\n{peaks}")
        text = _format_measured_bytes(one.peak) if one.done else one.runs[0].status
        transition_bytes = one.bytes_per_transition
        note = "" if transition_bytes is None else f"{transition_bytes:,.0f} B a transition"
        rows.append(BarRow(_format_name(one.name), [piece] if one.done else [], text, note))
    drawn_limit = (limit, f"limit {format_bytes(limit)}") if limit else None
    chart = bars(rows, "Peak memory", "bytes", keys=_list_keys(results), limit=drawn_limit)
    phases = list(dict.fromkeys(phase for one in known for phase in one.peaks))
    cells = [
        [one.profile, one.buffer, *(_format_measured_bytes(one.peaks.get(phase)) for phase in phases)] for one in known
    ]
    heads = ["profile", "buffer", *phases]
    figures = table(heads, cells, "Peak memory by phase", words=2, fold="By phase, as a table")
    return section(
        "Memory", chart, figures, lead="The largest resident peak of the training process, median over seeds."
    )


def _describe_speed(results: Results) -> Block | None:
    if all(one.speed is None for one in results.summaries):
        return None
    return section("Speed", _describe_intervals(results, lambda one: one.speed), lead=_SPEED_LEAD)


def _describe_reward(results: Results) -> Block | None:
    known = [one.reward for one in results.summaries if one.reward is not None]
    if not known:
        return None
    low = min(interval.low for interval in known)
    high = max(interval.high for interval in known)
    spread = high - low or abs(high) or 1.0
    begin = low - 0.08 * spread  # The scale does not begin at 0, because the zero of rewards has no meaning.
    chart = _describe_intervals(results, lambda one: one.reward, dots=True, begin=begin)
    lead = (
        f"Mean return of an episode in the later half of training, from {format_number(begin)} (left) to "
        f"{format_number(high)} (right). Whiskers: 95 % over the seeds; with one seed there are none."
    )
    return section("Reward", chart, lead=lead)


def _describe_intervals(
    results: Results,
    figure: Callable[[SeedsSummary], Interval | None],
    *,
    dots: bool = False,
    begin: float = 0.0,
) -> Block:
    rows = []
    for one in results.summaries:
        interval = figure(one)
        name = _format_name(one.name)
        if interval is None:
            rows.append(BarRow(name, [], _NOT_MEASURED if one.done else one.runs[0].status))
            continue
        text = _format_interval(interval)
        tip = f"{name}\n{text}\n{count_noun(len(one.done), 'seed')}"
        piece = BarPiece(interval.mean, _get_colour(results, one.buffer), tip)
        ends = None if interval.half is None else (interval.low, interval.high)
        rows.append(BarRow(name, [piece], text, interval=ends))
    return bars(rows, "By profile and buffer", "number", keys=_list_keys(results), dots=dots, begin=begin)


def _format_interval(interval: Interval) -> str:
    mean = format_number(interval.mean)
    return mean if interval.half is None else f"{mean} ± {format_number(interval.half)}"


def _describe_buffer_comparison(results: Results) -> Block | None:
    """Compare the first buffer with every other one, profile by profile."""
    if len(results.buffers) < 2:
        return None
    first = results.buffers[0]
    rows = []
    for profile in results.profiles:
        base = results.find_summary(profile, first)
        for buffer in results.buffers[1:]:
            other = results.find_summary(profile, buffer)
            if base is not None and other is not None:
                rows.append([profile, f"{buffer} against {first}", *_compare(base, other)])
    heads = ["profile", "", "peak memory", "a transition", "steps a second", "reward"]
    lead = f"Figures of a profile with another buffer, in percent of its figures with {first}."
    return section("Buffer against buffer", table(heads, rows, "Buffers compared", words=2), lead=lead)


def _compare(base: SeedsSummary, other: SeedsSummary) -> list[str]:
    """Return peak, bytes of a transition and speed of `other` in percent of `base`, and the difference in reward."""
    base_speed = None if base.speed is None else base.speed.mean
    other_speed = None if other.speed is None else other.speed.mean
    return [
        _format_percent(base.peak, other.peak),
        _format_percent(base.bytes_per_transition, other.bytes_per_transition),
        _format_percent(base_speed, other_speed),
        _format_change(base.reward, other.reward),
    ]


def _format_percent(base: float | None, other: float | None) -> str:
    return "-" if not base or other is None else f"{100 * other / base:.0f} %"


def _format_change(base: Interval | None, other: Interval | None) -> str:
    if base is None or other is None:
        return "-"
    if base.overlaps(other):
        return "no clear difference"
    change = other.mean - base.mean
    sign = "+" if change > 0 else ""
    return f"{sign}{format_number(change)}"


def _describe_figures(results: Results) -> Block:
    heads = ["profile", "buffer", "runs", "peak", "a transition", "steps a second", "reward", "saved", "in", "extra"]
    rows = [
        [
            one.profile,
            one.buffer,
            f"{len(one.done)} of {len(one.runs)}",
            format_or_dash(one.peak, format_bytes),
            format_or_dash(one.bytes_per_transition, "{:,.0f} B".format),
            format_or_dash(one.speed, _format_interval),
            format_or_dash(one.reward, _format_interval),
            format_or_dash(one.compute_checkpoint("bytes"), format_bytes),
            format_or_dash(one.compute_checkpoint("seconds"), format_seconds),
            format_or_dash(one.compute_checkpoint("extra"), format_bytes),
        ]
        for one in results.summaries
    ]
    lead = "Medians, or means with the half width of their 95 % interval. Extra: memory that saving took for a while."
    return section("All figures", table(heads, rows, "All figures", words=2), lead=lead)


def _describe_failures(results: Results) -> Block | None:
    runs = [run for one in results.summaries for run in one.runs if run.status != "done"]
    rows = [[_format_name(run.key[:2]), f"{run.seed}", run.status, run.reason or ""] for run in runs]
    heads = ["run", "seed", "status", "why"]
    failures = table(heads, rows, "Runs without figures", words=3, prose=True)
    return section("What was not measured", failures) if rows else None


# ---------------------------------------------------------------- comparison of buffers

_OURS = "holdall"
"""First word of the names of holdall's buffers."""
_EXACT = {True: "every row came back right", False: "rows came back wrong", None: "not compared"}


def _format_transition_bytes(value: float) -> str:
    return f"{value:,.0f} B" if value < 100_000 else format_bytes(value)


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("memory of a transition", "bytes_per_transition", _format_transition_bytes),
    ("add, of one step", "add_us", lambda value: f"{format_number(value)} µs"),
    ("sample, of one batch", "sample_ms", lambda value: f"{format_number(value)} ms"),
    ("save", "save_s", format_seconds),
    ("load", "load_s", format_seconds),
)
"""Title, attribute of `BufferFigures` and format of every figure."""


def write_buffers_page(results: BufferResults) -> str:
    """Return the page of a comparison of buffers as HTML."""
    sections = [
        _describe_smallest(results),
        *(_describe_case(results, case) for case in results.cases),
        _describe_absent(results),
        _describe_machine(results.header),
    ]
    libraries = {one.library for one in results.measured}
    facts = [count_noun(len(results.cases), "case"), count_noun(len(libraries), "library", "libraries")]
    return write_page("Replay buffers alone", "bench buffers", facts, sections)


def summarize_buffers(results: BufferResults) -> dict[str, Any]:
    """Return the figures of the page as plain data."""
    return {
        "buffers": [asdict(one) | {"bytes_per_transition": one.bytes_per_transition} for one in results.measured],
        "absent": [{"what": what, "why": why} for what, why in results.absent],
    }


def _find_figures(results: BufferResults, case: str) -> list[BufferFigures]:
    return [one for one in results.measured if one.case == case]


def _describe_smallest(results: BufferResults) -> Block:
    figures = []
    for case in results.cases[:4]:
        known = [one for one in _find_figures(results, case) if one.bytes_per_transition is not None and one.exact]
        if known:
            least = min(known, key=lambda one: one.bytes_per_transition or 0.0)
            size = _format_transition_bytes(least.bytes_per_transition or 0.0)
            figures.append(tile(f"{case}, least and exact", size, f"a transition, {least.library}"))
    wrong = [one for one in results.measured if one.exact is False]
    tone: Tone = "error" if wrong else "good"
    figures.append(tile("data came back wrong", f"{len(wrong)} of {len(results.measured)}", "library and case", tone))
    return section("", tiles(*figures))


def _describe_case(results: BufferResults, case: str) -> Block:
    known = _find_figures(results, case)
    charts = [
        (name.capitalize(), _describe_chart(known, name, key, write))
        for name, key, write in _FIGURES
        if any(getattr(one, key) is not None for one in known)
    ]
    count = max((one.transitions or 0.0 for one in known), default=0.0)
    lead = f"{count:,.0f} transitions. Shorter is better, if the data came back right."
    laps = max((one.laps or 0.0 for one in known), default=0.0)
    if laps > 1:
        lead += f" They were played {laps:.1f} times over, which favours a buffer that stores repeated data once."
    keys = legend(("holdall", "c0"), ("others", "c5"), ("rows came back wrong", "unused"))
    return section(case, keys, columns(*charts), _describe_table(known), lead=lead)


def _describe_chart(known: Sequence[BufferFigures], name: str, key: str, write: Callable[[float], str]) -> Block:
    rows = []
    for one in known:
        value = getattr(one, key)
        text = format_or_dash(value, write)
        colour = "c0" if one.library.startswith(_OURS) else "c5"
        if one.exact is False:
            colour = "unused"
        tip = f"{one.library} {one.version}\n{name}: {text}\n{_EXACT[one.exact]}"
        rows.append(BarRow(one.library, [] if value is None else [BarPiece(value, colour, tip)], text))
    return bars(rows, name, "number")


def _describe_table(known: Sequence[BufferFigures]) -> Block:
    heads = ["library", "version", "a transition", "add", "sample", "save", "load", "exact", "note"]
    exact_cells: dict[bool | None, str | Block] = {
        None: "not compared",
        True: toned_cell("yes", "good"),
        False: toned_cell("no", "error"),
    }
    rows: list[list[str | Block]] = []
    for one in known:
        figures = [format_or_dash(getattr(one, key), write) for _, key, write in _FIGURES]
        rows.append([one.library, one.version or "-", *figures, exact_cells[one.exact], one.note])
    return table(heads, rows, "All figures", words=2, prose=True)


def _describe_absent(results: BufferResults) -> Block | None:
    items = [f"{what}: {why}" if why else what for what, why in results.absent]
    return section("Not measured", bullets(items)) if items else None


KINDS = {
    BENCH_FORMAT: (Results.read, write_bench_page, summarize_bench),
    BUFFERS_FORMAT: (BufferResults.read, write_buffers_page, summarize_buffers),
}
"""By format: the functions that read a file, write its page and write its summary."""

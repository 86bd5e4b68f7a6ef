"""The page of a bench: memory, speed and reward of every profile with every buffer, and what can be ranked.

In:  `Results`.  Out: the page, and a summary as plain data.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from holdall.tools.report.charts import (
    BarPiece,
    BarRow,
    Markup,
    Scale,
    bars,
    bytes_scale,
    duration,
    limited_scale,
    number,
    number_scale,
    percent,
    tag,
    x_axis,
    y_axis,
)
from holdall.tools.report.document import Card, Tile, cards, details, document, section, sentence, table, tiles
from holdall.tools.report.json_lines import JsonLine
from holdall.tools.report.results import Interval, ProfileRanking, Results, SeedsSummary
from holdall.units import format_bytes

_COLOURS = ("c1", "c0", "c2", "c4", "c7", "c6", "c3", "c5")
_BEST = {"memory": "least memory", "speed": "fastest", "reward": "highest reward"}
_NOT_MEASURED = "not measured"
_SPEED_LEAD = (
    "Environment steps a second after the warm-up. Whiskers: 95 % over the seeds, as far as twice the longest bar."
)
_POINT_SHAPES = ("M-6,0a6,6 0 1,0 12,0a6,6 0 1,0 -12,0Z", "M-5.5,-5.5H5.5V5.5H-5.5Z", "M0,-7.5 7.5,0 0,7.5 -7.5,0Z",
           "M0,-7 7,5.5H-7Z")  # fmt: skip


def write_bench_page(results: Results) -> str:
    """Write the page."""
    sections = [_tiles(results), _rankings(results), _memory(results), _speed(results), _reward(results)]
    sections += [
        _memory_and_speed(results),
        _buffer_comparison(results),
        _all(results),
        _runs_without_figures(results),
        machine_section(results.header),
    ]
    return document(_title(results), "bench", _facts(results), (part for part in sections if part))


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
    algo, env = results.header.text("algo"), results.header.text("env")
    return f"{algo.upper() if algo else 'A bench'} on {env}" if env else "A bench"


def _facts(results: Results) -> list[str]:
    limit = results.header.size("limit")
    seeds = {run.seed for one in results.summaries for run in one.runs}
    return [
        f"profiles of {format_bytes(limit)}" if limit else "",
        f"{len(results.profiles)} profiles, {len(results.buffers)} buffers, {len(seeds)} seeds",
        shlex.join(results.header.texts("command")[:12]),
    ]


def machine_section(header: JsonLine) -> Markup | None:
    """Show where figures were measured, and with which versions."""
    found = [
        (
            title,
            [[name.removesuffix("_bytes").replace("_", " "), _value(name, value)] for name, value in header.facts(key)],
        )
        for key, title in (("machine", "Machine"), ("versions", "Versions"))
    ]
    shown = [table([title, ""], rows, title, words=2) for title, rows in found if rows]
    return section("Measured on", tag("div", *shown, class_="columns")) if shown else None


def _value(name: str, value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return format_bytes(value) if name.endswith("bytes") else number(value)
    return str(value)


def _display_name(name: Sequence[str]) -> str:
    return " with ".join(part for part in name if part)


def _tiles(results: Results) -> Markup:
    best = []
    for ranking in results.rankings:
        if ranking.order and not ranking.refused:
            found = results.of(*ranking.order[0])
            best.append(
                Tile(_BEST.get(ranking.by, ranking.by), _figure(ranking.by, found), _display_name(ranking.order[0]))
            )
        else:
            best.append(Tile(_BEST.get(ranking.by, ranking.by), "not ranked", "see why below", "warning"))
    runs = [run for one in results.summaries for run in one.runs]
    done = sum(run.status == "done" for run in runs)
    best.append(Tile("runs", f"{done} of {len(runs)}", "done", "" if done == len(runs) else "warning"))
    return tiles(best)


def _figure(by: str, found: SeedsSummary | None) -> str:
    if found is None:
        return _NOT_MEASURED
    if by == "memory":
        return _bytes(found.peak)
    interval = found.speed if by == "speed" else found.reward
    unit = " steps/s" if by == "speed" else ""
    return _NOT_MEASURED if interval is None else f"{number(interval.mean)}{unit}"


def _bytes(value: float | None) -> str:
    return _NOT_MEASURED if value is None else format_bytes(value)


def _rankings(results: Results) -> Markup | None:
    if not results.rankings:
        return None
    return section(
        "Rankings",
        tag("div", *(_ranking(ranking, results) for ranking in results.rankings), class_="columns"),
        lead="The best first. What was not exercised, or does not differ clearly, is not ranked.",
    )


def _ranking(ranking: ProfileRanking, results: Results) -> Markup:
    title = tag("h4", f"By {ranking.by}")
    if ranking.refused or not ranking.order:
        why = ranking.refused or "nothing was measured"
        return tag("div", title, cards([Card("warning", "Not ranked", sentence(why))]))
    items = []
    for name in ranking.order:
        tied = name in (one for one, _ in ranking.same)
        named = tag("span", _display_name(name), tag("small", "no clear difference to the next") if tied else None)
        items.append(tag("li", named, tag("strong", _figure(ranking.by, results.of(*name)))))
    return tag("div", title, tag("ol", *items, class_="ranking"))


def _legend(results: Results) -> list[tuple[str, str]]:
    return [(buffer, _colour(results, buffer)) for buffer in results.buffers]


def _colour(results: Results, buffer: str) -> str:
    return _COLOURS[results.buffers.index(buffer) % len(_COLOURS)]


def _memory(results: Results) -> Markup | None:
    known = [one for one in results.summaries if one.peak is not None]
    if not known:
        return None
    limit = results.header.size("limit") or 0.0
    most = max(one.peak or 0.0 for one in known)
    scale = limited_scale(most, limit)
    rows = []
    for one in results.summaries:
        peaks = "\n".join(f"{phase}: {format_bytes(size)}" for phase, size in one.peaks.items())
        pieces = [BarPiece(one.peak or 0.0, _colour(results, one.buffer), f"{_display_name(one.name)}\n{peaks}")]
        text = _bytes(one.peak) if one.done else one.runs[0].status
        each = one.bytes_per_transition
        note = "" if each is None else f"{each:,.0f} B a transition"
        rows.append(BarRow(_display_name(one.name), pieces if one.done else [], text, note))
    named = (limit, f"limit {format_bytes(limit)}") if limit else None
    phases = list(dict.fromkeys(phase for one in known for phase in one.peaks))
    figures = table(
        ["profile", "buffer", *phases],
        [[one.profile, one.buffer, *(_bytes(one.peaks.get(phase)) for phase in phases)] for one in known],
        "Peak memory by phase",
        words=2,
    )
    chart = bars(rows, scale, "Peak memory", legend=_legend(results), limit=named)
    lead = "The largest resident peak of the training process, median over seeds."
    return section("Memory", chart, details("By phase, as a table", figures), lead=lead)


def _speed(results: Results) -> Markup | None:
    known = [one.speed for one in results.summaries if one.speed is not None]
    if not known:
        return None
    most = max(interval.mean for interval in known)
    # Two seeds that differ give whiskers that reach far beyond any bar; they are cut off at twice the longest.
    scale = number_scale(min(max(interval.high for interval in known), 2 * most))
    chart = _intervals(results, scale, lambda one: one.speed, dots=False)
    return section("Speed", chart, lead=_SPEED_LEAD)


def _reward(results: Results) -> Markup | None:
    known = [one.reward for one in results.summaries if one.reward is not None]
    if not known:
        return None
    low, high = min(interval.low for interval in known), max(interval.high for interval in known)
    room = (high - low or abs(high) or 1.0) * 0.08
    begin, end = low - room, high + room
    # Rewards have no zero that means anything: the scale begins where the values do.
    scale = Scale(end - begin, (), number, "number")
    chart = _intervals(results, scale, lambda one: one.reward, dots=True, begin=begin)
    lead = (
        f"Mean return of an episode in the later half of training, from {number(begin)} (left) to {number(end)} "
        "(right). Whiskers: 95 % over the seeds; with one seed there are none."
    )
    return section("Reward", chart, lead=lead)


def _intervals(
    results: Results, scale: Scale, figure: Callable[[SeedsSummary], Interval | None], *, dots: bool, begin: float = 0.0
) -> Markup:
    rows = []
    for one in results.summaries:
        interval = figure(one)
        if interval is None:
            rows.append(BarRow(_display_name(one.name), [], _NOT_MEASURED if one.done else one.runs[0].status))
            continue
        text = _written(interval)
        piece = BarPiece(
            interval.mean - begin,
            _colour(results, one.buffer),
            f"{_display_name(one.name)}\n{text}\n{len(one.done)} seeds",
        )
        ends = None if interval.half is None else (interval.low - begin, interval.high - begin)
        rows.append(BarRow(_display_name(one.name), [piece], text, interval=ends))
    return bars(rows, scale, "By profile and buffer", legend=_legend(results), dots=dots)


def _written(interval: Interval | None) -> str:
    if interval is None:
        return _NOT_MEASURED
    return number(interval.mean) + ("" if interval.half is None else f" ± {number(interval.half)}")


def _memory_and_speed(results: Results) -> Markup | None:
    """Show every profile and buffer by what it takes and how fast it is."""
    known = [one for one in results.summaries if one.peak is not None and one.speed is not None]
    if len(known) < 2:
        return None
    points = [
        ScatterPoint(
            one.profile,
            results.buffers.index(one.buffer),
            _colour(results, one.buffer),
            one.peak or 0.0,
            _mean(one.speed) or 0.0,
            f"{_display_name(one.name)}\npeak {_bytes(one.peak)}\n{_written(one.speed)} steps a second",
        )
        for one in known
    ]
    across, up = bytes_scale(max(point.x for point in points)), number_scale(max(point.y for point in points))
    chart = scatter(points, across, up, "Peak memory against steps a second", _legend(results))
    lead = "Peak memory to the right, steps a second upwards: the further to the upper left, the better."
    return section("Profile against profile", chart, lead=lead)


def _buffer_comparison(results: Results) -> Markup | None:
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
    lead = f"What a profile takes and gives with another buffer, as a share of what it does with {first}."
    return section("Buffer against buffer", table(heads, rows, "Buffers compared", words=2), lead=lead)


def _compared(base: SeedsSummary, other: SeedsSummary) -> list[str]:
    reward = "-"
    if base.reward is not None and other.reward is not None:
        same = base.reward.overlaps(other.reward)
        change = other.reward.mean - base.reward.mean
        reward = "no clear difference" if same else f"{'+' if change > 0 else ''}{number(change)}"
    return [
        _share(base.peak, other.peak),
        _share(base.bytes_per_transition, other.bytes_per_transition),
        _share(_mean(base.speed), _mean(other.speed)),
        reward,
    ]


def _mean(interval: Interval | None) -> float | None:
    return None if interval is None else interval.mean


def _share(base: float | None, other: float | None) -> str:
    return "-" if not base or other is None else f"{100 * other / base:.0f} %"


def _all(results: Results) -> Markup:
    heads = ["profile", "buffer", "runs", "peak", "a transition", "steps a second", "reward", "saved", "in", "extra"]
    rows = []
    for one in results.summaries:
        each, seconds = one.bytes_per_transition, one.checkpoint("seconds")
        rows.append([
            one.profile, one.buffer, f"{len(one.done)} of {len(one.runs)}", _dash(one.peak, format_bytes),
            _dash(each, lambda value: f"{value:,.0f} B"), "-" if one.speed is None else _written(one.speed),
            "-" if one.reward is None else _written(one.reward), _dash(one.checkpoint("bytes"), format_bytes),
            _dash(seconds, duration), _dash(one.checkpoint("extra"), format_bytes),
        ])  # fmt: skip
    lead = "Medians, or means with the half width of their 95 % interval. Extra: memory that saving took for a while."
    return section("All figures", table(heads, rows, "All figures", words=2), lead=lead)


def _dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _runs_without_figures(results: Results) -> Markup | None:
    rows = [
        [_display_name((run.profile, run.buffer)), f"{run.seed}", run.status, run.reason or ""]
        for run in results.not_done()
    ]
    if not rows:
        return None
    heads = ["run", "seed", "status", "why"]
    return section("What was not measured", table(heads, rows, "Runs without figures", words=3, prose=True))


@dataclass(frozen=True, slots=True)
class ScatterPoint:
    """One thing."""

    name: str
    kind: int  # which shape it has
    colour: str
    x: float
    y: float
    tip: str


def scatter(
    points: Sequence[ScatterPoint], horizontal: Scale, vertical: Scale, label: str, kinds: Sequence[tuple[str, str]]
) -> Markup:
    """Write points, their axes and what their shapes mean.

    Args:
        kinds: Names and colours, in the order of the shapes.
    """
    lines = [
        tag("line", x1="0", x2="100%", y1=_down(vertical.share(value)), y2=_down(vertical.share(value)), class_="grid")
        for value in vertical.ticks
    ]
    marks = [
        tag(
            "svg",
            tag("path", d=_point_shape(point.kind), class_=f"mark {point.colour}", role="img", aria_label=point.tip,
                data_tip=point.tip),
            x=percent(horizontal.share(point.x)), y=_down(vertical.share(point.y)), overflow="visible",
        )
        for point in points
    ]  # fmt: skip
    # A number over each point: names would lie over each other wherever points are near.
    numbers = list(dict.fromkeys(point.name for point in points))
    signs = [
        tag(
            "span", f"{numbers.index(point.name) + 1}", class_="point-name", aria_hidden="true",
            style=f"left:{percent(horizontal.share(point.x))};bottom:{percent(vertical.share(point.y))}",
        )
        for point in points
    ]  # fmt: skip
    keys = [
        tag(
            "li",
            tag("svg", tag("path", d=_point_shape(at), class_=colour), viewBox="-8 -8 16 16", class_="shape"),
            name,
        )
        for at, (name, colour) in enumerate(kinds)
    ]
    keys += [tag("li", tag("strong", f"{at + 1}"), name) for at, name in enumerate(numbers)]
    drawing = tag("svg", *lines, *marks, focusable="false")
    return tag(
        "div",
        y_axis(vertical),
        tag("div", drawing, *signs, class_="points", role="group", aria_label=label),
        x_axis((horizontal.share(value), horizontal.text(value)) for value in horizontal.ticks),
        tag("ul", *keys, class_="legend"),
        class_="scatter",
    )


def _point_shape(kind: int) -> str:
    return _POINT_SHAPES[kind % len(_POINT_SHAPES)]


def _down(share: float) -> str:
    return percent(1 - share)

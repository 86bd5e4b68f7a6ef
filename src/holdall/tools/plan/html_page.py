"""A plan as one HTML page: checks, memory by phase, capacity against memory, profiles, and the lines to paste.

In:  a `Plan`.  Out: the text of one self-contained HTML file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdall.tools.plan.phases import PhasePart, RunPhase, largest_phase
from holdall.tools.plan.planner import Plan, both_units, count_or_dash
from holdall.tools.report import charts
from holdall.tools.report.charts import Child, Markup, joined, tag
from holdall.tools.report.document import Card, Tile, cards, code, document, section, sentence, table, tiles, toned_word
from holdall.units import format_bytes

_TONES = {"fits": "good", "tight": "warning", "does not fit": "error"}
_COLOURS = {
    "CUDA": "c8", "holdall": "c0", "copied": "c7", "buffer": "c1", "libraries": "c5", "weights": "c4", "batch": "c2",
}  # fmt: skip
"""By a word in the name of a part; environments and processes have the one that is left."""
_PROVENANCE = "Each part names its source: exact, measured, traced, or an estimate."


def write_plan_page(plan: Plan) -> str:
    """Write the page."""
    sections = [_tiles(plan), _answer(plan), _checks(plan), *_phases(plan), _capacities(plan), _profiles(plan)]
    if plan.notes:
        notes = tag("ul", *(tag("li", sentence(note)) for note in plan.notes), class_="notes")
        sections.append(section("Not included", notes))
    return document(plan.title, "plan", (), sections)


def _verdict_badge(verdict: object) -> Markup:
    return toned_word(str(verdict), _TONES[str(verdict)])


def _tiles(plan: Plan) -> Markup:
    check = max(plan.checks, key=lambda check: check.verdict)  # the one that decides
    verdict = Tile("verdict", str(plan.verdict), check.what, _TONES[str(plan.verdict)])
    needs = Tile("needs", format_bytes(check.need_bytes), f"at most {format_bytes(check.most_bytes)}")
    return tiles([verdict, needs, Tile("free", format_bytes(check.limit.free_bytes), check.limit.name)])


def _answer(plan: Plan) -> Markup:
    found: list[Child] = []
    if plan.change is not None:
        found.append(cards([Card("info", plan.change.title, sentence(plan.change.why))]))
    elif plan.verdict:
        found.append(cards([Card("error", "No single change makes it fit here", "")]))
    title = "The cheapest change that makes it fit" if plan.change else "To paste"
    return section(title, *found, code(plan.code))


def _checks(plan: Plan) -> Markup:
    heads = ["", "", "needs", "at most", "free"]
    rows: list[list[Child]] = []
    for check in plan.checks:
        name = joined(check.what, tag("small", f"of {check.limit.name}"))
        sizes = map(both_units, (check.need_bytes, check.most_bytes, check.limit.free_bytes))
        rows.append([name, _verdict_badge(check.verdict), *sizes])
    lead = "It fits if even the upper bound of its largest phase is below the limit; it is tight if only the need is."
    return section("Need and limits", table(heads, rows, "Checks", words=2), lead=lead)


def _phases(plan: Plan) -> list[Markup]:
    limit = plan.checks[0].limit
    host = (*plan.phases, *plan.holdall_phases)
    scale = _scale_with_limit(limit.free_bytes, host)
    groups = [("With Stable-Baselines3's buffer", plan.phases), ("With holdall's memory", plan.holdall_phases)]
    drawn = [_chart(title, phases, scale, limit.free_bytes) for title, phases in groups if phases]
    lead = f"A run needs the largest of its phases, not their sum. {_PROVENANCE}"
    shown = [section("Memory by phase", *drawn, lead=lead)]
    if plan.vram:
        free = next((check.limit.free_bytes for check in plan.checks if check.what.startswith("GPU")), 0)
        chart = _chart("GPU memory", plan.vram, _scale_with_limit(free, plan.vram), free)
        shown.append(section("On the GPU", chart, lead=_PROVENANCE))
    return shown


def _scale_with_limit(limit: int, phases: Sequence[RunPhase]) -> charts.Scale:
    """Choose a scale that holds the limit, unless it is so far away that nothing else could be seen."""
    most = max(phase.nbytes for phase in phases)
    return charts.bytes_scale(limit if most <= limit <= 4 * most else most)


def _chart(title: str, phases: Sequence[RunPhase], scale: charts.Scale, limit: int) -> Markup:
    peak, rows = largest_phase(phases), []
    colours: dict[str, str] = {}
    for phase in phases:
        pieces = [_piece(phase, part) for part in phase.parts if part.nbytes]
        colours |= {part.name: _colour(part) for part in phase.parts if part.nbytes}
        said = "" if phase.happens else "not in this run"
        rows.append(charts.BarRow(phase.name, pieces, format_bytes(phase.nbytes), said, strong=phase is peak))
    named = (float(limit), f"limit {format_bytes(limit)}") if limit else None
    return tag("div", tag("h4", title), charts.bars(rows, scale, title, legend=list(colours.items()), limit=named))


def _piece(phase: RunPhase, part: PhasePart) -> charts.BarPiece:
    sizes = f"{both_units(part.nbytes)}, {part.how}\nat most {format_bytes(part.most_bytes)}"
    return charts.BarPiece(part.nbytes, _colour(part), f"{phase.name}: {part.name}\n{sizes}")


def _colour(part: PhasePart) -> str:
    """Give a part the same colour in every chart of the page."""
    return next((colour for word, colour in _COLOURS.items() if word in part.name), "c6")


def _capacities(plan: Plan) -> Markup:
    name = plan.size_word.capitalize()
    heads = [plan.size_word, "SB3's buffer", "the run"]
    holdall = plan.known.need is not None
    rows: list[list[Child]] = []
    for row in plan.table:
        cells: list[Child] = [count_or_dash(row.size), both_units(row.sb3_bytes), _verdict_badge(row.sb3_verdict)]
        if row.holdall_bytes is not None:
            cells += [both_units(row.holdall_bytes), _verdict_badge(row.holdall_verdict)]
        rows.append(cells)
    figures = table(heads + (["holdall's", "the run"] if holdall else []), rows, f"{name} against memory")
    sizes = tiles(Tile(f"largest {what}", size) for what, size in plan.largest_sizes())
    lead = (
        "Bytes are those of the buffer, verdicts those of the whole run. A largest size holds if nothing else changes."
    )
    return section(f"{name} against memory", sizes, _curves(plan), figures, lead=lead)


def _curves(plan: Plan) -> Markup:
    rows = sorted(plan.table, key=lambda row: row.size)
    sizes = np.array([0, *(row.size for row in rows)], np.float64)
    layers = [charts.PlotLayer("SB3's buffer", "c1", np.array([0, *(row.sb3_bytes for row in rows)], np.float64))]
    if plan.known.need is not None:
        ours = [plan.known.need.need(0), *(row.holdall_bytes or 0 for row in rows)]
        layers.append(charts.PlotLayer("holdall's memory", "c0", np.array(ours, np.float64)))
    limit = plan.known.limits.limit_bytes
    most = max(float(layer.values.max()) for layer in layers)
    scale = charts.bytes_scale(limit if most <= limit <= 2 * most else most)
    heads = [f"{plan.size_word} {size:,.0f}" for size in sizes]
    marked = {0, len(sizes) - 1, len(sizes) // 2}
    ticks = [(size / sizes[-1], f"{size:,.0f}") for at, size in enumerate(sizes) if at in marked]
    title, named = f"{plan.size_word.capitalize()} against memory", (float(limit), f"limit {format_bytes(limit)}")
    return charts.Plot(title, sizes / sizes[-1], heads, layers, scale, ticks, False, named).markup()


def _profiles(plan: Plan) -> Markup:
    heads = ["profile", "of the limit", "for the run", "batch", "SB3 holds", "holdall holds"]
    rows: list[list[Child]] = []
    for profile in plan.profiles:
        counts = (profile.batch_size, profile.sb3_size, profile.holdall_size or 0)
        rows.append(
            [profile.name, f"{profile.share:.0%}", both_units(profile.limit_bytes), *map(count_or_dash, counts)]
        )
    return section("Profiles", table(heads, rows, "Profiles"), lead="Shares of the limit for the whole run.")

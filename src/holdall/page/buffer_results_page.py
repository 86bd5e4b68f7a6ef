"""The page of a comparison of buffers: bytes, times, and whether the data came back right.

In:  `BufferResults`.  Out: the page, and the same in short as plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from holdall.page.bars import Piece, Row, bars
from holdall.page.buffer_results import BufferResults, Measured
from holdall.page.cards import Tile, said, table, tiles
from holdall.page.document import document, section
from holdall.page.markup import Markup, tag
from holdall.page.results_page import machine_section
from holdall.page.scale import bytes_scale, duration, number, number_scale
from holdall.units import format_bytes

_OURS = "holdall"
_FIGURES: tuple[tuple[str, Callable[[Measured], float | None], str], ...] = (
    ("memory of a transition", lambda one: one.bytes_per_transition, "bytes"),
    ("add, of one step", lambda one: one.add_us, "µs"),
    ("sample, of one batch", lambda one: one.sample_ms, "ms"),
    ("save", lambda one: one.save_s, "s"),
    ("load", lambda one: one.load_s, "s"),
)


def page(results: BufferResults) -> str:
    """Write the page."""
    sections = [_tiles(results), *(_case(results, case) for case in results.cases), _absent(results)]
    facts = [f"{len(results.cases)} cases", f"{len({one.library for one in results.measured})} libraries"]
    return document("Replay buffers alone", "bench buffers", facts, (
        part for part in [*sections, machine_section(results.header)] if part
    ))  # fmt: skip


def summary(results: BufferResults) -> dict[str, Any]:
    """Return the page in short, as plain data."""
    return {
        "buffers": [asdict(one) | {"bytes_per_transition": one.bytes_per_transition} for one in results.measured],
        "absent": [{"what": what, "why": why} for what, why in results.absent],
    }


def _of(results: BufferResults, case: str) -> list[Measured]:
    return [one for one in results.measured if one.case == case]


def _tiles(results: BufferResults) -> Markup:
    shown = []
    for case in results.cases[:4]:
        known = [one for one in _of(results, case) if one.bytes_per_transition is not None and one.exact]
        if known:
            least = min(known, key=lambda one: one.bytes_per_transition or 0.0)
            size = _bytes(least.bytes_per_transition or 0.0)
            shown.append(Tile(f"{case}, least and exact", size, f"a transition, {least.library}"))
    wrong = [one for one in results.measured if one.exact is False]
    tone = "error" if wrong else "good"
    shown.append(Tile("data came back wrong", f"{len(wrong)} of {len(results.measured)}", "library and case", tone))
    return tiles(shown)


def _bytes(value: float) -> str:
    return f"{value:,.0f} B" if value < 100_000 else format_bytes(value)


_WRITTEN: dict[str, Callable[[float], str]] = {
    "bytes": _bytes,
    "µs": lambda value: f"{number(value)} µs",
    "ms": lambda value: f"{number(value)} ms",
    "s": duration,
}


def _case(results: BufferResults, case: str) -> Markup:
    known = _of(results, case)
    charts = [chart for name, figure, unit in _FIGURES if (chart := _chart(known, name, figure, unit)) is not None]
    count = max((one.transitions or 0.0 for one in known), default=0.0)
    lead = f"{count:,.0f} transitions. Shorter is better, if the data came back right."
    laps = max((one.laps or 0.0 for one in known), default=0.0)
    if laps > 1:
        lead += f" They were played {laps:.1f} times over: a buffer that shares what repeats gains by that."
    keys = (("holdall", "c0"), ("others", "c5"), ("rows came back wrong", "unused"))
    legend = tag(
        "ul", *(tag("li", tag("span", class_=f"key {colour}"), name) for name, colour in keys), class_="legend"
    )
    return section(case, legend, tag("div", *charts, class_="columns wide"), _table(known), lead=lead)


def _chart(
    known: Sequence[Measured], name: str, figure: Callable[[Measured], float | None], unit: str
) -> Markup | None:
    values = [value for one in known if (value := figure(one)) is not None]
    if not values:
        return None
    scale = bytes_scale(max(values)) if unit == "bytes" else number_scale(max(values))
    rows = []
    for one in known:
        value = figure(one)
        text = _text(value, _WRITTEN[unit])
        colour = "unused" if one.exact is False else "c0" if one.library.startswith(_OURS) else "c5"
        tip = f"{one.library} {one.version}\n{name}: {text}\n{_exact_words(one)}"
        rows.append(Row(one.library, [] if value is None else [Piece(value, colour, tip)], text))
    return tag("div", tag("h4", name.capitalize()), bars(rows, scale, name))


def _exact_words(one: Measured) -> str:
    return {True: "every row came back right", False: "rows came back wrong", None: "not compared"}[one.exact]


def _table(known: Sequence[Measured]) -> Markup:
    heads = ["library", "version", "a transition", "add", "sample", "save", "load", "exact", "note"]
    rows = [
        [
            one.library, one.version or "-", _text(one.bytes_per_transition, _bytes), _text(one.add_us, _WRITTEN["µs"]),
            _text(one.sample_ms, _WRITTEN["ms"]), _text(one.save_s, duration), _text(one.load_s, duration), _exact(one),
            one.note,
        ]
        for one in known
    ]  # fmt: skip
    return table(heads, rows, "All figures", words=2, prose=True)


def _exact(one: Measured) -> Markup:
    if one.exact is None:
        return tag("span", "not compared")
    return said("yes", "good") if one.exact else said("no", "error")


def _text(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


def _absent(results: BufferResults) -> Markup | None:
    if not results.absent:
        return None
    items = [tag("li", f"{what}: {why}" if why else what) for what, why in results.absent]
    return section("Not measured", tag("ul", *items, class_="notes"))

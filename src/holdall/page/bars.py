"""Horizontal bars: one row a name, parts one behind the other, a limit, an interval.

In:  rows on a common scale.  Out: SVG whose widths are shares of the page's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.page.markup import Markup, breakable, tag
from holdall.page.scale import Scale

_HEIGHT = 22
_THIN = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a bar."""

    value: float
    colour: str  # a class of page.css
    tip: str


@dataclass(frozen=True, slots=True)
class Row:
    """One bar."""

    name: str
    pieces: Sequence[Piece]
    text: str  # beside the bar
    note: str = ""  # under the name
    interval: tuple[float, float] | None = None
    strong: bool = False


def bars(
    rows: Sequence[Row],
    scale: Scale,
    label: str,
    *,
    legend: Sequence[tuple[str, str]] = (),
    limit: tuple[float, str] | None = None,
    dots: bool = False,
) -> Markup:
    """Write bars.

    Args:
        legend: Names and colours of the parts.
        limit: A line across all rows, and what it is.
        dots: Points on the scale instead of lengths from zero: for values of which zero means nothing.
    """
    lines = [_row(row, scale, limit, dots) for row in rows]
    keys = [tag("li", tag("span", class_=f"key {colour}"), name) for name, colour in legend]
    if limit is not None:
        above = "" if limit[0] <= scale.end else " (beyond the scale)"
        keys.append(tag("li", tag("span", class_="key dashed"), f"{limit[1]}{above}"))
    return tag(
        "div",
        tag("ul", *keys, class_="legend") if keys else None,
        tag("ul", *lines, class_="bars", aria_label=label),
        class_="bar-chart",
    )


def _row(row: Row, scale: Scale, limit: tuple[float, str] | None, dots: bool) -> Markup:
    marks: list[Markup] = [tag("rect", width="100%", height=_HEIGHT, class_="track")]
    left = 0.0
    for piece in row.pieces:
        if dots:
            marks.append(_dot(piece, scale))
            continue
        x, wide = scale.share(left), scale.share(left + piece.value) - scale.share(left)
        marks.append(
            tag("rect", x=_percent(x), width=_percent(wide), height=_HEIGHT, class_=f"mark {piece.colour}", role="img",
                aria_label=piece.tip, data_tip=piece.tip)
        )  # fmt: skip
        left += piece.value
    if row.interval is not None:
        marks += _interval(row.interval, scale)
    if limit is not None and limit[0] <= scale.end:
        at = _percent(scale.share(limit[0]))
        marks.append(tag("line", x1=at, x2=at, y1="0", y2=_HEIGHT, class_="limit"))
    name = tag("div", breakable(row.name), tag("small", row.note) if row.note else None, class_="bar-name")
    drawing = tag("svg", *marks, height=_HEIGHT, width="100%", focusable="false")
    value = tag("div", row.text, class_="bar-text")
    return tag("li", name, tag("div", drawing, class_="bar-track"), value, class_="strong" if row.strong else None)


def _dot(piece: Piece, scale: Scale) -> Markup:
    return tag("circle", cx=_percent(scale.share(piece.value)), cy=_HEIGHT // 2, r="6", class_=f"mark {piece.colour}",
               role="img", aria_label=piece.tip, data_tip=piece.tip)  # fmt: skip


def _interval(interval: tuple[float, float], scale: Scale) -> list[Markup]:
    low, high = (_percent(scale.share(end)) for end in interval)
    middle = _HEIGHT / 2
    top, bottom = middle - 2 * _THIN, middle + 2 * _THIN
    return [
        tag("line", x1=low, x2=high, y1=middle, y2=middle, class_="interval"),
        tag("line", x1=low, x2=low, y1=top, y2=bottom, class_="interval"),
        tag("line", x1=high, x2=high, y1=top, y2=bottom, class_="interval"),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"

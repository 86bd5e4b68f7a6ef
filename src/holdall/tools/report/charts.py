"""Charts as HTML and SVG: elements, scales, thinning, plots over an axis, horizontal bars.

In:  values and names.  Out: `Markup`.
Invariants: every plain string is escaped; only `Markup`, which `tag` makes, is used as it is. A scale starts at zero
and ends at or above the largest value. Shapes stretch with the page and text does not.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from holdall.units import format_bytes, format_seconds

_Value = TypeVar("_Value")
_VOID = frozenset({"br", "hr", "link", "meta"})
_STEPS = (1, 2, 2.5, 5, 10)
_BINARY_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_SMALLEST = 1e-6
_DAY = 86400
_SIDE = 1000
LIMIT_IN_SIGHT = 2.5
"""A limit is drawn up to this many times the largest value."""
_SHARE_FOR_A_NAME = 0.09
"""A band whose last value takes this share of the height has its name written into it."""
SEVERITY_SIGNS = {"info": "●", "warning": "▲", "error": "◆"}
"""Signs that differ in shape, and not in colour alone."""
_BAR_HEIGHT = 22
_WHISKER = 3


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | None
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Write an element: `tag("td", "a < b", class_="wide")`.

    None is ignored, as a child and as an attribute. True becomes an attribute without a value. `class_` becomes
    `class`, and `data_tip` becomes `data-tip`.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Join children, and escape plain text."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child))


def mark(name: str, tip: str, colour: str, **attributes: Attribute) -> Markup:
    """Write a shape that shows a tip."""
    return tag(name, **attributes, class_=f"mark {colour}", role="img", aria_label=tip, data_tip=tip)


def legend_of(keys: Iterable[tuple[str, str]]) -> Markup:
    """Write names and the classes of their colours."""
    return tag("ul", *(tag("li", tag("span", class_=f"key {colour}"), name) for name, colour in keys), class_="legend")


def breakable(name: str) -> Markup:
    """Write a long name that a browser may break after dots, underscores and slashes."""
    return Markup(re.sub(r"(?<=[._/-])(?=\w)", "<wbr>", escape(name)))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from zero."""

    end: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    unit: str  # Bytes, number or seconds. The page's script formats the values of a plot by it.

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1. Larger values than `end` are at 1."""
        return min(max(value / self.end, 0.0), 1.0)


def bytes_scale(largest: float) -> Scale:
    """Make an axis of bytes, with round values in binary units."""
    largest = max(largest, 1.0)
    unit = 1024.0 ** min(int(math.log(largest, 1024)), 4)
    steps = [step * unit * shift for shift in (1 / 1024, 1) for step in _BINARY_STEPS]
    steps += [2.0**power for power in range(41, 63)]
    return _scale(largest, steps, _round_bytes, "bytes")


def limited_scale(largest: float, limit: float | None, sight: float = LIMIT_IN_SIGHT) -> Scale:
    """Make an axis of bytes that shows a limit of at most `sight` times the largest value."""
    in_sight = limit is not None and largest <= limit <= sight * largest
    return bytes_scale(limit if limit is not None and in_sight else largest)


def number_scale(largest: float) -> Scale:
    """Make an axis of plain numbers."""
    largest = max(largest, _SMALLEST) if largest else 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    steps = [step * power * shift for shift in (0.01, 0.1, 1) for step in _STEPS]
    return _scale(largest, steps, number, "number")


def seconds_scale(largest: float) -> Scale:
    """Make an axis of time that ends with the data."""
    largest = max(largest, _SMALLEST) if largest else 1.0
    days = [float(_DAY * 2**power) for power in range(1, 12)]
    return _scale(largest, [*_SECONDS, *days], format_seconds, "seconds")


def _scale(largest: float, steps: list[float], text: Callable[[float], str], unit: str) -> Scale:
    """Choose the smallest step with few ticks. An axis of time ends with the data, any other one with a tick."""
    is_time = unit == "seconds"
    ticks = 8 if is_time else 5
    step = next((step for step in steps if largest / step <= ticks), largest / ticks)
    count = math.floor(largest / step + 1e-9) if is_time else math.ceil(largest / step - 1e-9)
    return Scale(
        largest if is_time else count * step, tuple(position * step for position in range(count + 1)), text, unit
    )


def number(value: float) -> str:
    """Write a number with about three significant digits."""
    value = float(value)
    if value.is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.3g}"


def or_dash(value: _Value | None, text: Callable[[_Value], str]) -> str:
    """Write a value, or a dash in place of None."""
    return "-" if value is None else text(value)


def _round_bytes(value: float) -> str:
    text = format_bytes(value)
    return text.replace(".0 ", " ") if value else "0"


Floats = NDArray[np.float64]


def thinned_positions(values: Floats, most: int) -> NDArray[np.int64]:
    """Choose about `most` positions: both ends, and the smallest and the largest value of every stretch."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    stretches = np.array_split(np.arange(count), max(most // 2 - 1, 1))
    ends = [0, count - 1]
    lowest = [int(stretch[np.argmin(values[stretch])]) for stretch in stretches]
    highest = [int(stretch[np.argmax(values[stretch])]) for stretch in stretches]
    return np.unique(np.array(ends + lowest + highest, np.int64))


@dataclass(frozen=True, slots=True)
class PlotLayer:
    """One named series."""

    name: str
    colour: str  # a class of page.css
    values: Floats


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot over a horizontal axis.

    Args:
        shares: Positions of the values on the horizontal axis, from 0 to 1, in order.
        heads: Heading of the reading at every position, such as "12 min, step 3,400".
        stacked: Whether layers are drawn as stacked areas, with their sum in the reading. Otherwise they are curves.
        flags: Events: the position on the axis from 0 to 1, the severity and the text.
        x_title: Quantity on the horizontal axis.
        y_title: Quantity on the vertical axis, whose ticks have the unit.
    """

    label: str
    shares: Floats
    heads: Sequence[str]
    layers: Sequence[PlotLayer]
    scale: Scale
    ticks: Sequence[tuple[float, str]]
    stacked: bool = True
    limit: tuple[float, str] | None = None
    flags: Sequence[tuple[float, str, str]] = ()
    x_title: str = ""
    y_title: str = ""

    def markup(self) -> Markup:
        """Write the plot and its legend."""
        line, label = self._limit_marks()
        drawn, names = self._areas() if self.stacked else (self._curves(), [])
        shapes = [*self._grid(), *drawn, line]
        box = f"0 0 {_SIDE} {_SIDE}"
        drawing = tag("svg", *shapes, viewBox=box, preserveAspectRatio="none", aria_hidden="true", focusable="false")
        last = len(self.heads) - 1
        surface = tag(
            "div",
            drawing,
            label,
            *names,
            tag("span", class_="cross", hidden=True),
            class_="plot",
            tabindex="0",
            role="slider",
            aria_label=f"{self.label}. Arrow keys move through it.",
            aria_valuemin="0",
            aria_valuemax=last,
            aria_valuenow=last,
            aria_valuetext=self._spoken(last),
        )
        return tag(
            "div",
            axis_title(self.y_title),
            tag("div", *self._flags(), class_="flags") if self.flags else None,
            y_axis(self.scale),
            surface,
            x_axis(self.ticks),
            axis_title(self.x_title, "across"),
            self._legend(),
            tag("script", self._figures(), type="application/json", class_="figures"),
            class_="plot-frame",
        )

    def _grid(self) -> list[Markup]:
        heights = [_down(self.scale.share(value)) for value in self.scale.ticks]
        return [tag("line", x1="0", x2=_SIDE, y1=y, y2=y, class_="grid") for y in heights]

    def _areas(self) -> tuple[list[Markup], list[Markup]]:
        """Return the bands, and names for thick bands, so that a reader does not depend on colours."""
        bands = []
        names = []
        below = np.zeros(len(self.shares))
        for layer in self.layers:
            top = below + layer.values
            path = f"M{self._path(self.shares, top)} L{self._path(self.shares[::-1], below[::-1])}Z"
            bands.append(tag("path", d=path, class_=f"band {layer.colour}"))
            thick = self.scale.share(layer.values[-1]) if len(top) else 0.0
            if thick >= _SHARE_FOR_A_NAME:
                middle = self.scale.share(below[-1]) + thick / 2
                names.append(tag("span", layer.name, class_="band-name", style=f"bottom:{percent(middle)}"))
            below = top
        return bands, names

    def _curves(self) -> list[Markup]:
        curves = []
        for layer in self.layers:
            known = np.isfinite(layer.values)
            if known.any():
                path = self._path(self.shares[known], layer.values[known])
                curves.append(tag("path", d=f"M{path}", class_=f"curve {layer.colour}"))
        return curves

    def _path(self, shares: Floats, values: Floats) -> str:
        points = zip(shares, values, strict=True)
        return " ".join(f"{_SIDE * x:.1f},{_down(self.scale.share(y))}" for x, y in points)

    def _limit_marks(self) -> tuple[Markup | None, Markup | None]:
        """Return the line of the limit, and its label."""
        if self.limit is None or self.limit[0] > self.scale.end:
            return None, None
        share = self.scale.share(self.limit[0])
        y = _down(share)
        side = "below" if share > 0.9 else "above"
        label = tag("span", self.limit[1], class_=f"limit-label {side}", style=f"bottom:{percent(share)}")
        return tag("line", x1="0", x2=_SIDE, y1=y, y2=y, class_="limit"), label

    def _flags(self) -> list[Markup]:
        return [
            tag(
                "span",
                SEVERITY_SIGNS[severity],
                class_=f"flag mark {severity}",
                data_tip=text,
                role="img",
                aria_label=text,
                style=f"left:{percent(share)}",
            )
            for share, severity, text in self.flags
        ]

    def _legend(self) -> Markup | None:
        shown = self.layers[::-1] if self.stacked else self.layers
        keys = [(layer.name, layer.colour) for layer in shown]
        if self.limit is not None:
            where = "" if self.limit[0] <= self.scale.end else " (above the plot)"
            keys.append((f"{self.limit[1]}{where}", "dashed"))
        return legend_of(keys) if len(keys) > 1 else None

    def _spoken(self, position: int) -> str:
        if position < 0:
            return "no readings"
        shown = [f"{layer.name} {self.scale.text(layer.values[position])}" for layer in self.layers]
        return f"{self.heads[position]}: {', '.join(shown)}"

    def _figures(self) -> Markup:
        figures = {
            "at": [round(float(share), 5) for share in self.shares],
            "heads": list(self.heads),
            "names": [layer.name for layer in self.layers],
            "colours": [layer.colour for layer in self.layers],
            "values": [[round(float(v), 2) if np.isfinite(v) else None for v in layer.values] for layer in self.layers],
            "unit": self.scale.unit,
            "sum": self.stacked and len(self.layers) > 1,
        }
        # In a script element only these characters could end it, or begin a comment.
        text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
        return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def y_axis(scale: Scale) -> Markup:
    """Write the values on the vertical axis."""
    ticks = [tag("span", scale.text(value), style=f"bottom:{percent(scale.share(value))}") for value in scale.ticks]
    return tag("div", *ticks, class_="y-axis", aria_hidden="true")


def x_axis(ticks: Iterable[tuple[float, str]]) -> Markup:
    """Write the ticks of the horizontal axis. On a narrow page, only some of them are shown, at equal distances."""
    known = list(ticks)
    stride = 3 if (len(known) - 1) % 2 and not (len(known) - 1) % 3 else 2
    spans = []
    for at, (share, text) in enumerate(known):
        end = {0.0: "begin", 1.0: "end"}.get(round(share, 2), "")  # The text stays inside the plot.
        kind = f"{end}{' minor' if at % stride else ''}".strip()
        spans.append(tag("span", text, style=f"left:{percent(share)}", class_=kind or None))
    return tag("div", *spans, class_="x-axis", aria_hidden="true")


def axis_title(text: str, kind: str = "up") -> Markup | None:
    """Write the title of an axis: above a vertical axis, below a horizontal one."""
    return tag("div", text, class_=f"axis-title {kind}") if text else None


def percent(share: float) -> str:
    """Write a share as a percentage for CSS and SVG."""
    return f"{100 * share:.2f}%"


def _down(share: float) -> str:
    return f"{_SIDE * (1 - share):.1f}"


@dataclass(frozen=True, slots=True)
class BarPiece:
    """One part of a bar."""

    value: float
    colour: str  # a class of page.css
    tip: str


@dataclass(frozen=True, slots=True)
class BarRow:
    """One bar."""

    name: str
    pieces: Sequence[BarPiece]
    text: str  # Beside the bar.
    note: str = ""  # Under the name.
    interval: tuple[float, float] | None = None
    strong: bool = False


def bars(
    rows: Sequence[BarRow],
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
        limit: Value and name of a line across all rows.
        dots: Draw points instead of bars that begin at zero, for values without a meaningful zero.
    """
    keys = list(legend)
    if limit is not None:
        keys.append((f"{limit[1]}{'' if limit[0] <= scale.end else ' (beyond the scale)'}", "dashed"))
    lines = tag("ul", *(_bar(row, scale, limit, dots) for row in rows), class_="bars", aria_label=label)
    return tag("div", legend_of(keys) if keys else None, lines, class_="bar-chart")


def _bar(row: BarRow, scale: Scale, limit: tuple[float, str] | None, dots: bool) -> Markup:
    marks: list[Markup] = [tag("rect", width="100%", height=_BAR_HEIGHT, class_="track")]
    left = 0.0
    middle = _BAR_HEIGHT / 2
    for piece in row.pieces:
        begin = scale.share(left)
        end = scale.share(left + piece.value)
        if dots:
            marks.append(mark("circle", piece.tip, piece.colour, cx=percent(end), cy=_BAR_HEIGHT // 2, r="6"))
            continue
        place = {"x": percent(begin), "width": percent(end - begin)}
        marks.append(mark("rect", piece.tip, piece.colour, **place, height=_BAR_HEIGHT))
        left += piece.value
    if row.interval is not None:
        low, high = (percent(scale.share(end)) for end in row.interval)
        top = middle - 2 * _WHISKER
        bottom = middle + 2 * _WHISKER
        lines = ((low, high, middle, middle), (low, low, top, bottom), (high, high, top, bottom))
        marks += (tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_="interval") for x1, x2, y1, y2 in lines)
    if limit is not None and limit[0] <= scale.end:
        at = percent(scale.share(limit[0]))
        marks.append(tag("line", x1=at, x2=at, y1="0", y2=_BAR_HEIGHT, class_="limit"))
    name = tag("div", breakable(row.name), tag("small", row.note) if row.note else None, class_="bar-name")
    drawing = tag("svg", *marks, height=_BAR_HEIGHT, width="100%", focusable="false")
    value = tag("div", row.text, class_="bar-text")
    return tag("li", name, tag("div", drawing, class_="bar-track"), value, class_="strong" if row.strong else None)

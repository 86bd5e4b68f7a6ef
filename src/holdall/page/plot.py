"""Values over an axis: stacked areas or curves, with limits, flags, and a reading for every place.

In:  layers over common positions.  Out: SVG in a frame that fits any width, and its figures for the page's script.
Invariant: shapes stretch with the page and text does not, so the same plot can be read at 400 and at 1,200 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdall.page.markup import Markup, tag
from holdall.page.scale import Scale
from holdall.page.thin import Floats

_SIDE = 1000
_ROOM_FOR_A_NAME = 0.09
"""A band whose last value takes this share of the height has its name written into it."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One named series."""

    name: str
    colour: str  # a class of page.css
    values: Floats


@dataclass(frozen=True, slots=True)
class Flag:
    """Something that happened at one place of the axis."""

    share: float  # where, from 0 to 1
    severity: str  # info, warning or error
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """What a plot shows.

    Args:
        shares: Where the values lie on the horizontal axis, from 0 to 1, in order.
        heads: What stands over the reading of every place, as "12 min, step 3,400".
        stacked: Areas one upon the other, and their sum in the reading; otherwise curves.
    """

    label: str
    shares: Floats
    heads: Sequence[str]
    layers: Sequence[Layer]
    scale: Scale
    ticks: Sequence[tuple[float, str]]
    stacked: bool = True
    limit: tuple[float, str] | None = None
    flags: Sequence[Flag] = ()

    def markup(self) -> Markup:
        """Write the plot and its legend."""
        shapes = [*self._grid(), *(self._areas() if self.stacked else self._curves()), *self._limit_line()]
        box = f"0 0 {_SIDE} {_SIDE}"
        drawing = tag("svg", *shapes, viewBox=box, preserveAspectRatio="none", aria_hidden="true", focusable="false")
        last = len(self.heads) - 1
        surface = tag(
            "div", drawing, *self._limit_label(), *self._band_names(), tag("span", class_="cross", hidden=True),
            class_="plot", tabindex="0", role="slider", aria_label=f"{self.label}. Arrow keys move through it.",
            aria_valuemin="0", aria_valuemax=last, aria_valuenow=last, aria_valuetext=self._spoken(last),
        )  # fmt: skip
        return tag(
            "div",
            tag("div", *self._flags(), class_="flags") if self.flags else None,
            tag("div", *self._vertical_ticks(), class_="y-axis", aria_hidden="true"),
            surface,
            tag("div", *self._horizontal_ticks(), class_="x-axis", aria_hidden="true"),
            self._legend(),
            tag("script", self._figures(), type="application/json", class_="figures"),
            class_="plot-frame",
        )

    def _grid(self) -> list[Markup]:
        lines = []
        for value in self.scale.ticks:
            y = _down(self.scale.share(value))
            lines.append(tag("line", x1="0", x2=_SIDE, y1=y, y2=y, class_="grid"))
        return lines

    def _areas(self) -> list[Markup]:
        below = np.zeros(len(self.shares))
        bands = []
        for layer in self.layers:
            top = below + layer.values
            there = " ".join(_point(x, self.scale.share(y)) for x, y in zip(self.shares, top, strict=True))
            back = zip(self.shares[::-1], below[::-1], strict=True)
            path = f"M{there} L{' '.join(_point(x, self.scale.share(y)) for x, y in back)}Z"
            bands.append(tag("path", d=path, class_=f"band {layer.colour}"))
            below = top
        return bands

    def _curves(self) -> list[Markup]:
        curves = []
        for layer in self.layers:
            known = np.isfinite(layer.values)
            points = zip(self.shares[known], layer.values[known], strict=True)
            path = " ".join(_point(x, self.scale.share(y)) for x, y in points)
            if path:
                curves.append(tag("path", d=f"M{path}", class_=f"curve {layer.colour}"))
        return curves

    def _limit_line(self) -> list[Markup]:
        if self.limit is None or self.limit[0] > self.scale.end:
            return []
        y = _down(self.scale.share(self.limit[0]))
        return [tag("line", x1="0", x2=_SIDE, y1=y, y2=y, class_="limit")]

    def _limit_label(self) -> list[Markup]:
        if self.limit is None or self.limit[0] > self.scale.end:
            return []
        share = self.scale.share(self.limit[0])
        side = "below" if share > 0.9 else "above"
        return [tag("span", self.limit[1], class_=f"limit-label {side}", style=f"bottom:{100 * share:.2f}%")]

    def _band_names(self) -> list[Markup]:
        """Name the bands that are thick enough at the end, so that a reader need not go by colour alone."""
        if not self.stacked or not len(self.shares):
            return []
        names, below = [], 0.0
        for layer in self.layers:
            thick = self.scale.share(layer.values[-1])
            if thick >= _ROOM_FOR_A_NAME:
                middle = self.scale.share(below) + thick / 2
                names.append(tag("span", layer.name, class_="band-name", style=f"bottom:{100 * middle:.2f}%"))
            below += layer.values[-1]
        return names

    def _vertical_ticks(self) -> list[Markup]:
        text, share = self.scale.text, self.scale.share
        return [tag("span", text(value), style=f"bottom:{100 * share(value):.2f}%") for value in self.scale.ticks]

    def _horizontal_ticks(self) -> list[Markup]:
        ends = {0.0: "begin", 1.0: "end"}  # their text stays inside of the plot
        return [
            tag("span", text, style=f"left:{100 * share:.2f}%", class_=ends.get(round(share, 2)))
            for share, text in self.ticks
        ]

    def _flags(self) -> list[Markup]:
        return [
            tag(
                "span", SEVERITY_SIGNS[flag.severity], class_=f"flag mark {flag.severity}", data_tip=flag.text,
                role="img", aria_label=flag.text, style=f"left:{100 * flag.share:.2f}%",
            )
            for flag in self.flags
        ]  # fmt: skip

    def _legend(self) -> Markup | None:
        shown = self.layers[::-1] if self.stacked else self.layers
        keys = [tag("li", tag("span", class_=f"key {layer.colour}"), layer.name) for layer in shown]
        if self.limit is not None:
            where = "" if self.limit[0] <= self.scale.end else " (above the plot)"
            keys.append(tag("li", tag("span", class_="key dashed"), f"{self.limit[1]}{where}"))
        return tag("ul", *keys, class_="legend") if len(keys) > 1 else None

    def _spoken(self, position: int) -> str:
        if position < 0:
            return "no readings"
        said = [f"{layer.name} {self.scale.text(layer.values[position])}" for layer in self.layers]
        return f"{self.heads[position]}: {', '.join(said)}"

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


SEVERITY_SIGNS = {"info": "●", "warning": "▲", "error": "◆"}
"""Signs that differ in shape, and not in colour alone."""


def _down(share: float) -> str:
    return f"{_SIDE * (1 - share):.1f}"


def _point(x: float, share: float) -> str:
    return f"{_SIDE * x:.1f},{_down(share)}"

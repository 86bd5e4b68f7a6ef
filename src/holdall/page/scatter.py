"""Points over two axes: what one thing costs against what it gives.

In:  named points.  Out: SVG whose places are shares of the frame; shapes and names tell the kinds apart, and colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdall.page.markup import Markup, tag
from holdall.page.scale import Scale

_SHAPES = ("M-6,0a6,6 0 1,0 12,0a6,6 0 1,0 -12,0Z", "M-5.5,-5.5H5.5V5.5H-5.5Z", "M0,-7.5 7.5,0 0,7.5 -7.5,0Z",
           "M0,-7 7,5.5H-7Z")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """One thing."""

    name: str
    kind: int  # which shape it has
    colour: str
    x: float
    y: float
    tip: str


def scatter(
    points: Sequence[Point], horizontal: Scale, vertical: Scale, label: str, kinds: Sequence[tuple[str, str]]
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
            tag("path", d=_shape(point.kind), class_=f"mark {point.colour}", role="img", aria_label=point.tip,
                data_tip=point.tip),
            x=_percent(horizontal.share(point.x)), y=_down(vertical.share(point.y)), overflow="visible",
        )
        for point in points
    ]  # fmt: skip
    # A number over each point: names would lie over each other wherever points are near.
    numbers = list(dict.fromkeys(point.name for point in points))
    signs = [
        tag(
            "span", f"{numbers.index(point.name) + 1}", class_="point-name", aria_hidden="true",
            style=f"left:{_percent(horizontal.share(point.x))};bottom:{_percent(vertical.share(point.y))}",
        )
        for point in points
    ]  # fmt: skip
    keys = [
        tag("li", tag("svg", tag("path", d=_shape(at), class_=colour), viewBox="-8 -8 16 16", class_="shape"), name)
        for at, (name, colour) in enumerate(kinds)
    ]
    keys += [tag("li", tag("strong", f"{at + 1}"), name) for at, name in enumerate(numbers)]
    drawing = tag("svg", *lines, *marks, focusable="false")
    ticks_up = [
        tag("span", vertical.text(value), style=f"bottom:{_percent(vertical.share(value))}") for value in vertical.ticks
    ]
    ticks_along = [
        tag("span", horizontal.text(value), style=f"left:{_percent(horizontal.share(value))}",
            class_={0.0: "begin", 1.0: "end"}.get(round(horizontal.share(value), 2)))
        for value in horizontal.ticks
    ]  # fmt: skip
    return tag(
        "div",
        tag("div", *ticks_up, class_="y-axis", aria_hidden="true"),
        tag("div", drawing, *signs, class_="points", role="group", aria_label=label),
        tag("div", *ticks_along, class_="x-axis", aria_hidden="true"),
        tag("ul", *keys, class_="legend"),
        class_="scatter",
    )


def _shape(kind: int) -> str:
    return _SHAPES[kind % len(_SHAPES)]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _down(share: float) -> str:
    return _percent(1 - share)

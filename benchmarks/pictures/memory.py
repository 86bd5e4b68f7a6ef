"""Memory over transitions: docs/memory-light.svg and docs/memory-dark.svg, which `tables.py` writes.

Reads results/libraries.json (every library with 20,000 transitions of Atari), replay.json (Stable-Baselines3 and
holdall, full buffers) and growth.json (holdall, compressed). Measured points are dots. A dashed line continues with the
same bytes per transition.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import read_stored

ROOT = Path(__file__).parents[2]
PICTURES = {theme: ROOT / "docs" / f"memory-{theme}.svg" for theme in ("light", "dark")}
COLOURS = {
    "light": {"text": "#24292f", "grid": "#d0d7de", "others": "#6e7781", "holdall": "#0a7d6c"},
    "dark": {"text": "#e6edf3", "grid": "#30363d", "others": "#9198a1", "holdall": "#2dd4bf"},
}
WIDTH = 800
HEIGHT = 400
LEFT = 64
RIGHT = 256
TOP = 44
BOTTOM = 48
SEAQUEST = "Atari Seaquest, 4 frames"
FEWEST = 10_000
MOST = 1_000_000
LEAST_BYTES = 2.0**23
MOST_BYTES = 2.0**36
GIB = 2**30


class Line(NamedTuple):
    """One library: measured points (transitions, bytes), and its label."""

    label: str
    points: list[tuple[int, float]]
    is_ours: bool = False

    def at(self, transitions: int) -> float:
        """Return the bytes of `transitions`, with the bytes per transition of the last point."""
        count, held = self.points[-1]
        return held * transitions / count


def lines() -> list[Line]:
    """Return the lines of the picture, largest first."""
    buffers = read_stored("libraries")
    replay = read_stored("replay")[SEAQUEST]
    begins = "Seaquest, stacks of 4 frames: "
    grown = {case: row for case, row in read_stored("growth").items() if case.startswith(begins) and "held" in row}
    growth = [(int(case.split()[-2].replace(",", "")), row["held"] * 2**20) for case, row in grown.items()]
    growth = [(transitions, held) for transitions, held in growth if transitions <= MOST]

    def points(library: str, side: str = "") -> list[tuple[int, float]]:
        found = next(row for case, row in buffers.items() if case.startswith(f"Seaquest: {library} "))
        held = [(found["transitions"], found["memory"] * 2**20)]
        return held + ([(replay[f"transitions when full, {side}"], replay[f"held when full, {side}"])] if side else [])

    return [
        Line("SB3, TorchRL, Tianshou", points("sb3", "SB3")),
        Line("cpprb", points("cpprb next_of")),
        Line("holdall", points("holdall", "holdall"), is_ours=True),
        Line("sb3-extra-buffers (LZ4)", points("sb3-extra-buffers lz4")),
        Line("holdall, compressed", growth, is_ours=True),
    ]


def x_of(transitions: float) -> float:
    """Return the x coordinate of a number of transitions."""
    return LEFT + math.log(transitions / FEWEST) / math.log(MOST / FEWEST) * (WIDTH - LEFT - RIGHT)


def y_of(nbytes: float) -> float:
    """Return the y coordinate of a number of bytes."""
    return (
        HEIGHT - BOTTOM - math.log(nbytes / LEAST_BYTES) / math.log(MOST_BYTES / LEAST_BYTES) * (HEIGHT - TOP - BOTTOM)
    )


def amount(nbytes: float) -> str:
    """Return bytes with a unit."""
    return f"{nbytes / GIB:,.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:,.0f} MiB"


def drawn(theme: str) -> str:
    """Return the picture as SVG."""
    colours = COLOURS[theme]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="{colours["text"]}" role="img" aria-labelledby="title">\n'
        '<title id="title">Memory over transitions of Atari Seaquest, stacks of 4 frames</title>\n'
        # At the right, because a phone shows the right part first.
        f'<text x="{WIDTH - 40}" y="22" text-anchor="end" font-size="15" font-weight="600">'
        "Memory of an Atari buffer, stacks of 4 frames</text>"
    )
    parts = [head]
    for power in range(24, 37, 2):
        y = y_of(2.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colours["grid"]}"/>')
        label = f"{2 ** (power - 30)} GiB" if power >= 30 else f"{2 ** (power - 20)} MiB"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" font-size="12">{label}</text>')
    below = 'text-anchor="middle" font-size="12"'
    parts += [f'<text x="{x_of(n):.1f}" y="{HEIGHT - 26}" {below}>{n:,}</text>' for n in (FEWEST, 100_000, MOST)]
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" {below}>transitions</text>')
    for line in lines():
        parts += one_line(line, colours["holdall" if line.is_ours else "others"])
    return "\n".join([*parts, "</svg>", ""])


def one_line(line: Line, colour: str) -> list[str]:
    """Return one library: dots, a line through them, dashes beyond them, and the label with the bytes at the end."""
    dots = [(x_of(count), y_of(held)) for count, held in line.points]
    first = [(x_of(FEWEST), y_of(line.points[0][1] * FEWEST / line.points[0][0]))]
    last = [(x_of(MOST), y_of(line.at(MOST)))]
    weight = 3 if line.is_ours else 1.5
    parts = []
    for points, dashes in (([*first, dots[0]], "4 4"), (dots, ""), ([dots[-1], *last], "4 4")):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        extra = f' stroke-dasharray="{dashes}"' if dashes else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{weight}"{extra}/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{weight + 1}" fill="{colour}"/>' for x, y in dots]
    bold = ' font-weight="600"' if line.is_ours else ""
    x, y = last[0]
    parts.append(
        f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}"{bold}>{line.label}: {amount(line.at(MOST))}</text>'
    )
    return parts

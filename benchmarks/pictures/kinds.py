"""What each kind of data costs: docs/kinds-light.svg and docs/kinds-dark.svg, which `tables.py` writes.

Reads results/codecs.json (images) and vectors.json. A line for every kind of data goes from the bytes that a transition
takes in a plain buffer to those that it takes in holdall.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import read_stored

from pictures.memory import COLOURS, ROOT

PICTURES = {theme: ROOT / "docs" / f"kinds-{theme}.svg" for theme in ("light", "dark")}
IMAGES = {
    "minigrid": "MiniGrid, 56 x 56 RGB",
    "pong": "Atari Pong, 4 x 84 x 84",
    "seaquest": "Atari Seaquest, 4 x 84 x 84",
    "game_boy": "Game Boy, 4 x 144 x 160 RGB",
    "procgen": "Procgen CoinRun, 64 x 64 RGB",
    "crafter": "Crafter, 64 x 64 RGB",
    "dog": "robot-dog camera, 84 x 84 RGB",
    "quadruped": "quadruped camera, 84 x 84 RGB",
}
VECTORS = {
    "10 past values of 30 terms, term by term": "10 past values of 30 numbers",
    "AntMaze": "AntMaze, 105 numbers and goals",
    "FetchPush": "FetchPush, 25 numbers and goals",
    "highway-fast": "highway, 15 x 5 numbers",
    "PandaPickAndPlace": "PandaPickAndPlace, 19 numbers and goals",
}
WIDTH = 880
LEFT = 300
RIGHT = 210
TOP = 74
ROW = 24
LEAST = 10.0
MOST = 1_000_000.0


class Kind(NamedTuple):
    """A kind of data: bytes of a transition in a plain buffer, and in holdall from the default to the smallest."""

    label: str
    plain: float
    held: list[float]


def kinds() -> list[Kind]:
    """Return the rows of the picture: images first, and each group by how much smaller it gets."""
    codecs = read_stored("codecs")
    columns = read_stored("vectors")
    images = []
    for name, label in IMAGES.items():
        found = [codecs[f"transitions: {name} {prefer}"] for prefer in ("balanced", "memory")]
        images.append(Kind(label, found[0]["transition in a plain buffer"], [each["slice"] for each in found]))
    vectors = [
        Kind(label, row["SB3"], [row["packed"]])
        for begins, label in VECTORS.items()
        for case, row in columns.items()
        if case.startswith(begins)
    ]
    return [*sorted(images, key=_times_less), *sorted(vectors, key=_times_less)]


def _times_less(kind: Kind) -> float:
    return -kind.plain / kind.held[0]


def x_of(nbytes: float) -> float:
    """Return the x coordinate of a number of bytes."""
    return LEFT + math.log(nbytes / LEAST) / math.log(MOST / LEAST) * (WIDTH - LEFT - RIGHT)


def drawn(theme: str) -> str:
    """Return the picture as SVG."""
    colours = COLOURS[theme]
    all_kinds = kinds()
    height = TOP + ROW * len(all_kinds) + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" '
        f'font-size="13" fill="{colours["text"]}" role="img" aria-labelledby="title">\n'
        '<title id="title">Bytes of a transition by kind of data, in a plain buffer and in holdall</title>\n'
        '<text x="12" y="22" font-size="15" font-weight="600">What a transition costs, by kind of data</text>'
    )
    legend = (
        f'<circle cx="18" cy="42" r="4" fill="{colours["others"]}"/><text x="28" y="46">a plain buffer</text>'
        f'<circle cx="138" cy="42" r="5" fill="{colours["holdall"]}"/><text x="150" y="46">holdall, compressed</text>'
        f'<circle cx="298" cy="42" r="4" fill="none" stroke="{colours["holdall"]}" stroke-width="2"/>'
        '<text x="310" y="46">with prefer="memory", where that differs</text>'
    )
    parts = [head, legend]
    for power, words in enumerate(("10 B", "100 B", "1 kB", "10 kB", "100 kB", "1 MB"), start=1):
        x = x_of(10.0**power)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 12}" y2="{height - 34}" stroke="{colours["grid"]}"/>'
            f'<text x="{x:.1f}" y="{height - 16}" text-anchor="middle" font-size="12">{words}</text>'
        )
    for number, kind in enumerate(all_kinds):
        parts += one_kind(kind, TOP + ROW * number + 4, colours)
    return "\n".join([*parts, "</svg>", ""])


def one_kind(kind: Kind, y: int, colours: dict[str, str]) -> list[str]:
    """Return one row: the label, a line from the plain buffer's bytes to holdall's, and how much less that is."""
    plain = x_of(kind.plain)
    best = x_of(kind.held[0])
    parts = [
        f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{kind.label}</text>',
        f'<line x1="{best:.1f}" x2="{plain:.1f}" y1="{y}" y2="{y}" stroke="{colours["grid"]}" stroke-width="3"/>',
        f'<circle cx="{plain:.1f}" cy="{y}" r="4" fill="{colours["others"]}"/>',
    ]
    for nbytes in kind.held[1:]:
        if nbytes < 0.97 * kind.held[0]:
            ring = f'fill="none" stroke="{colours["holdall"]}" stroke-width="2"'
            parts.append(f'<circle cx="{x_of(nbytes):.1f}" cy="{y}" r="4" {ring}/>')
    parts.append(f'<circle cx="{best:.1f}" cy="{y}" r="5" fill="{colours["holdall"]}"/>')
    times = kind.plain / kind.held[0]
    less = f"{times:,.0f}" if times >= 10 else f"{times:.1f}"
    parts.append(
        f'<text x="{WIDTH - RIGHT + 16}" y="{y + 4}" fill="{colours["holdall"]}" font-weight="600">'
        f"{kind.held[0]:,.0f} B, {less} times less</text>"
    )
    return parts

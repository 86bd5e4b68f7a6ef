"""A page as plain data, and the HTML file that contains it.

A page is a title, facts and sections, and a section is a list of blocks: tiles, cards, a table, a plot, bars, a legend,
columns, a list. The functions of this module describe blocks, and page.js draws them in the browser, as text only. The
content policy of a page allows its own script, no other script, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from html import escape
from importlib import resources
from string import Template
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Block = dict[str, Any]
Floats = NDArray[np.float64]
Limit = tuple[float, str]
"""A value that is drawn as a line, and its name."""
Tone = Literal["", "good", "info", "warning", "error"]
_Value = TypeVar("_Value")

TONES = ("info", "warning", "error")
MAX_LIMIT_RATIO = 2.5
"""A limit is drawn if it is at most this many times the largest value. A larger limit is only named."""


def write_page(title: str, kind: str, facts: Iterable[str], sections: Iterable[Block | None]) -> str:
    """Write a page. `kind` is two or three words above the title, such as "memory of a run"."""
    page = {
        "title": title,
        "kind": kind,
        "facts": [fact for fact in facts if fact],
        "sections": list(filter(None, sections)),
    }
    text = json.dumps(page, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":  # In a script element, only these could end it or begin a comment.
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    script = _read_asset("page.js")
    return Template(_read_asset("page.html")).substitute(
        title=escape(title),
        style=_read_asset("page.css"),
        page=text,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@cache
def _read_asset(name: str) -> str:
    return resources.files("holdall.tools.report").joinpath(name).read_text(encoding="utf-8")


def section(title: str, *blocks: Block | None, lead: str = "") -> Block:
    """Describe a section. `lead` is a sentence about its content. Without a title, the section has no frame."""
    return {"title": title, "lead": lead, "blocks": list(filter(None, blocks))}


def tiles(*items: Block) -> Block:
    """Describe tiles side by side."""
    return {"kind": "tiles", "tiles": items}


def tile(name: str, value: str, note: str = "", tone: Tone = "") -> Block:
    """Describe one figure that a reader should see first."""
    return {"name": name, "value": value, "note": note, "tone": tone}


def cards(*items: Block) -> Block:
    """Describe cards below each other."""
    return {"kind": "cards", "cards": items}


def card(
    tone: str, name: str, text: str, evidence: Iterable[tuple[str, str]] = (), remedy: str = "", when: str = ""
) -> Block:
    """Describe a finding."""
    return {"tone": tone, "name": name, "text": text, "evidence": list(evidence), "remedy": remedy, "when": when}


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Block]],
    caption: str,
    *,
    words: int = 1,
    prose: bool = False,
    fold: str = "",
) -> Block:
    """Describe a table. On a narrow page, a short table becomes a list of its rows, and a long one scrolls.

    Args:
        caption: Description for screen readers.
        words: Number of first columns that hold words. All further columns hold figures.
        prose: Whether the last column holds sentences.
        fold: Text under which the table is folded until the reader opens it.
    """
    return {
        "kind": "table",
        "heads": list(heads),
        "rows": [list(row) for row in rows],
        "caption": caption,
        "words": words,
        "prose": prose,
        "fold": fold,
    }


def toned_cell(text: str, tone: Tone) -> Block:
    """Describe a cell of a table with the sign and the colour of its tone."""
    return {"text": text, "tone": tone}


@dataclass(frozen=True, slots=True)
class PlotLayer:
    """One named series. Unknown values are nan."""

    name: str
    colour: str  # A class of page.css.
    values: Floats


def plot(
    label: str,
    times: Floats,
    heads: Sequence[str],
    layers: Iterable[PlotLayer],
    unit: Literal["bytes", "number"],
    *,
    stacked: bool = True,
    small: bool = False,
    limit: Limit | None = None,
    max_limit_ratio: float = MAX_LIMIT_RATIO,
    flags: Iterable[tuple[float, str, str]] = (),
) -> Block:
    """Describe a plot over seconds, whose figures the page also shows as a table.

    Args:
        heads: Heading of the reading at every position, such as "after 12 min, step 3,400".
        stacked: Whether layers are stacked areas. Otherwise they are curves.
        small: Whether the plot is less high.
        max_limit_ratio: The limit is drawn if it is at most this many times the largest value.
        flags: Time, tone and text of every event.
    """
    series = [
        {"name": one.name, "colour": one.colour, "values": [_round(value) for value in one.values]} for one in layers
    ]
    return {
        "kind": "plot",
        "label": label,
        "times": [_round(time) for time in times],
        "heads": list(heads),
        "layers": series,
        "unit": unit,
        "stacked": stacked,
        "small": small,
        "limit": None if limit is None else [*limit, max_limit_ratio],
        "flags": list(flags),
    }


def _round(value: float) -> float | None:
    return round(float(value), 2) if np.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class BarPiece:
    """One piece of a bar."""

    value: float
    colour: str  # A class of page.css.
    tip: str


@dataclass(frozen=True, slots=True)
class BarRow:
    """One bar."""

    name: str
    pieces: Sequence[BarPiece]
    text: str  # Figure next to the bar.
    note: str = ""  # Text under the name.
    interval: tuple[float, float] | None = None  # Ends of the whiskers.
    is_strong: bool = False  # Whether name and text are bold.


def bars(
    rows: Iterable[BarRow],
    label: str,
    unit: Literal["bytes", "number"],
    *,
    keys: Iterable[tuple[str, str]] = (),
    limit: Limit | None = None,
    dots: bool = False,
    begin: float = 0.0,
) -> Block:
    """Describe bars.

    Args:
        keys: Names and colours of the pieces.
        dots: Draw points on a scale from `begin`, for values without a meaningful zero.
    """
    return {
        "kind": "bars",
        "rows": [asdict(row) for row in rows],
        "label": label,
        "unit": unit,
        "keys": list(keys),
        "limit": None if limit is None else [*limit, MAX_LIMIT_RATIO],
        "is_dots": dots,
        "begin": begin,
    }


def legend(*keys: tuple[str, str]) -> Block:
    """Describe what colours mean in all charts of a section."""
    return {"kind": "legend", "keys": keys}


def columns(*items: tuple[str, Block]) -> Block:
    """Describe blocks with titles, side by side where there is room."""
    return {"kind": "columns", "columns": items}


def bullets(items: Iterable[str]) -> Block:
    """Describe a list of sentences."""
    return {"kind": "list", "items": list(items)}


def format_sentence(text: str) -> str:
    """Write a text with a capital letter at the beginning and a full stop at the end. Empty if `text` is empty."""
    if not text:
        return ""
    stop = "" if text[-1] in ".!?…" else "."
    return f"{text[:1].upper()}{text[1:]}{stop}"


def format_number(value: float) -> str:
    """Write a number with about three significant digits."""
    value = float(value)
    if value.is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.3g}"


def format_or_dash(value: _Value | None, write: Callable[[_Value], str]) -> str:
    """Return `write(value)`, or a dash in place of None."""
    return "-" if value is None else write(value)


def choose_positions(values: Floats, max_count: int) -> NDArray[np.int64]:
    """Return about `max_count` positions: both ends, and the smallest and the largest value of every stretch."""
    count = len(values)
    if count <= max_count:
        return np.arange(count)
    stretches = np.array_split(np.arange(count), max(max_count // 2 - 1, 1))
    ends = [0, count - 1]
    lowest = [int(stretch[np.argmin(values[stretch])]) for stretch in stretches]
    highest = [int(stretch[np.argmax(values[stretch])]) for stretch in stretches]
    return np.unique(np.array(ends + lowest + highest, np.int64))

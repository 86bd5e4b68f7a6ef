"""The frame of every page, and its elements besides charts: sections, tiles with one figure, cards, tables, code.

In:  a title, text, figures, sections.  Out: the text of one HTML file.
Invariant: the page's content policy allows its own script only, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from string import Template

from holdall.tools.report.charts import SEVERITY_SIGNS, Child, Markup, joined, tag

_SHORT_TABLE = 12  # rows
_SIGNS = {"good": "✓", **SEVERITY_SIGNS}


def document(title: str, kind: str, facts: Sequence[str], sections: Iterable[Markup]) -> str:
    """Write a page.

    Args:
        kind: Two or three words above the title, such as "memory of a run".
        facts: Short facts under the title.
    """
    script = _asset("page.js")
    shown = tag("ul", *(tag("li", fact) for fact in facts if fact), class_="facts") if facts else ""
    return Template(_asset("page.html")).substitute(
        title=joined(title),
        kind=joined(kind),
        facts=shown,
        sections=joined(*sections),
        style=_asset("page.css"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def section(title: str, *content: Child, lead: str | None = None) -> Markup:
    """Write a section: a heading, a sentence about the content, and the content."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, *content)


def details(summary: str, *content: Child) -> Markup:
    """Write content that is folded until the reader opens it."""
    return tag("details", tag("summary", summary), *content)


@cache
def _asset(name: str) -> str:
    return resources.files("holdall.tools.report").joinpath(name).read_text(encoding="utf-8")


def tiles(items: Iterable[Markup]) -> Markup:
    """Put tiles side by side."""
    return tag("dl", *items, class_="tiles")


def tile(name: str, value: str, note: str = "", tone: str = "") -> Markup:
    """Write one figure that a reader should see first. `tone` is good, warning, error or empty."""
    figure = tag("dd", value, tag("small", note) if note else None)
    return tag("div", tag("dt", name), figure, class_=f"tile {tone}".strip())


def cards(*items: Markup) -> Markup:
    """Put cards below each other."""
    return tag("div", *items, class_="cards")


def card(
    severity: str, name: str, text: str, evidence: Sequence[tuple[str, str]] = (), remedy: str = "", when: str = ""
) -> Markup:
    """Write a finding: its severity (or "good"), name, text, evidence and remedy."""
    badge = tag("span", tag("span", _SIGNS[severity], aria_hidden="true"), f" {severity}", class_="badge")
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in evidence]
    return tag(
        "article",
        tag("header", badge, tag("h3", name), tag("span", when, class_="when") if when else None),
        tag("p", text) if text else None,
        tag("dl", *facts, class_="evidence") if facts else None,
        tag("p", tag("strong", "Remedy: "), remedy, class_="remedy") if remedy else None,
        class_=f"card {severity}",
    )


def table(
    heads: Sequence[Child], rows: Iterable[Sequence[Child]], caption: str, *, words: int = 1, prose: bool = False
) -> Markup:
    """Write a table. On a narrow page, a short table becomes a list of its rows, and a long one scrolls.

    Args:
        caption: Description for screen readers.
        words: Number of first columns that hold words. All further columns hold figures.
        prose: Whether the last column holds sentences.
    """
    kinds = ["words" if at < words else None for at in range(len(heads))]
    if prose:
        kinds[-1] = "words prose"
    top = tag("tr", *(tag("th", head, scope="col", class_=kind) for head, kind in zip(heads, kinds, strict=True)))
    lines = []
    for row in rows:
        cells = [
            tag("td", cell, class_=kind, data_head=head or None) if at else tag("th", cell, class_=kind, scope="row")
            for at, (head, cell, kind) in enumerate(zip(heads, row, kinds, strict=True))
        ]
        lines.append(tag("tr", *cells))
    body = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", *lines))
    kind = "scroll short" if len(lines) <= _SHORT_TABLE else "scroll"
    return tag("div", body, class_=kind, tabindex="0", role="region", aria_label=caption)


def code(text: str) -> Markup:
    """Write code with a button that copies it."""
    button = tag("button", "Copy", type="button", class_="copy", hidden=True)
    return tag("div", tag("pre", tag("code", text), tabindex="0"), button, class_="code")


def sentence(text: str) -> str:
    """Begin with a capital letter and end with a full stop."""
    return text and f"{text[:1].upper()}{text[1:]}{'' if text[-1] in '.!?…' else '.'}"


def toned_word(text: str, tone: str) -> Markup:
    """Write a word with the sign and the colour of its tone: good, warning or error."""
    return tag("span", tag("span", _SIGNS[tone], aria_hidden="true"), f" {text}", class_=f"said {tone}")

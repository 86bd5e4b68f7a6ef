"""What is not a chart: tiles with one figure, cards with words, tables, code.

In:  text and figures.  Out: markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdall.page.markup import Child, Markup, tag
from holdall.page.plot import SEVERITY_SIGNS


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure that a reader should see first."""

    name: str
    value: str
    note: str = ""
    tone: str = ""  # good, warning or error


def tiles(those: Iterable[Tile]) -> Markup:
    """Write figures side by side."""
    boxes = [
        tag("div", tag("dt", tile.name), tag("dd", tile.value, tag("small", tile.note) if tile.note else None),
            class_=f"tile {tile.tone}".strip())
        for tile in those
    ]  # fmt: skip
    return tag("dl", *boxes, class_="tiles")


@dataclass(frozen=True, slots=True)
class Card:
    """Something that was found: how grave it is, what, by what evidence, and what to do."""

    severity: str  # info, warning, error or good
    name: str
    text: str
    evidence: Sequence[tuple[str, str]] = ()
    remedy: str = ""
    when: str = ""


_SEVERITY_WORDS = {"good": ("good", "✓"), **{name: (name, sign) for name, sign in SEVERITY_SIGNS.items()}}


def cards(those: Iterable[Card]) -> Markup:
    """Write cards, one below the other."""
    return tag("div", *(_card(card) for card in those), class_="cards")


def _card(card: Card) -> Markup:
    word, sign = _SEVERITY_WORDS[card.severity]
    badge = tag("span", tag("span", sign, aria_hidden="true"), f" {word}", class_="badge")
    facts = [tag("div", tag("dt", name), tag("dd", value)) for name, value in card.evidence]
    return tag(
        "article",
        tag("header", badge, tag("h3", card.name), tag("span", card.when, class_="when") if card.when else None),
        tag("p", card.text) if card.text else None,
        tag("dl", *facts, class_="evidence") if facts else None,
        tag("p", tag("strong", "Remedy: "), card.remedy, class_="remedy") if card.remedy else None,
        class_=f"card {card.severity}",
    )


def table(
    heads: Sequence[Child], rows: Iterable[Sequence[Child]], caption: str, *, words: int = 1, prose: bool = False
) -> Markup:
    """Write a table that scrolls by itself where the page is narrow.

    Args:
        caption: What it shows, for those who do not see it.
        words: The first columns, which hold words; those behind hold figures.
        prose: Whether the last column holds sentences.
    """
    kinds = ["words" if at < words else None for at in range(len(heads))]
    if prose:
        kinds[-1] = "words prose"
    top = tag("tr", *(tag("th", head, scope="col", class_=kind) for head, kind in zip(heads, kinds, strict=True)))
    lines = []
    for row in rows:
        cells = [
            tag("td" if at else "th", cell, class_=kind, scope=None if at else "row")
            for at, (cell, kind) in enumerate(zip(row, kinds, strict=True))
        ]
        lines.append(tag("tr", *cells))
    body = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", *lines))
    return tag("div", body, class_="scroll", tabindex="0", role="region", aria_label=caption)


def code(text: str) -> Markup:
    """Write code with a button that copies it."""
    button = tag("button", "Copy", type="button", class_="copy", hidden=True)
    return tag("div", tag("pre", tag("code", text), tabindex="0"), button, class_="code")


def sentence(text: str) -> str:
    """Begin with a capital letter and end with a full stop."""
    return text and f"{text[:1].upper()}{text[1:]}{'' if text[-1] in '.!?…' else '.'}"


def said(text: str, tone: str) -> Markup:
    """Write a word whose tone is shown by a sign and a colour: good, warning or error."""
    return tag("span", tag("span", _SEVERITY_WORDS[tone][1], aria_hidden="true"), f" {text}", class_=f"said {tone}")

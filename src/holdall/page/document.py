"""The frame of every page: head, theme, script, header, sections.

In:  a title and sections.  Out: the text of one HTML file.
Invariant: the page may run its own script and nothing else, and may fetch nothing: its content policy says so.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources

from holdall.page.markup import Child, Markup, tag

_THEME_WORDS = "Switch between the light and the dark theme"


def document(title: str, kind: str, facts: Sequence[str], sections: Iterable[Markup]) -> str:
    """Write a page.

    Args:
        kind: What the page is, in two or three words, over the title.
        facts: Short facts under the title.
    """
    style, script = _asset("page.css"), _asset("page.js")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    switch = tag("button", "Dark", id="theme", type="button", hidden=True, aria_label=_THEME_WORDS, title=_THEME_WORDS)
    banner = tag(
        "header",
        tag("div", tag("p", tag("strong", "holdall"), f" {kind}", class_="kind"), switch, class_="top"),
        tag("h1", title),
        tag("ul", *(tag("li", fact) for fact in facts if fact), class_="facts") if facts else None,
    )
    main = tag("main", *sections)
    foot = tag("footer", "Made by holdall. This page fetches nothing and sends nothing.")
    tip = tag("div", id="tip", role="tooltip", hidden=True)
    body = tag("body", _patterns(), banner, main, foot, tip, tag("script", Markup(script)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def section(title: str, *content: Child, lead: str | None = None) -> Markup:
    """Write a section with its heading and, under it, what it shows in a sentence."""
    return tag("section", tag("h2", title), tag("p", lead, class_="lead") if lead else None, *content)


def details(summary: str, *content: Child) -> Markup:
    """Write something that is folded away until it is asked for."""
    return tag("details", tag("summary", summary), *content)


@cache
def _asset(name: str) -> str:
    return resources.files("holdall.page").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _patterns() -> Markup:
    """Hatching that charts fill areas with which are there and are not used."""
    stroke = tag("path", d="M0 6 6 0", class_="hatching")
    pattern = tag("pattern", stroke, id="hatch", width="6", height="6", patternUnits="userSpaceOnUse")
    return tag("svg", tag("defs", pattern), width="0", height="0", class_="defs", aria_hidden="true")

"""HTML and SVG elements from Python calls.

In:  names, attributes, children.  Out: `Markup`.
Invariant: every plain string is escaped; only `Markup`, which `tag` itself makes, is taken as it is.
"""

from __future__ import annotations

import re
from html import escape

_VOID = frozenset({"br", "hr", "link", "meta"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Child = str | None
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Write an element: `tag("td", "a < b", class_="wide")`.

    None is left out, as a child and as an attribute; True is an attribute without a value. `class_` stands for `class`,
    and `data_tip` for `data-tip`.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Markup:
    """Put children one behind the other, escaping what is plain text."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child))


def breakable(name: str) -> Markup:
    """Write a long name that may be broken behind its dots, underscores and slashes."""
    return Markup(re.sub(r"(?<=[._/-])(?=\w)", "<wbr>", escape(name)))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'

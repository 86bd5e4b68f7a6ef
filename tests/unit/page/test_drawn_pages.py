"""The file of a page is one complete document that makes no requests, whatever its texts are."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.tools.part_groups import PART_GROUPS
from holdall.tools.report.page import card, cards, format_number, section, write_page


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str | None] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in {"src", "href"}]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


@settings(max_examples=30)
@given(st.text())
def test_a_page_is_complete_whatever_its_texts_are(text: str) -> None:
    seen = _Seen()
    seen.feed(write_page(text, text, [text], [section(text, cards(card("info", text, text)), lead=text), None]))
    seen.close()
    assert seen.open == []
    assert seen.fetched == ["data:,"]
    assert len(seen.scripts) == 2
    page = json.loads(seen.scripts[0])
    assert page["title"] == text
    assert page["sections"][0]["blocks"][0]["cards"][0]["name"] == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (50, "50"), (1351.2, "1,351"), (52.46, "52.5"), (0.1234, "0.123")]
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_every_group_of_parts_has_a_colour_of_the_page() -> None:
    style = resources.files("holdall.tools.report").joinpath("page.css").read_text(encoding="utf-8")
    colours = [group.colour for group in PART_GROUPS]
    assert len(set(colours)) == len(colours)
    assert [colour for colour in colours if f".{colour} {{" not in style] == []

"""Markup: plain text is escaped, wherever it stands."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.tools.report.charts import Markup, breakable, joined, tag
from holdall.tools.report.document import document, section


def test_text_is_escaped_and_markup_is_not() -> None:
    assert tag("p", "a < b", tag("b", "c & d")) == "<p>a &lt; b<b>c &amp; d</b></p>"
    assert joined("<", Markup("<br>"), None) == "&lt;<br>"
    assert breakable("a.b<c") == "a.<wbr>b&lt;c"


def test_attributes_are_escaped_and_left_out_if_there_is_nothing_to_say() -> None:
    assert (
        tag("i", class_="a\"'<", data_tip=None, hidden=True, open=False) == '<i class="a&quot;&#x27;&lt;" hidden></i>'
    )
    assert tag("meta", name="a", content="b") == '<meta name="a" content="b">'


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str | None] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in {"src", "href"}]
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.scripts += tag == "script"
        if tag not in {"meta", "link", "br", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@settings(max_examples=30)
@given(st.text())
def test_a_document_is_whole_whatever_its_texts_are(text: str) -> None:
    seen = _Seen()
    seen.feed(document(text, text, [text], [section(text or "x", text, lead=text)]))
    seen.close()
    assert seen.open == []
    assert seen.fetched == ["data:,"]
    assert seen.scripts == 1

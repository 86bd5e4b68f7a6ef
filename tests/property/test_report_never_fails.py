"""For any content of a file, `holdall report` writes a complete page, or says in one line why not."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdall.errors import HoldallError
from holdall.tools.report import read_report

FORMATS = ("holdall-watch-1", "holdall-bench-1", "holdall-bench-buffers-1")

texts = st.one_of(st.sampled_from(["train", "sb3", "<b>", "</script>", "a\nb", "", "\u2028"]), st.text(max_size=8))
sizes = st.one_of(st.integers(0, 2**50), st.floats(0, 1e15), st.integers(0, 3), st.none())
signed = st.one_of(st.floats(-1e9, 1e9), sizes)
plain = st.one_of(st.none(), st.booleans(), signed, texts)
pair = st.lists(texts, min_size=2, max_size=2)


def _draw_some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


part = _draw_some(
    group=st.sampled_from(["buffers", "torch", "new"]), name=texts, resident=sizes, allocated=sizes, fill=sizes
)
gpu = _draw_some(requested=sizes, allocated=sizes, reserved=sizes, fragmented=sizes, other=sizes, limit=sizes)
lines_by_kind = {
    "reading": _draw_some(
        time=signed,
        step=sizes,
        pss=sizes,
        parts=st.lists(part, max_size=4),
        gpu=gpu,
        steps_per_second=sizes,
        pressure=sizes,
    ),
    "phase": _draw_some(name=texts, peak=sizes, count=sizes, seconds=sizes),
    "verdict": _draw_some(
        time=signed,
        name=texts,
        severity=texts,
        text=texts,
        evidence=st.dictionaries(texts, plain, max_size=3),
        units=st.dictionaries(texts, st.one_of(st.sampled_from(["B", "s", "share", "time"]), plain), max_size=3),
        remedy=texts,
    ),
    "event": _draw_some(time=signed, text=texts),
    "run": _draw_some(
        profile=texts,
        buffer=texts,
        seed=st.integers(0, 3),
        status=st.sampled_from(["done", "failed"]),
        filled=sizes,
        steps_per_second=sizes,
        peaks=st.dictionaries(texts, sizes, max_size=3),
        bytes_per_transition=sizes,
        rewards=st.lists(st.floats(-1e9, 1e9), max_size=4),
        checkpoint=_draw_some(seconds=sizes, bytes=sizes, extra=sizes),
        seconds=sizes,
        reason=texts,
    ),
    "ranking": _draw_some(
        by=st.sampled_from(["memory", "speed", "reward", "<"]),
        order=st.lists(pair, max_size=3),
        refused=texts,
        same=st.lists(st.lists(pair, min_size=2, max_size=2), max_size=2),
    ),
    "buffer": _draw_some(
        library=texts,
        version=texts,
        case=texts,
        transitions=sizes,
        bytes=sizes,
        add_us=sizes,
        sample_ms=sizes,
        save_s=sizes,
        load_s=sizes,
        exact=st.one_of(st.none(), st.booleans()),
        note=texts,
    ),
    "absent": _draw_some(library=texts, reason=texts),
    "new": st.dictionaries(texts, plain, max_size=3),
}
headers = _draw_some(
    pid=sizes,
    command=st.lists(texts, max_size=3),
    host=texts,
    started=signed,
    interval=sizes,
    system=texts,
    limits=_draw_some(memory=sizes, cgroup=sizes, vram=sizes),
    machine=st.dictionaries(texts, plain, max_size=3),
    versions=st.dictionaries(texts, plain, max_size=3),
    env=texts,
    algo=texts,
    limit=sizes,
)


@st.composite
def files(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw lines as holdall writes them, in any order. Sometimes one value has another type."""
    kinds = draw(st.lists(st.sampled_from(list(lines_by_kind)), max_size=8))
    lines = [draw(headers) | {"kind": "header", "format": draw(st.sampled_from(FORMATS))}]
    lines += [draw(lines_by_kind[kind]) | {"kind": kind} for kind in kinds]
    if draw(st.integers(0, 5)) == 0:
        line = draw(st.sampled_from(lines))
        line[draw(st.sampled_from(list(line)))] = draw(st.one_of(plain, st.lists(plain, max_size=2), st.just({"a": 1})))
    return lines


class _Whole(HTMLParser):
    """A parser that requires every tag to be closed, and allows neither scripts in attributes nor external files."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name.startswith("on") or name in {"src"}]
        if tag not in {"meta", "link", "br", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report") / "any.jsonl"


@settings(max_examples=120)
@given(files())
def test_a_page_is_whole_or_an_error_is_one_line(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    said = ""
    text = ""
    try:
        report = read_report(file)
        text = report.page()
        json.dumps(report.summary(), allow_nan=False)
    except HoldallError as error:
        said = str(error)
    assert "\n" not in said
    seen = _Whole()
    seen.feed(text)
    seen.close()
    assert seen.open == []


@given(st.binary(max_size=300))
def test_bytes_that_are_not_a_recording_are_refused(file: Path, raw: bytes) -> None:
    file.write_bytes(raw)
    with pytest.raises(HoldallError):
        read_report(file)

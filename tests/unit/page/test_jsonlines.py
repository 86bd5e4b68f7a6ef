"""Files of JSON lines: every value is checked before it is used, because a file may have any origin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdall.errors import ArgumentError, HoldallError
from holdall.tools.report import JsonLine, read_lines


def _line(**values: Any) -> JsonLine:
    return JsonLine(values, "file (x), line 3")


def _read(path: Path, raw: bytes) -> list[JsonLine]:
    path.write_bytes(raw)
    return list(read_lines(path))


def test_lines_are_read_in_order_and_empty_lines_are_ignored(tmp_path: Path) -> None:
    found = _read(tmp_path / "a", b'{"kind":"one"}\n\n{"kind":"two"}\n')
    assert [line.kind for line in found] == ["one", "two"]


def test_an_unfinished_last_line_is_ignored(tmp_path: Path) -> None:
    assert [line.kind for line in _read(tmp_path / "a", b'{"kind":"one"}\n{"kind":"tw')] == ["one"]
    assert [line.kind for line in _read(tmp_path / "b", b'{"kind":"one"}\n{"kind":"two"}')] == ["one", "two"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"kind":"one"}\n{"kind":\n', "line 2: is not JSON"),
        (b"[1, 2]\n", "line 1: must be a JSON object"),
        (b'{"pss": NaN}\n', "line 1: is not JSON"),
        (b"\xff\xfe{}\n", "line 1: is not JSON"),
        (b"[" * 100_000 + b"\n", "line 1: is not JSON"),
        (b'{"a":"' + b"x" * (8 << 20) + b'"}\n', "line 1: is longer than"),
    ],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(HoldallError, match=message) as caught:
        _read(tmp_path / "a", raw)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"nothing\.jsonl.*No such file"):
        list(read_lines(tmp_path / "nothing.jsonl"))


Get = Callable[[JsonLine], Any]


@pytest.mark.parametrize(
    ("get", "value"),
    [
        (lambda line: line.number("x"), "12"),
        (lambda line: line.number("x"), True),
        (lambda line: line.number("x"), 10**400),
        (lambda line: line.number("x"), 1e300),
        (lambda line: line.size("x"), -1),
        (lambda line: line.text("x"), 5),
        (lambda line: line.texts("x"), ["a", 5]),
        (lambda line: line.texts("x"), "abc"),
        (lambda line: line.numbers("x"), [1, "2"]),
        (lambda line: line.flag("x"), 1),
        (lambda line: line.inner("x"), []),
        (lambda line: line.inners("x"), [1]),
        (lambda line: line.pairs("x"), [["a"]]),
        (lambda line: line.pairs("x"), [["a", "b", "c"]]),
        (lambda line: line.numbers("x"), [0] * 100_001),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(get: Get, value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"file \(x\), line 3.*(must|long)") as caught:
        get(_line(x=value))
    assert len(str(caught.value)) < 400


def test_a_missing_value_and_null_are_none() -> None:
    for line in (_line(), _line(x=None)):
        assert (line.number("x"), line.text("x"), line.inner("x"), line.flag("x")) == (None, None, None, None)
        assert (line.numbers("x"), line.texts("x"), line.inners("x"), line.pairs("x")) == ([], [], [], [])


def test_nulls_in_a_list_of_numbers_are_left_out() -> None:
    assert _line(x=[1, None, 3.5]).numbers("x") == [1.0, 3.5]


def test_long_texts_are_cut() -> None:
    assert len(_line(x="y" * 100_000).text("x") or "") == 2_001


def test_facts_include_values_one_level_deeper() -> None:
    line = _line(x={"cores": 2, "name": "a", "deep": {"cpu": 1.5}, "on": True, "load": [1, 2], "none": None})
    expected = [("cores", 2.0), ("name", "a"), ("deep cpu", 1.5), ("on", True), ("load", "1, 2"), ("none", None)]
    assert line.facts("x") == expected

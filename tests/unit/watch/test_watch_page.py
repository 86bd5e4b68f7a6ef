"""The programs of docs/watch.md run, one after another. The tables of docs/benchmarks.md are those of the results."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "watch.md"
MEASURED = PAGE.with_name("benchmarks.md")
BENCHMARKS = PAGE.parents[1] / "benchmarks"


def test_the_table_of_promises_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "watch.py"))
    results = json.loads((BENCHMARKS / "results" / "watch.json").read_text(encoding="utf-8"))
    page = MEASURED.read_text(encoding="utf-8")
    assert script["write_page"](page, results) == page, "run `python benchmarks/watch.py --docs`"


def test_the_table_of_showings_is_that_of_the_results() -> None:
    rows = json.loads((BENCHMARKS / "results" / "watch_showings.json").read_text(encoding="utf-8"))["rows"]
    _, _, table = MEASURED.read_text(encoding="utf-8").partition("<!-- showings -->")
    assert re.findall(r"^\| .* \| (.*) \| .* \|$", table, re.MULTILINE)[1:] == [row["figure"] for row in rows]

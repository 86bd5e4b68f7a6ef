"""The programs of docs/watch.md run as they stand, one after another, and its figures are those that were measured."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "watch.md"
BENCHMARKS = PAGE.parents[1] / "benchmarks"


@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3, of a logger without TensorBoard
def test_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(program, str(PAGE), "exec"), names)
    names["memory"].close()
    assert {"model", "watched", "memory"} <= names.keys()


def test_the_table_of_promises_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = runpy.run_path(str(BENCHMARKS / "watch.py"))
    results = json.loads((BENCHMARKS / "results" / "watch.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert script["write_page"](page, results) == page, "run `python benchmarks/watch.py --docs`"


def test_the_table_of_showings_is_that_of_the_results() -> None:
    rows = json.loads((BENCHMARKS / "results" / "watch_showings.json").read_text(encoding="utf-8"))["rows"]
    _, _, table = PAGE.read_text(encoding="utf-8").partition("<!-- showings:")
    assert re.findall(r"^\| .* \| (.*) \| .* \|$", table, re.MULTILINE)[1:] == [row["figure"] for row in rows]

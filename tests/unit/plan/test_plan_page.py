"""The figures of docs/benchmarks.md are those of benchmarks/results/plan.json and probe_scripts.json."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of benchmarks/plan.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "plan.py"))


@pytest.fixture
def results() -> dict[str, Any]:
    """Return what benchmarks/plan.py measured."""
    text = (ROOT / "benchmarks" / "results" / "plan.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_table_of_the_page_is_that_of_the_results(script: dict[str, Any], results: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert script["write_page"](page, results) == page, "run `python benchmarks/plan.py --docs`"


def test_the_results_have_the_settings_of_the_script(script: dict[str, Any], results: dict[str, Any]) -> None:
    measured = {row["name"]: row["settings"] for row in results["runs"]}
    assert measured == {name: script["RUNS"][name] for name in measured}


def test_no_measured_peak_is_above_its_bound(results: dict[str, Any]) -> None:
    assert [row["name"] for row in results["runs"] if row["most_bytes"] < row["measured_bytes"]] == []


def test_the_public_scripts_of_the_page_are_those_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = runpy.run_path(str(ROOT / "benchmarks" / "probe_scripts.py"))
    results = json.loads((ROOT / "benchmarks" / "results" / "probe_scripts.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert script["summarize"](results["scripts"]) == results["summary"]
    assert script["write_page"](page, results) == page, "run `python benchmarks/probe_scripts.py --docs`"

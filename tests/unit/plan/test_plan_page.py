"""The results of `holdall plan` and of the probe agree with the benchmarks that measured them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def read_results(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((BENCHMARKS / "results" / name).read_text(encoding="utf-8"))
    return document


def read_values(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for row in document["cases"]:
        values.setdefault(row["case"], {})[row["figure"]] = row["value"]
    return values


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the names of a script of benchmarks/tools."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "tools"))
    return lambda name: runpy.run_path(str(BENCHMARKS / "tools" / f"{name}.py"))


def test_the_results_have_the_settings_of_the_script(run_script: Any) -> None:
    document = read_results("plan.json")
    settings = run_script("planned_peaks")["RUNS"]
    for row in document["cases"]:
        case = row["case"]
        assert document["runs"][row["run"]]["settings"][case] == settings[case]


def test_no_measured_peak_is_above_its_bound() -> None:
    plans = read_values(read_results("plan.json"))
    assert [name for name, plan in plans.items() if plan["at most"] < plan["measured"]] == []
    assert {plan["bound holds"] for plan in plans.values()} == {"yes"}


def test_the_figures_over_all_public_scripts_are_those_of_the_scripts(run_script: Any) -> None:
    values = read_values(read_results("probe.json"))
    script = run_script("probe_scripts")
    scripts = [row for case, row in values.items() if not case.startswith(script["TOGETHER"])]
    together = {figure.case: figure.value for figure in script["summarize"](scripts)}
    assert together == {case: row["measured"] for case, row in values.items() if case.startswith(script["TOGETHER"])}

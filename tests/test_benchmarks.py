"""The docs have the figures of benchmarks/results, and all results have one format."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def run_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that returns the names of a benchmark's module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: runpy.run_path(str(BENCHMARKS / f"{name}.py"))


def test_the_tables_of_the_pages_are_those_of_the_results(run_script: Any) -> None:
    for page, text, rewritten in run_script("tables")["pages"]():
        assert text == rewritten, f"{page.name} differs from the results: run `python benchmarks/tables.py`"


@pytest.mark.parametrize("name", ["picture", "kinds_picture"])
def test_the_pictures_are_those_of_the_results(run_script: Any, name: str) -> None:
    script = run_script(name)
    for theme, path in script["PICTURES"].items():
        assert path.read_text(encoding="utf-8") == script["drawn"](theme), f"run `python benchmarks/{name}.py`"


def test_every_figure_says_where_it_was_measured() -> None:
    benchmarks = tomllib.loads((BENCHMARKS / "benchmarks.toml").read_text(encoding="utf-8"))
    for name, benchmark in benchmarks.items():
        file = RESULTS / f"{name}.json"
        if benchmark.get("writes", True) and file.exists():
            document = json.loads(file.read_text(encoding="utf-8"))
            assert document["name"] == name
            assert document["claim"] == benchmark["claim"]
            assert {row["run"] for row in document["cases"]} == set(range(len(document["runs"])))
            for run in document["runs"]:
                assert {"commit", "date", "command", "machine", "versions", "settings"} <= set(run)
            for row in document["cases"]:
                assert set(row) == {"case", "figure", "unit", "value", "bar", "run"}
            keys = [(row["case"], row["figure"]) for row in document["cases"]]
            assert len(keys) == len(set(keys))


@pytest.mark.parametrize("name", ["torchrl", "lerobot"])
def test_the_own_tests_of_other_libraries_passed(name: str) -> None:
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    failed = {row["case"]: row["value"] for row in document["cases"] if row["figure"] == "failed"}
    assert len(failed) >= 2
    assert not any(failed.values())


def test_every_script_of_the_list_exists() -> None:
    benchmarks = tomllib.loads((BENCHMARKS / "benchmarks.toml").read_text(encoding="utf-8"))
    for benchmark in benchmarks.values():
        for command in (*benchmark["commands"], *benchmark.get("short", ())):
            assert (BENCHMARKS / command.split()[0]).is_file(), command


def test_a_new_run_replaces_the_figures_that_it_measured_and_keeps_the_others(run_script: Any, tmp_path: Path) -> None:
    results = run_script("results")
    store = results["store"]
    read = results["read"]
    figure = results["Figure"]
    file = tmp_path / "replay.json"
    store(file, [figure("a", "bytes", "B", 10.0), figure("b", "bytes", "B", 20.0)], {"commit": "first"})
    store(file, [figure("a", "bytes", "B", 11.0), figure("c", "bytes", "B", 30.0)], {"commit": "second"})
    document = read(file)
    measured = [(row["case"], row["value"], document["runs"][row["run"]]["commit"]) for row in document["cases"]]
    assert measured == [("a", 11.0, "second"), ("b", 20.0, "first"), ("c", 30.0, "second")]
    store(file, [figure("b", "bytes", "B", 21.0)], {"commit": "third"})
    assert [run["commit"] for run in read(file)["runs"]] == ["second", "third"]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (56_462.3, "B", "56,462 B"),
        (8.13, "times", "8.1 x"),
        (0.254, "of SB3's time", "0.25"),
        (0.00342, "of the bytes", "0.0034"),
        (0.0, "%", "0 %"),
        (41.75, "MiB", "41.8 MiB"),
        (4_225, "", "4,225"),
        ("0 of 2,620", "", "0 of 2,620"),
        (None, "ms", ""),
    ],
)
def test_values_are_shown_with_as_many_digits_as_a_reader_needs(
    run_script: Any, value: Any, unit: str, shown: str
) -> None:
    assert run_script("results")["format_value"](value, unit) == shown


def test_the_runner_lists_all_benchmarks_and_refuses_others() -> None:
    script = [sys.executable, str(BENCHMARKS / "run.py")]
    listed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    benchmarks = tomllib.loads((BENCHMARKS / "benchmarks.toml").read_text(encoding="utf-8"))
    assert [line.partition(":")[0] for line in listed.splitlines() if not line.startswith(" ")] == list(benchmarks)
    refused = subprocess.run([*script, "repaly"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "there is no benchmark repaly" in refused.stderr

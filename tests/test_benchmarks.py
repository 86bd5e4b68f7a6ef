"""The docs have the figures of benchmarks/results, and all results have one format."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import Counter
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


@pytest.mark.parametrize("name", ["memory", "kinds"])
def test_the_pictures_are_those_of_the_results(run_script: Any, name: str) -> None:
    script = run_script(f"pictures/{name}")
    for theme, path in script["PICTURES"].items():
        assert path.read_text(encoding="utf-8") == script["drawn"](theme), "run `python benchmarks/tables.py`"


@pytest.mark.parametrize("file", sorted(RESULTS.iterdir()), ids=lambda file: file.name)
def test_every_figure_says_where_it_was_measured(file: Path) -> None:
    if file.name == "gate.json":
        pytest.skip("a table for each kind of processor, which gate.py compares with")
    document = json.loads(file.read_text(encoding="utf-8"))
    assert {row["run"] for row in document["cases"]} == set(range(len(document["runs"])))
    for run in document["runs"]:
        assert {"commit", "date", "command", "machine", "versions", "settings"} <= set(run)
    for row in document["cases"]:
        assert set(row) == {"case", "figure", "unit", "value", "bar", "run"}
    keys = [(row["case"], row["figure"]) for row in document["cases"]]
    assert len(keys) == len(set(keys))


def test_every_file_of_results_belongs_to_a_part_or_to_a_decision(run_script: Any) -> None:
    parts = {part.name for claim in run_script("run")["read_claims"]() for part in claim.parts}
    assert {file.stem for file in RESULTS.iterdir()} - {"engines"} <= parts


@pytest.mark.parametrize("name", ["torchrl", "lerobot"])
def test_the_own_tests_of_other_libraries_passed(name: str) -> None:
    document = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    failed = {row["case"]: row["value"] for row in document["cases"] if row["figure"] == "failed"}
    assert len(failed) >= 2
    assert not any(failed.values())


def test_every_script_of_the_list_exists_and_stores_results(run_script: Any) -> None:
    for claim in run_script("run")["read_claims"]():
        for part in claim.parts:
            for command in (*part.commands, *part.short):
                script = BENCHMARKS / command.split()[0]
                assert script.is_file(), command
                assert ('"--json"' in script.read_text(encoding="utf-8")) == part.takes_json, command


def test_every_script_in_a_folder_finds_the_modules_that_it_shares_with_others(run_script: Any) -> None:
    parts = [part for claim in run_script("run")["read_claims"]() for part in claim.parts]
    for script in {command.split()[0] for part in parts for command in part.commands if "/" in command.split()[0]}:
        text = (BENCHMARKS / script).read_text(encoding="utf-8")
        assert "sys.path.insert(0, str(Path(__file__).parents[1]))" in text, script


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


def test_the_runner_lists_all_claims_and_refuses_other_names(run_script: Any) -> None:
    script = [sys.executable, str(BENCHMARKS / "run.py")]
    listed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    claims = run_script("run")["read_claims"]()
    names = [line.partition(":")[0] for line in listed.splitlines() if not line.startswith(" ")]
    assert names == [claim.name for claim in claims]
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")] == names
    refused = subprocess.run([*script, "repaly"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "there is no benchmark repaly" in refused.stderr


def test_a_part_is_run_alone_or_with_its_claim(run_script: Any) -> None:
    run = run_script("run")
    claims = run["read_claims"]()
    parts = [part.name for claim in claims for part in claim.parts]
    assert len(parts) == len(set(parts))
    assert not {claim.name for claim in claims if len(claim.parts) > 1} & set(parts)
    chosen = {
        name: [part.name for part in run["choose_parts"](claims, [name])] for name in ("memory", "vectors", "ray")
    }
    assert chosen == {"memory": ["replay", "vectors", "codecs"], "vectors": ["vectors"], "ray": ["ray"]}
    assert all(part.needs is None for part in run["choose_parts"](claims, ["all"]))


def test_the_counts_of_the_soak_in_the_docs_are_those_of_the_results() -> None:
    totals: Counter[str] = Counter()
    for row in json.loads((RESULTS / "soak.json").read_text(encoding="utf-8"))["cases"]:
        totals[row["figure"]] += row["value"]
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    shown = f"{totals['rows added']:,} rows added, {totals['rows compared']:,} compared"
    assert f"{shown}, {totals['saves']:,} saves and loads, {totals['interrupts']:,} interrupts" in page
    assert totals["wrong rows"] == totals["problems"] == 0

"""The figures of lint over all public scripts are those of the single scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "lint.json"


def read_values() -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["cases"]:
        values.setdefault(row["case"], {})[row["figure"]] = row["value"]
    return values


def test_all_mistakes_and_findings_are_counted() -> None:
    values = read_values()
    mistakes = [row["found"] for case, row in values.items() if case.startswith("mistake ")]
    findings = [row["true"] for case, row in values.items() if case.startswith("finding: ")]
    counts = {case.removeprefix("all: "): row["number"] for case, row in values.items() if case.startswith("all: ")}
    assert counts["mistakes planted into them"] == len(mistakes)
    assert counts["of these, found by lint"] == mistakes.count("yes")
    assert counts["findings in these files and runs"] == len(findings)
    assert counts["of these, false"] == findings.count("no")

"""The figures of docs/benchmarks.md about public scripts are those of benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").replace("\n", " ")


def _read_results(name: str) -> dict[str, Any]:
    text = (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_page_has_the_number_of_planted_mistakes_that_were_found() -> None:
    results = _read_results("planted_mistakes.json")
    found = sum(row["is_found"] for row in results["mistakes"])
    assert results["summary"] == {"planted": len(results["mistakes"]), "found": found}
    assert f"Of {len(results['mistakes'])} mistakes that" in PAGE
    assert f"lint finds {found}." in PAGE


def test_the_page_has_the_number_of_judged_findings_and_of_false_ones() -> None:
    results = _read_results("lint_judged.json")
    summary = results["summary"]
    findings = results["findings"]
    assert summary["findings"] == len(findings)
    assert summary["false"] == sum(not one["is_true"] for one in findings)
    assert f"In {summary['files']} files and {summary['runs']} runs" in PAGE
    assert f"reports {len(findings)} findings." in PAGE
    assert f"{summary['false']} of them are false" in PAGE

"""Findings as lines, as JSON and as SARIF 2.1.0; a rule as Markdown.

In:  findings, or a rule.  Out: text, or plain data that is ready for JSON.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from holdall.tools.lint.finding import Finding, Severity, SourceRange
from holdall.tools.lint.rule import Rule, RuleExample

SCHEMA_VERSION = 1
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def as_line(finding: Finding) -> str:
    """Write one finding."""
    place = finding.place
    where = f"{place.path}:{place.line}:{place.column}" if place.line else place.path
    return f"{where}: {finding.rule} {finding.severity.word}: {finding.message} [{finding.name}]"


def as_text(findings: Sequence[Finding]) -> str:
    """Write findings, and what they are in all."""
    return "\n".join([*map(as_line, findings), summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """Count findings: `1 error, 2 warnings, 0 infos`."""
    counted = Counter(finding.severity for finding in findings)
    words = [f"{counted[s]} {s.word}{'' if counted[s] == 1 else 's'}" for s in sorted(Severity, reverse=True)]
    return ", ".join(words)


def as_json(findings: Sequence[Finding], files: int) -> dict[str, Any]:
    """Return the object that `--format json` prints."""
    counted = Counter(finding.severity.word for finding in findings)
    return {
        "schema_version": SCHEMA_VERSION,
        "files": files,
        "counts": {severity.word: counted[severity.word] for severity in sorted(Severity, reverse=True)},
        "findings": [_finding(finding) for finding in findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    what = {"rule": finding.rule, "name": finding.name, "severity": finding.severity.word, "message": finding.message}
    return what | asdict(finding.place) | {"numbers": dict(finding.numbers), "fixable": finding.edit is not None}


def as_sarif(findings: Sequence[Finding], rules: Mapping[str, Rule], version: str) -> dict[str, Any]:
    """Return a SARIF 2.1.0 log with one run."""
    indices = {name: index for index, name in enumerate(rules)}
    described = [_descriptor(rule) for rule in rules.values()]
    driver = {"name": "holdall lint", "semanticVersion": version, "rules": described}
    results = [_result(finding, indices[finding.rule]) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _descriptor(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.doc.what},
        "fullDescription": {"text": rule.doc.why},
        "help": {"text": f"{rule.doc.why} {rule.doc.fix}"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
    }


def _result(finding: Finding, index: int) -> dict[str, Any]:
    location = {"artifactLocation": _artifact(finding.place), "region": _region(finding.place)}
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"holdall/v1": _fingerprint(finding)},
    }
    if finding.edit is not None:
        edit = finding.edit
        replacement = {"deletedRegion": _region(edit.place), "insertedContent": {"text": edit.text}}
        change = {"artifactLocation": _artifact(edit.place), "replacements": [replacement]}
        result["fixes"] = [{"description": {"text": f"--fix for {finding.rule}"}, "artifactChanges": [change]}]
    return result


def _artifact(place: SourceRange) -> dict[str, str]:
    path = Path(place.path)
    return {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())}


def _region(place: SourceRange) -> dict[str, int]:
    start = {"startLine": place.line, "startColumn": place.column}
    return start | {"endLine": place.end_line, "endColumn": place.end_column}


def _fingerprint(finding: Finding) -> str:
    """Name a finding by what it says and not by its line, so that it stays the same when lines move."""
    return hashlib.sha256(f"{finding.rule}|{finding.place.path}|{finding.message}".encode()).hexdigest()[:16]


def explain(rule: Rule) -> str:
    """Write one rule."""
    doc = rule.doc
    parts = [f"### {rule.id} {rule.name} ({rule.severity.word})", doc.what, f"**Why it matters.** {doc.why}"]
    parts += ["**Example.**", *map(_fenced, doc.bad), f"**Fix.** {doc.fix}", *map(_fenced, doc.good)]
    return "\n\n".join(parts)


def _fenced(case: RuleExample) -> str:
    language = "yaml" if case.file.endswith(".yml") else "python"
    name = [f"# {case.file}"] if language == "yaml" else []
    return "\n".join([f"```{language}", *name, case.source.rstrip("\n"), "```"])

"""Findings as lines and as JSON, and a rule as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from holdall.tools.lint.finding import Finding, Severity
from holdall.tools.lint.rule import Rule, RuleExample
from holdall.units import count_noun

SCHEMA_VERSION = 1


def format_line(finding: Finding) -> str:
    """Return one finding as a line."""
    where = finding.place.text
    return f"{where}: {finding.rule} {finding.severity.word}: {finding.message} [{finding.name}]"


def format_findings(findings: Sequence[Finding], min_severity: Severity, files: int = 0) -> str:
    """Return one line for each finding of at least `min_severity`, and a line that counts all findings.

    `files` is the number of files that were read.
    """
    lines = [format_line(finding) for finding in findings if finding.severity >= min_severity]
    summary = ", ".join(count_noun(count, word) for word, count in _count(findings).items())
    if files:
        summary += f" in {count_noun(files, 'file')}"
    if len(lines) < len(findings):
        summary += " (--infos lists them)"
    return "\n".join([*lines, summary])


def _count(findings: Sequence[Finding]) -> dict[str, int]:
    """Count findings by severity, the worst first."""
    numbers = Counter(finding.severity for finding in findings)
    return {severity.word: numbers[severity] for severity in sorted(Severity, reverse=True)}


def describe_findings(findings: Sequence[Finding], files: int) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "files": files,
        "counts": _count(findings),
        "findings": [_describe(finding) for finding in findings],
    }


def _describe(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "name": finding.name,
        "severity": finding.severity.word,
        "message": finding.message,
        **asdict(finding.place),
        "numbers": dict(finding.numbers),
        "fixable": finding.edit is not None,
    }


def explain(rule: Rule) -> str:
    """Return the documentation of one rule as Markdown."""
    doc = rule.doc
    needs = "`holdall lint -- COMMAND`" if rule.needs_run else "`holdall lint FILES`"
    parts = [
        f"# {rule.code} {rule.name} ({rule.severity.word})",
        f"{doc.what} Found by {needs}.",
        f"**Why is this bad?** {doc.why}",
        "**Example**",
        *map(_fence, doc.bad),
        f"**Use instead.** {doc.fix}",
        *map(_fence, doc.good),
    ]
    return "\n\n".join(parts)


def _fence(example: RuleExample) -> str:
    return f"```python\n{example.source}```"

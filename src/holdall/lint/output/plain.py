"""Findings as lines: `train.py:12:5: L05 warning: ... [batch-does-not-divide-rollout]`.

In:  findings.  Out: one line for each, and one that counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdall.lint.finding import Finding, Severity


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

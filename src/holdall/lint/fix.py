"""`--fix`: the edits that change nothing that a training computes.

In:  a file's text and its findings.  Out: the text with their edits made.
Invariant: an edit is made only where the text is still what the rule took it for, and no two edits overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from holdall.lint.finding import Edit, Finding


def apply_edits(text: str, findings: Iterable[Finding]) -> tuple[str, list[Finding]]:
    """Return the corrected text, and the findings that it corrects."""
    lines = text.split("\n")
    spans = [(*_span(lines, one.edit), one.edit, one) for one in findings if one.edit]
    made: list[Finding] = []
    next_start = len(text) + 1
    for start, end, edit, finding in sorted(spans, key=lambda span: span[:2], reverse=True):
        if end <= next_start and text[start:end] == edit.old:
            text = text[:start] + edit.text + text[end:]
            next_start = start
            made.append(finding)
    return text, made[::-1]


def drop_impossible(text: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings, without the edits whose place holds something else: a name, where a value was expected."""
    lines = text.split("\n")
    for finding in findings:
        if finding.edit is None:
            yield finding
            continue
        start, end = _span(lines, finding.edit)
        yield finding if text[start:end] == finding.edit.old else replace(finding, edit=None)


def _span(lines: Sequence[str], edit: Edit) -> tuple[int, int]:
    """Return where an edit begins and ends in the text."""
    place = edit.place
    start, end = (sum(len(line) + 1 for line in lines[: number - 1]) for number in (place.line, place.end_line))
    return start + place.column - 1, end + place.end_column - 1

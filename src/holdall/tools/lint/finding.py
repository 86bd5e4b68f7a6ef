"""A finding of a rule: its place, its severity, its message and figures, and the edit that corrects it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Severity(IntEnum):
    """How bad a finding is. A larger number is worse."""

    INFO = 1
    """Worth knowing."""
    WARNING = 2
    """Costs memory, time or results."""
    ERROR = 3
    """Fails, or does something else than it says."""

    @property
    def word(self) -> str:
        """The severity in lower case, as users write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A range of a file, or an object of a run.

    Lines and columns start at 1. The end column is one past the last character. For an object of a run, `path` is the
    object's name, and all numbers are 0.
    """

    path: str
    line: int = 0
    column: int = 0
    end_line: int = 0
    end_column: int = 0

    @property
    def text(self) -> str:
        """The place as it is printed: `train.py:3:5`, or the name of an object."""
        return f"{self.path}:{self.line}:{self.column}" if self.line else self.path


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of the text `old` at `place` by `text`. It never changes what a training computes."""

    place: Place
    old: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake that a rule found."""

    rule: str
    """Code of the rule, such as `L05`."""
    name: str
    severity: Severity
    message: str
    place: Place
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    """The figures of the message by name. Sizes are in bytes."""
    edit: Edit | None = None


def apply_edits(text: str, findings: Iterable[Finding]) -> tuple[str, list[Finding]]:
    """Return the corrected text and the findings that were corrected.

    An edit is skipped if the text at its place is not `old`, or if the edit overlaps another one.
    """
    lines = text.split("\n")
    fixable = [(finding, finding.edit) for finding in findings if finding.edit is not None]
    # From the end of the text to its beginning, so that the offsets of the remaining edits stay valid.
    fixable.sort(key=lambda pair: _find_span(lines, pair[1]), reverse=True)
    made: list[Finding] = []
    next_start = len(text)
    for finding, edit in fixable:
        start, end = _find_span(lines, edit)
        if end > next_start or text[start:end] != edit.old:
            continue
        text = text[:start] + edit.text + text[end:]
        next_start = start
        made.append(finding)
    return text, made[::-1]


def _find_span(lines: Sequence[str], edit: Edit) -> tuple[int, int]:
    """Return the offsets in the text at which an edit begins and ends."""
    place = edit.place
    start = sum(len(line) + 1 for line in lines[: place.line - 1]) + place.column - 1
    end = sum(len(line) + 1 for line in lines[: place.end_line - 1]) + place.end_column - 1
    return start, end

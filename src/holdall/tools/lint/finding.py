"""A finding: where, how severe, in words and in numbers; the comment that accepts it; the edit that corrects it.

`# holdall: ignore[M01, L02]` counts for its own line, or alone on a line for the next line of code; without ids it
ignores every rule; `# holdall: ignore-file[...]` counts for the whole file.
Invariant: an edit is made only where the text is still what the rule expects, and no two edits overlap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

_COMMENT = re.compile(r"\s*#\s*holdall:\s*ignore(?P<file>-file)?(?:\[(?P<ids>[A-Z0-9,\s]*)\])?", re.ASCII)
_ID = re.compile(r"[A-Z]\d*")


class Severity(IntEnum):
    """How bad a finding is; a larger number is worse."""

    INFO = 1  # worth knowing
    WARNING = 2  # costs memory, time or results
    ERROR = 3  # fails, or does not do what it says

    @property
    def word(self) -> str:
        """The name as users write it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, order=True)
class SourceRange:
    """A range of a file; lines and columns count from 1, the end column is one past the last character."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def whole(cls, path: str) -> SourceRange:
        """Return a file's first character, for what concerns all of it."""
        return cls(path, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace what stands at `place` by `text`, if it is what the rule took it for."""

    place: SourceRange
    old: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule found."""

    rule: str  # its id
    name: str
    severity: Severity
    message: str
    place: SourceRange
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    edit: Edit | None = None  # safe: it changes nothing that the training computes


@dataclass(frozen=True, slots=True)
class IgnoreComment:
    """One comment."""

    line: int  # where it stands
    start: int  # its columns, from 0
    end: int
    covers: int  # the line that it is about; 0: all of them
    ids: frozenset[str]  # empty: every rule

    def accepts(self, finding: Finding) -> bool:
        """Whether a finding is one of those that the comment is about."""
        about = self.covers == 0 or finding.place.line <= self.covers <= finding.place.end_line
        return about and (not self.ids or finding.rule in self.ids)


def read_ignores(text: str) -> list[IgnoreComment]:
    """Return the comments of a file, Python or YAML alike."""
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        match = _COMMENT.search(line) if "holdall:" in line else None
        if match is None:
            continue
        ids = frozenset(_ID.findall(match["ids"] or ""))
        covers = 0 if match["file"] else number if line[: match.start()].strip() else _next_code(lines, number)
        found.append(IgnoreComment(number, match.start(), match.end(), covers, ids))
    return found


def _next_code(lines: list[str], number: int) -> int:
    code = (at for at, line in enumerate(lines[number:], number + 1) if line.strip() and line.lstrip()[0] != "#")
    return next(code, number)


def apply_edits(text: str, findings: Iterable[Finding]) -> tuple[str, list[Finding]]:
    """Return the corrected text, and the findings that it corrects."""
    lines = text.split("\n")
    spans = [(*_offsets(lines, one.edit), one.edit, one) for one in findings if one.edit]
    made: list[Finding] = []
    next_start = len(text) + 1
    for start, end, edit, finding in sorted(spans, key=lambda span: span[:2], reverse=True):
        if end <= next_start and text[start:end] == edit.old:
            text = text[:start] + edit.text + text[end:]
            next_start = start
            made.append(finding)
    return text, made[::-1]


def drop_stale_edits(text: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings, without the edits whose place holds something else: a name, where a value was expected."""
    lines = text.split("\n")
    for finding in findings:
        start, end = _offsets(lines, finding.edit) if finding.edit else (0, 0)
        is_stale = finding.edit is not None and text[start:end] != finding.edit.old
        yield replace(finding, edit=None) if is_stale else finding


def _offsets(lines: Sequence[str], edit: Edit) -> tuple[int, int]:
    """Return where an edit begins and ends in the text."""
    place = edit.place
    start, end = (sum(len(line) + 1 for line in lines[: number - 1]) for number in (place.line, place.end_line))
    return start + place.column - 1, end + place.end_column - 1

"""`# holdall: ignore[M01, L02]`: findings that somebody has looked at and accepts.

In:  a file's text.  Out: which rules each line ignores. A comment counts for its own line, and one that stands alone
for the next line of code. `# holdall: ignore` without ids ignores every rule; `# holdall: ignore-file[...]` counts
for the whole file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdall.lint.finding import Finding

_COMMENT = re.compile(r"\s*#\s*holdall:\s*ignore(?P<file>-file)?(?:\[(?P<ids>[A-Z0-9,\s]*)\])?", re.ASCII)
_ID = re.compile(r"[A-Z]\d*")


@dataclass(frozen=True, slots=True)
class Ignore:
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


def read_ignores(text: str) -> list[Ignore]:
    """Return the comments of a file, Python or YAML alike."""
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        match = _COMMENT.search(line) if "holdall:" in line else None
        if match is None:
            continue
        ids = frozenset(_ID.findall(match["ids"] or ""))
        covers = 0 if match["file"] else number if line[: match.start()].strip() else _next_code(lines, number)
        found.append(Ignore(number, match.start(), match.end(), covers, ids))
    return found


def _next_code(lines: list[str], number: int) -> int:
    for later, line in enumerate(lines[number:], start=number + 1):
        if line.strip() and not line.lstrip().startswith("#"):
            return later
    return number

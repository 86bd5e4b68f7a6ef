"""Comments that accept findings.

`# holdall: ignore[S03, L02]` accepts findings on its own line. Alone on a line, it accepts findings of the next line of
code. `# holdall: ignore-file[...]` accepts findings of the whole file. Without codes, a comment accepts every rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdall.tools.lint.finding import Finding, Place

_COMMENT = re.compile(r"\s*#\s*holdall:\s*ignore(?P<file>-file)?(?:\[(?P<codes>[A-Z0-9,\s]*)\])?", re.ASCII)
_CODE = re.compile(r"[A-Z]\d+")
_WHOLE_FILE = 0


@dataclass(frozen=True, slots=True)
class IgnoreComment:
    """A comment that accepts findings."""

    place: Place
    text: str
    line: int
    """Line whose findings are accepted; 0 for the whole file."""
    codes: frozenset[str]
    """Codes of the rules; empty for every rule."""

    def accepts(self, finding: Finding) -> bool:
        """Return whether the comment accepts `finding`."""
        place = finding.place
        is_here = self.line == _WHOLE_FILE or place.line <= self.line <= place.end_line
        return is_here and (not self.codes or finding.rule in self.codes)


def read_ignores(text: str, path: str) -> list[IgnoreComment]:
    """Return the comments of a file that accept findings."""
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines, start=1):
        match = _COMMENT.search(line) if "holdall:" in line else None
        if match is None:
            continue
        place = Place(path, number, match.start() + 1, number, match.end() + 1)
        codes = frozenset(_CODE.findall(match["codes"] or ""))
        if match["file"]:
            accepted_line = _WHOLE_FILE
        elif line[: match.start()].strip():
            accepted_line = number
        else:
            accepted_line = _find_next_code_line(lines, number)
        found.append(IgnoreComment(place, match[0], accepted_line, codes))
    return found


def _find_next_code_line(lines: list[str], number: int) -> int:
    """Return the number of the first line of code after line `number`; `number` itself if there is none."""
    for following in range(number + 1, len(lines) + 1):
        code = lines[following - 1].strip()
        if code and not code.startswith("#"):
            return following
    return number

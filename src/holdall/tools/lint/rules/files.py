"""Rules about the file itself. `check.py` finds them while it parses a file and removes ignored findings."""

from __future__ import annotations

from holdall.tools.lint.finding import Severity
from holdall.tools.lint.rule import Rule


class NotParsed(Rule):
    """Reports a file that Python cannot parse.

    Why: No other rule can look at the file.
    Fix: Correct the syntax at the place that the message names.

    Bad:
        def train(:
            pass

    Good:
        def train():
            pass
    """

    code = "F01"
    severity = Severity.ERROR


class UnusedIgnore(Rule):
    """Reports a `# holdall: ignore[...]` comment that accepts no finding.

    Why: The comment would hide the next finding on its line, which nobody has looked at.
    Fix: Delete the comment, or the codes that the message names.

    Bad:
        batch_size = 64  # holdall: ignore[S03]

    Good:
        batch_size = 64
    """

    code = "F02"
    severity = Severity.INFO

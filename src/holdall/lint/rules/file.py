"""Rules about the file itself: whether it can be read, and whether its comments still mean something."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from holdall.lint.finding import Edit, Finding, Place, Severity
from holdall.lint.ignores import Ignore
from holdall.lint.rule import Case, Rule


class NotParsed(Rule):
    """Reports a file that is no Python, or no YAML."""

    id = "F01"
    name = "not-parsed"
    severity = Severity.ERROR
    why = "None of the other rules could look at it."
    fix = "Correct the syntax at the place that is named."
    BAD: ClassVar = (Case("def train(:\n    pass"), Case("a: [1, 2", file="ppo.yml"))
    GOOD: ClassVar = (Case("def train():\n    pass"), Case("a: [1, 2]", file="ppo.yml"))

    def report(self, message: str, place: Place) -> Iterator[Finding]:
        """Yield that a file could not be read."""
        yield self.finding(f"cannot be parsed: {message}", place)


class UnusedIgnore(Rule):
    """Reports `# holdall: ignore[...]` comments that ignore nothing."""

    id = "F02"
    name = "unused-ignore"
    severity = Severity.INFO
    why = "It would hide the next finding on its line, one that nobody has looked at."
    fix = "Delete the comment, or the ids that the message names."
    BAD: ClassVar = (Case("batch_size = 64  # holdall: ignore[L05]"),)
    GOOD: ClassVar = (
        Case("batch_size = 64"),
        Case("import pickle\npickle.dump(replay_buffer, file)  # holdall: ignore[S03]"),
    )

    def report(self, ignore: Ignore, unused: frozenset[str], place: Place, text: str) -> Iterator[Finding]:
        """Yield that an ignore, or some of its ids, ignore nothing."""
        named = ", ".join(sorted(unused)) or "all rules"
        is_whole = unused == ignore.ids
        yield self.finding(
            f"this comment ignores {named}, and nothing is found here", place, _removal(place, text, is_whole)
        )


def _removal(place: Place, text: str, is_whole: bool) -> Edit | None:
    return Edit(place, text, "") if is_whole else None

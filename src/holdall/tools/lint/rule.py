"""What a rule is: its id, its words, the examples that show it, and its check; and the two rules about the file itself.

In:  a run, or a script, and the machine.  Out: findings.
A rule's docstring says what it does. Its first BAD and GOOD examples are the ones in the documentation, and one test
runs all of them.
"""

from __future__ import annotations

import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from holdall.tools.lint.finding import Edit, Finding, IgnoreComment, Severity, SourceRange
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.run import ConfiguredRun
from holdall.tools.lint.source.models import TrainingReader
from holdall.tools.lint.source.script import Script

GIB = 2**30

REFERENCE_MACHINE = Machine(
    cores=8,
    ram_bytes=32 * GIB,
    limit_bytes=32 * GIB,
    limit_name="RAM",
    vram_bytes=16 * GIB,
    shm_bytes=16 * GIB,
    disk_bytes=200 * 10**9,
    python=(3, 11),
    sb3=(2, 9, 2),
)
"""The machine that the cases are judged on."""


@dataclass(frozen=True, slots=True)
class RuleExample:
    """A file that a rule must, or must not, find something in."""

    text: str
    file: str = "train.py"
    machine: Mapping[str, object] = field(default_factory=dict)  # what is not as on the reference machine

    @property
    def source(self) -> str:
        """The file's text, without the indentation of the rule that shows it."""
        return textwrap.dedent(self.text).strip("\n") + "\n"


class Rule(ABC):
    """Base of all rules."""

    id: ClassVar[str]
    name: ClassVar[str]
    severity: ClassVar[Severity]
    why: ClassVar[str]
    fix: ClassVar[str]
    BAD: ClassVar[tuple[RuleExample, ...]]
    GOOD: ClassVar[tuple[RuleExample, ...]]

    @property
    def what(self) -> str:
        """What the rule does."""
        return " ".join(inspect.cleandoc(self.__doc__ or "").split())

    def finding(
        self,
        message: str,
        place: SourceRange,
        edit: Edit | None = None,
        **numbers: int | float | str,
    ) -> Finding:
        """Return a finding of this rule."""
        return Finding(self.id, self.name, self.severity, message, place, numbers, edit)


class RunRule(Rule):
    """A rule about one run, wherever it was read from."""

    sees_searches: ClassVar[bool] = False  # True: gets a run with OneOf values as it is, not one run for each value

    @abstractmethod
    def check(self, run: ConfiguredRun, machine: Machine) -> Iterator[Finding]:
        """Yield what is wrong with a run."""


@dataclass(frozen=True, slots=True)
class CheckedScript:
    """A script and what was read from it."""

    script: Script
    training: TrainingReader


class ScriptRule(Rule):
    """A rule about the text of a script."""

    @abstractmethod
    def check(self, subject: CheckedScript, machine: Machine) -> Iterator[Finding]:
        """Yield what is wrong with a script."""


class NotParsed(Rule):
    """Reports a file that is no Python, or no YAML."""

    id = "F01"
    name = "not-parsed"
    severity = Severity.ERROR
    why = "None of the other rules could look at it."
    fix = "Correct the syntax at the place that is named."
    BAD: ClassVar = (RuleExample("def train(:\n    pass"), RuleExample("a: [1, 2", file="ppo.yml"))
    GOOD: ClassVar = (RuleExample("def train():\n    pass"), RuleExample("a: [1, 2]", file="ppo.yml"))

    def report(self, message: str, place: SourceRange) -> Iterator[Finding]:
        """Yield that a file could not be read."""
        yield self.finding(f"cannot be parsed: {message}", place)


class UnusedIgnore(Rule):
    """Reports `# holdall: ignore[...]` comments that ignore nothing."""

    id = "F02"
    name = "unused-ignore"
    severity = Severity.INFO
    why = "It would hide the next finding on its line, one that nobody has looked at."
    fix = "Delete the comment, or the ids that the message names."
    BAD: ClassVar = (RuleExample("batch_size = 64  # holdall: ignore[L05]"),)
    GOOD: ClassVar = (
        RuleExample("batch_size = 64"),
        RuleExample("import pickle\npickle.dump(replay_buffer, file)  # holdall: ignore[S03]"),
    )

    def report(self, ignore: IgnoreComment, unused: frozenset[str], place: SourceRange, text: str) -> Iterator[Finding]:
        """Yield that an ignore, or some of its ids, ignore nothing."""
        named = ", ".join(sorted(unused)) or "all rules"
        is_whole = unused == ignore.ids
        yield self.finding(
            f"this comment ignores {named}, and nothing is found here", place, _removal(place, text, is_whole)
        )


def _removal(place: SourceRange, text: str, is_whole: bool) -> Edit | None:
    return Edit(place, text, "") if is_whole else None

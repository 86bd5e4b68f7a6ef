"""What a rule is: its id, its words, the cases that show it, and its check.

In:  a run, or a script, and the machine.  Out: findings.
A rule's docstring says what it does; its first BAD and GOOD cases are the example in the documentation, and one test
runs all of them.
"""

from __future__ import annotations

import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from holdall.lint.finding import Edit, Finding, Place, Severity
from holdall.lint.machine import Machine
from holdall.lint.run import Run
from holdall.lint.source.script import Script
from holdall.lint.source.training import Training

GIB = 2**30

REFERENCE = Machine(
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
class Case:
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
    BAD: ClassVar[tuple[Case, ...]]
    GOOD: ClassVar[tuple[Case, ...]]

    @property
    def what(self) -> str:
        """What the rule does."""
        return " ".join(inspect.cleandoc(self.__doc__ or "").split())

    def finding(
        self,
        message: str,
        place: Place,
        edit: Edit | None = None,
        **numbers: int | float | str,
    ) -> Finding:
        """Return a finding of this rule."""
        return Finding(self.id, self.name, self.severity, message, place, numbers, edit)


class RunRule(Rule):
    """A rule about one run, wherever it was read from."""

    sees_searches: ClassVar[bool] = False  # True: gets a run with OneOf values as it is, not one run for each value

    @abstractmethod
    def check(self, run: Run, machine: Machine) -> Iterator[Finding]:
        """Yield what is wrong with a run."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A script and what was read from it."""

    script: Script
    training: Training


class ScriptRule(Rule):
    """A rule about the text of a script."""

    @abstractmethod
    def check(self, subject: Subject, machine: Machine) -> Iterator[Finding]:
        """Yield what is wrong with a script."""

"""The base class of rules, and the documentation that every rule carries.

A rule is a class in a file of `holdall.tools.lint.rules`. It sets `code` and `severity` and overrides
`check_source`, `check_run` or both. Its docstring is its documentation: one paragraph about what the rule finds, then
`Why:`, `Fix:`, and an example that is `Bad:` and one that is `Good:`. Tests check the examples, and `docs/lint_page.py`
writes the page from the docstrings. Brackets after `Bad` or `Good` describe the machine or the model for which the
example is checked: `Bad (limit_bytes=1GiB, cores=2, device=cuda):`. An example of a rule about runs calls `learn`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from holdall.tools.lint.finding import Edit, Finding, Place, Severity
from holdall.tools.lint.machine import Machine
from holdall.tools.lint.source import Source
from holdall.tools.probe.snapshot import Snapshot

_SECTION = re.compile(r"^(Why|Fix|Bad|Good)(?: \((.+)\))?:", re.MULTILINE)
_WORD = re.compile(r"[A-Z][a-z0-9]*")


@dataclass(frozen=True, slots=True)
class Match:
    """A problem that a check found. The rule adds its code, name and severity."""

    message: str
    place: Place
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    edit: Edit | None = None
    severity: Severity | None = None
    """None: the severity of the rule."""


@dataclass(frozen=True, slots=True)
class RuleExample:
    """A script that shows a mistake, or the way to avoid it."""

    source: str
    machine: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the machine or the model, as text. All other attributes are those of the reference machine."""


@dataclass(frozen=True, slots=True)
class RuleDoc:
    """The documentation of a rule."""

    what: str
    why: str
    fix: str
    bad: tuple[RuleExample, ...]
    good: tuple[RuleExample, ...]

    @classmethod
    def read(cls, text: str) -> RuleDoc:
        """Split a docstring into its sections."""
        what, *sections = _SECTION.split(inspect.cleandoc(text))
        words = {"Why": "", "Fix": ""}
        examples: dict[str, list[RuleExample]] = {"Bad": [], "Good": []}
        for title, options, body in zip(sections[::3], sections[1::3], sections[2::3], strict=True):
            if title in examples:
                source = textwrap.dedent(body).strip("\n") + "\n"
                examples[title].append(RuleExample(source, _read_options(options)))
            else:
                words[title] = " ".join(body.split())
        bad = tuple(examples["Bad"])
        good = tuple(examples["Good"])
        return cls(" ".join(what.split()), words["Why"], words["Fix"], bad, good)


def _read_options(options: str | None) -> dict[str, str]:
    pairs = [option.partition("=") for option in options.split(", ")] if options else []
    return {name: value for name, _, value in pairs}


class Rule:
    """One kind of mistake. Subclasses override `check_source`, `check_run` or both."""

    code: ClassVar[str]
    """A letter for the subject (F file, L training loop, M memory, P tensors and processes, S saving) and a number."""
    severity: ClassVar[Severity]

    @property
    def name(self) -> str:
        """The name of the class with hyphens, such as `learning-never-starts`."""
        return "-".join(_WORD.findall(type(self).__name__)).lower()

    @property
    def doc(self) -> RuleDoc:
        """The sections of the docstring; empty if Python runs with -OO."""
        return RuleDoc.read(type(self).__doc__ or "")

    @property
    def needs_run(self) -> bool:
        """Whether the rule needs the values of a run, and finds nothing in a file."""
        own = type(self)
        return own.check_run is not Rule.check_run and own.check_source is Rule.check_source

    def check_source(self, source: Source, machine: Machine) -> Iterator[Match]:
        """Yield the problems of a file."""
        yield from ()

    def check_run(self, run: Snapshot, machine: Machine) -> Iterator[Match]:
        """Yield the problems of a run that is about to train, from its models, callbacks and buffers."""
        yield from ()

    def make_finding(self, match: Match) -> Finding:
        """Return a match as a finding of this rule."""
        severity = match.severity or self.severity
        return Finding(self.code, self.name, severity, match.message, match.place, dict(match.numbers), match.edit)

"""What a rule is: its id, its documentation with examples, and its check; and the two rules about the file itself.

In:  a run, or a script, and the machine.  Out: findings.
The docstring of a check is the documentation of its rule: what it does, `Why:` it matters, how to `Fix:` it, and one
example that is `Bad:` and one that is `Good:`. A test runs the examples. In brackets an example names what it does not
share with the others: its file's name, one of the `SETUPS` that stand before it, or what differs from the reference
machine.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from holdall.tools.lint.finding import Edit, Finding, Severity, SourceRange
from holdall.tools.lint.run import Machine
from holdall.units import parse_bytes

_GIB = 2**30
REFERENCE_MACHINE = Machine(8, 32 * _GIB, 32 * _GIB, "RAM", 16 * _GIB, 16 * _GIB, 200 * 10**9, (3, 11), (2, 9, 2))
"""The machine that the examples are checked for."""

_FILES = resources.files("holdall.tools.lint").joinpath("setups")
SETUPS = {
    name: _FILES.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in ("camera", "processes", "screens")
}
"""What stands before an example: an environment with a camera, one with screens, and processes."""

_SECTION = re.compile(r"^(Why|Fix|Bad|Good)(?: \((.+)\))?:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RuleExample:
    """A file that a rule must, or must not, find something in."""

    source: str
    file: str = "train.py"
    machine: Mapping[str, object] = field(default_factory=dict)  # what is not as on the reference machine

    @classmethod
    def read(cls, options: str | None, text: str) -> RuleExample:
        """Read an example from a docstring: its options, and the indented lines."""
        file, setup, machine = "train.py", "", {}
        for option in options.split(", ") if options else ():
            name, _, value = option.partition("=")
            if value:
                machine[name] = _machine_value(name, value)
            elif name in SETUPS:
                setup = SETUPS[name]
            else:
                file = name
        return cls(setup + textwrap.dedent(text).strip("\n") + "\n", file, machine)


def _machine_value(name: str, text: str) -> object:
    if text == "none":
        return None
    if name in {"python", "sb3"}:
        return tuple(map(int, text.split(".")))
    return parse_bytes(text, name) if name.endswith("_bytes") else text


@dataclass(frozen=True, slots=True)
class RuleDoc:
    """The documentation of a rule, in parts."""

    what: str
    why: str
    fix: str
    bad: tuple[RuleExample, ...]  # the rule finds something in each of them
    good: tuple[RuleExample, ...]  # and nothing in these

    @classmethod
    def read(cls, text: str) -> RuleDoc:
        """Split a docstring into its sections."""
        what, *parts = _SECTION.split(inspect.cleandoc(text))
        words = {"Why": "", "Fix": ""}
        examples: dict[str, list[RuleExample]] = {"Bad": [], "Good": []}
        for name, options, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            if name in examples:
                examples[name].append(RuleExample.read(options, body))
            else:
                words[name] = " ".join(body.split())
        bad, good = map(tuple, examples.values())
        return cls(" ".join(what.split()), words["Why"], words["Fix"], bad, good)


class Match(NamedTuple):
    """What a check found."""

    message: str
    place: SourceRange
    numbers: Mapping[str, int | float | str] = MappingProxyType({})
    edit: Edit | None = None
    severity: Severity | None = None  # None: that of the rule


@dataclass(frozen=True)
class Rule:
    """A rule; the docstring of its check is its documentation."""

    id: str
    name: str
    severity: Severity
    about: Literal["run", "search", "script", "buffer", "file"]
    check: Callable[..., Iterator[Match]]
    words: tuple[str, ...] = ()  # a script without all of them has nothing for this rule; empty: every script may
    sees_buffers: bool = False  # it is about buffers of Stable-Baselines3 that a program makes itself, too

    def concerns(self, text: str) -> bool:
        """Whether there can be something to find in a script of this text."""
        for word in self.words:  # asked of every rule for every file
            if word in text:
                return True
        return not self.words

    @cached_property
    def doc(self) -> RuleDoc:
        """The docstring, read; empty where Python was started with -OO."""
        return RuleDoc.read(self.check.__doc__ or "")

    def findings(self, *of: Any) -> Iterator[Finding]:
        """Run the check."""
        for message, place, numbers, edit, severity in self.check(*of):
            yield Finding(self.id, self.name, severity or self.severity, message, place, dict(numbers), edit)


def _kind_of_rule(
    about: Literal["run", "search", "script", "buffer"], number: str, name: str, severity: Severity, **more: Any
) -> Callable[[Callable[..., Iterator[Match]]], Rule]:
    return partial(Rule, number, name, severity, about, **more)


run_rule = partial(_kind_of_rule, "run")
"""Make a rule about one run, wherever it was read from: its check gets a ConfiguredRun and a Machine."""
search_rule = partial(_kind_of_rule, "search")
"""Make a rule about a run with its OneOf values as they are, and not about one run for each value."""
script_rule = partial(_kind_of_rule, "script")
"""Make a rule about the text of a script, if one of `words` is in it; its check gets a TrainingReader, too."""
buffer_rule = partial(_kind_of_rule, "buffer")
"""Make a rule about one buffer, of a model or of the program's own: its check gets a PlainBuffer."""


@partial(Rule, "F01", "not-parsed", Severity.ERROR, "file")
def not_parsed(message: str, place: SourceRange) -> Iterator[Match]:
    """Reports a file that is no Python, or no YAML.

    Why: None of the other rules could look at it.
    Fix: Correct the syntax at the place that is named.

    Bad:
        def train(:
            pass

    Good:
        def train():
            pass
    """
    yield Match(f"cannot be parsed: {message}", place)


@partial(Rule, "F02", "unused-ignore", Severity.INFO, "file")
def unused_ignore(named: str, place: SourceRange, removal: Edit | None) -> Iterator[Match]:
    """Reports `# holdall: ignore[...]` comments that ignore nothing.

    Why: It would hide the next finding on its line, one that nobody has looked at.
    Fix: Delete the comment, or the ids that the message names.

    Bad:
        batch_size = 64  # holdall: ignore[L05]

    Good:
        batch_size = 64
    """
    yield Match(f"this comment ignores {named}, and nothing is found here", place, edit=removal)

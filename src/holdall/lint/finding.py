"""What a rule found: where, how bad, in words and in numbers.

In:  a rule's judgement.  Out: one record for every output format and for --fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum


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
class Place:
    """A range of a file; lines and columns count from 1, the end column is one past the last character."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def whole(cls, path: str) -> Place:
        """Return a file's first character, for what concerns all of it."""
        return cls(path, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace what stands at `place` by `text`, if it is what the rule took it for."""

    place: Place
    old: str
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule found."""

    rule: str  # its id
    name: str
    severity: Severity
    message: str
    place: Place
    numbers: Mapping[str, int | float | str] = field(default_factory=dict)
    edit: Edit | None = None  # safe: it changes nothing that the training computes

"""What can be told of a value without running anything.

In:  nothing.  Out: the kinds of value that reading a file gives: a plain constant, or one of these.
Invariant: a value that is not certain is UNKNOWN (or names every candidate); no rule sees a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


class Unknown:
    """The value cannot be told from the file."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN: Final = Unknown()


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several values: a loop over constants, or a search space."""

    values: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Sized:
    """A sequence of known length whose items are not constants."""

    length: int


@dataclass(frozen=True, slots=True)
class Reference:
    """Something of another module, or a class or function of this one, by its full name: `numpy.uint8`."""

    dotted: str

    @property
    def last(self) -> str:
        """The name without its modules."""
        return self.dotted.rpartition(".")[2]


def whole(value: object) -> int | None:
    """Return a known whole number (1e6 is one), or None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return None


def candidates(value: object) -> tuple[int, ...]:
    """Return every whole number that the value can be; none if one of them is not known."""
    values = value.values if isinstance(value, OneOf) else (value,)
    numbers = [whole(one) for one in values]
    return () if None in numbers else tuple(number for number in numbers if number is not None)

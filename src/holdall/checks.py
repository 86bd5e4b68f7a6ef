"""Checks of arguments, and of values that were read from files.

A `require_` function returns the checked value, or raises ArgumentError with the argument, its value and the rule.
`require_choice` returns None. A `read_` function does the same for a value from a file or the network, but raises
DamageError.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from holdall.errors import ArgumentError, DamageError, HoldallError

_MAX_COUNT = 2**62


def require_count(argument: str, value: Any, least: int = 1, reason: str = "", most: int | None = None) -> int:
    """Return `value`, which must be a whole number of at least `least`, and at most `most` if that is given.

    The error message has `reason` after `least`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number of at least {least}{reason}")
    if most is not None and int(value) > most:
        raise ArgumentError(f"{argument} ({value!r}) must be at most {most}; pass a smaller number")
    return int(value)


def to_whole(value: Any) -> Any:
    """Return a float that is a whole number, such as 1e6, as an int. Return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_flag(argument: str, value: Any) -> bool:
    """Return `value`, which must be True or False."""
    if isinstance(value, bool) or type(value).__name__ in {"bool", "bool_"}:  # Python's bool, and that of NumPy.
        return bool(value)
    raise ArgumentError(f"{argument} ({value!r}) must be True or False; pass one of them")


def require_path(argument: str, value: Any) -> str:
    """Return a path or a URL as text."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = b""
    if isinstance(path, bytes):
        raise ArgumentError(f"{argument} ({value!r}) must be text or a pathlib.Path; pass one of them")
    if not path:
        raise ArgumentError(f"{argument} is an empty text. Pass a path; '.' is the working directory.")
    return str(path)


def require_choice(argument: str, value: Any, choices: Collection[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{argument} ({value!r}) must be one of {', '.join(choices)}; pass one of these")


def require_number(argument: str, value: Any, least: float, most: float = math.inf) -> float:
    """Return `value`, which must be a finite number from `least` to `most`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except OverflowError as error:
        raise ArgumentError(
            f"{argument} ({value!r}) is beyond the range of a float; pass a number closer to 0"
        ) from error
    if not least <= number <= most:
        bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise ArgumentError(f"{argument} ({value!r}) must be a number {bounds}")
    if not math.isfinite(number):
        raise ArgumentError(f"{argument} ({value!r}) must be finite; pass a finite number")
    return number


# ---------------------------------------------------------------- values that were read


def read_count(value: Any, most: int = _MAX_COUNT) -> int:
    """Return `value`, which must be a whole number from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise DamageError(f"Corrupt data: {value!r} is not a whole number from 0 to {most}.")
    return value


def read_text(value: Any, pattern: re.Pattern[str]) -> str:
    """Return `value`, which must be text that matches `pattern`."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise DamageError(f"Corrupt data: invalid name {value!r}.")
    return value


_MALFORMED_ERRORS = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    zlib.error,
)


class refuse_malformed:  # noqa: N801  Used like a function. contextlib.contextmanager takes longer for every record.
    """Context manager that turns errors of decoding malformed data into a DamageError that names `subject`."""

    __slots__ = ("_subject",)

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, _MALFORMED_ERRORS) and not isinstance(error, HoldallError):
            raise DamageError(
                f"{self._subject} makes no sense ({type(error).__name__}: {error}); nothing of it is used"
            ) from error

"""Quantities that users write, and what is read of files: bytes, counts, names.

In:  what a user passed, or JSON that was read.  Out: a checked value, or an error that names the argument, its value
and what holds; of a file, a `DamageError`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from holdall.errors import ArgumentError, DamageError, HoldallError

_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TENTH, _MINUTE, _HOUR, _DAY = 0.1, 60, 3600, 86400
_MOST_COUNT = 2**62
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """Write a number of bytes with a binary unit: `16.0 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Write a count with its noun: `1 thread`, `4 processes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Write a time: `60 ms`, `45 s`, `12 min`, `3 h 20 min`."""
    if 0 < seconds < _TENTH:
        return f"{1000 * seconds:.3g} ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g} s"
    if seconds < _HOUR:
        whole, rest = divmod(round(seconds), _MINUTE)
        return f"{whole} min {rest} s" if rest and whole < 10 else f"{seconds / _MINUTE:.0f} min"
    if seconds < _DAY:
        whole, rest = divmod(round(seconds / _MINUTE), 60)
        return f"{whole} h {rest} min" if rest else f"{whole} h"
    whole, rest = divmod(round(seconds / _HOUR), 24)
    return f"{whole} d {rest} h" if rest else f"{whole} d"


def parse_bytes(size: Any, argument: str = "size") -> int:
    """Read a size: a whole number of bytes, or text such as `"8GiB"`, `"500 MB"`, `"1.5gib"`.

    Units are as written: GB is 10^9 bytes, GiB is 2^30. A bare "8G" is refused, since people mean either by it.
    """
    if type(size) is not bool and isinstance(size, Integral) and int(size) >= 0:
        return int(size)
    if isinstance(size, str) and (found := _SIZE.fullmatch(size)):
        number, unit = found.groups()
        if unit.lower() in _FACTORS:
            return int(float(number) * _FACTORS[unit.lower()])
    raise ArgumentError(
        f"{argument} ({size!r}) is no size; write bytes as a whole number, or with a unit of kB, MB, GB, TB, "
        'KiB, MiB, GiB or TiB, as in "8GiB"'
    )


def require_count(argument: str, value: Any, least: int = 1, reason: str = "") -> int:
    """Return `value` as a whole number of at least `least`, or say why it is not one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ArgumentError(f"{argument} ({value!r}) must be a whole number of at least {least}{reason}; pass one")
    return int(value)


def whole(value: Any) -> Any:
    """Return a float that is a whole number, such as 1e6, as that number; all else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def require_flag(argument: str, value: Any) -> bool:
    """Return `value` if it is True or False, or say that it is not."""
    if isinstance(value, bool) or type(value).__name__ in {"bool", "bool_"}:  # Python's, and NumPy's without loading it
        return bool(value)
    raise ArgumentError(f"{argument} ({value!r}) must be True or False; pass one of them")


def require_path(argument: str, value: Any) -> str:
    """Return a path or a url as text, or say that it is none."""
    try:
        path = os.fspath(value)
    except TypeError:
        path = b""
    if isinstance(path, bytes):
        raise ArgumentError(f"{argument} ({value!r}) is no path; pass text or a pathlib.Path")
    return str(path)


def require_share(argument: str, value: Any) -> None:
    """Refuse what is no number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ArgumentError(f"{argument} ({value!r}) must be a number from 0 to 1; pass one")


def require_choice(argument: str, value: Any, choices: Collection[str]) -> None:
    """Refuse an argument that is none of the words that it may be."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{argument} ({value!r}) must be one of {', '.join(choices)}; pass one of these")


def require_number(argument: str, value: Any, least: float, most: float = math.inf) -> float:
    """Return `value` as a finite number within bounds, or say why it is not one."""
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        bounds = f"from {least:g} to {most:g}" if math.isfinite(most) else f"of at least {least:g}"
        raise ArgumentError(f"{argument} ({value!r}) must be a number {bounds}; pass one")
    if not math.isfinite(value):
        raise ArgumentError(f"{argument} ({value!r}) must be finite; pass a finite number")
    return float(value)


# ---------------------------------------------------------------- what was read


def count_of(value: Any, most: int = _MOST_COUNT) -> int:
    """Return a whole number from 0 to `most` that was read, or refuse it."""
    if type(value) is not int or not 0 <= value <= most:
        raise DamageError(f"{value!r} is no count up to {most}; nothing of it is used")
    return value


def text_of(value: Any, pattern: re.Pattern[str]) -> str:
    """Return text that was read and has the right form, or refuse it."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise DamageError(f"{value!r} is no name here; nothing of it is used")
    return value


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError)


class malformed_refused:  # noqa: N801  entered for every record, at a quarter of the cost of a generator
    """Turn the errors that malformed JSON leads to into a DamageError that names what was read."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if isinstance(error, _MALFORMED) and not isinstance(error, HoldallError):
            said = f"{self._what} makes no sense ({type(error).__name__}: {error}); nothing of it is used"
            raise DamageError(said) from error

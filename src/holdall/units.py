"""Bytes, counts and times as text, and sizes that users write.

This module does not import NumPy, so that commands start fast.
"""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any

from holdall.errors import ArgumentError

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TENTH = 0.1
_MINUTE = 60
_HOUR = 3600
_DAY = 86400
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit: `16.0 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 thread`, `4 processes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Return a time with its unit: `60 ms`, `45 s`, `12 min`, `3 h 20 min`."""
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
    """Return the bytes of a size: a whole number of bytes, or text such as `"8GiB"`, `"500 MB"`, `"1.5gib"`.

    GB is 10^9 bytes, and GiB is 2^30 bytes. "8G" is refused, because it could mean either of them.
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

"""Conversion of sizes, counts and times to text, and of text to sizes.

This module does not import NumPy, because commands import it and should start fast.
"""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any

from holdall.errors import ArgumentError

_BYTES_BY_UNIT = {
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
_MAX_MILLISECONDS_S = 0.1
"""Shorter times are written in milliseconds."""
_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary unit: `16.0 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def count_noun(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 thread`, `4 processes`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Return a time: `60 ms`, `45 s`, `12 min`, `3 h 20 min`."""
    if 0 < seconds < _MAX_MILLISECONDS_S:
        return f"{1000 * seconds:.3g} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.3g} s"
    if seconds < _HOUR_S:
        whole, rest = divmod(round(seconds), _MINUTE_S)
        return f"{whole} min {rest} s" if rest and whole < 10 else f"{seconds / _MINUTE_S:.0f} min"
    if seconds < _DAY_S:
        whole, rest = divmod(round(seconds / _MINUTE_S), 60)
        return f"{whole} h {rest} min" if rest else f"{whole} h"
    whole, rest = divmod(round(seconds / _HOUR_S), 24)
    return f"{whole} d {rest} h" if rest else f"{whole} d"


def parse_bytes(size: Any, argument: str = "size") -> int:
    """Return a size in bytes, given as a whole number, or as text such as `"8GiB"`, `"500 MB"`, `"1.5gib"`.

    GB is 10^9 bytes, GiB is 2^30. "8G" is refused, because it may mean either.
    """
    if type(size) is not bool and isinstance(size, Integral) and int(size) >= 0:
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None:
        number, unit = match.groups()
        if unit.lower() in _BYTES_BY_UNIT:
            return int(float(number) * _BYTES_BY_UNIT[unit.lower()])
    raise ArgumentError(
        f"{argument} ({size!r}) is not a size. Pass a whole number of bytes, or text with a unit of kB, MB, GB, TB, "
        'KiB, MiB, GiB or TiB, as in "8GiB".'
    )

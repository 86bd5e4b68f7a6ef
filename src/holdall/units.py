"""Quantities as people write and read them: bytes, counts, times.

In:  numbers, or a size as text.  Out: text; a size in bytes, or an error that says how to write one.
Nothing here loads NumPy: commands begin fast.
"""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any

from holdall.errors import ArgumentError

_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_TENTH, _MINUTE, _HOUR, _DAY = 0.1, 60, 3600, 86400
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

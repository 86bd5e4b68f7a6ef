"""Scales: where a value lies, and the round values that are written beside an axis.

In:  the largest value and its unit.  Out: ticks, and text of any value.
Invariant: a scale starts at zero, and its end is at or above the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from holdall.units import format_bytes

_STEPS = (1, 2, 2.5, 5, 10)
_BINARY_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SECONDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_SMALLEST = 1e-6
_TENTH, _MINUTE, _HOUR, _DAY = 0.1, 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from zero."""

    end: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    unit: str  # as the page's script knows it, if it writes values: bytes or number

    def share(self, value: float) -> float:
        """Say where a value lies, from 0 to 1; what is beyond the end lies at the end."""
        return min(max(value / self.end, 0.0), 1.0)


def bytes_scale(largest: float, ticks: int = 5) -> Scale:
    """Make an axis of bytes, with round values in binary units."""
    largest = max(largest, 1.0)
    unit = 1024.0 ** min(int(math.log(largest, 1024)), 4)
    steps = [step * unit * shift for shift in (1 / 1024, 1) for step in _BINARY_STEPS]
    steps += [2.0**power for power in range(41, 63)]
    return _scale(largest, ticks, steps, _round_bytes, "bytes", tight=True)


def number_scale(largest: float, ticks: int = 5) -> Scale:
    """Make an axis of plain numbers."""
    largest = max(largest, _SMALLEST) if largest else 1.0
    power = 10.0 ** math.floor(math.log10(largest))
    steps = [step * power * shift for shift in (0.01, 0.1, 1) for step in _STEPS]
    return _scale(largest, ticks, steps, number, "number", tight=True)


def seconds_scale(largest: float, ticks: int = 8) -> Scale:
    """Make an axis of time that ends where the data end."""
    largest = max(largest, _SMALLEST) if largest else 1.0
    days = [float(_DAY * 2**power) for power in range(1, 12)]
    return _scale(largest, ticks, [*_SECONDS, *days], duration, "seconds", tight=False)


def _scale(
    largest: float, ticks: int, steps: list[float], text: Callable[[float], str], unit: str, *, tight: bool
) -> Scale:
    step = next((step for step in steps if largest / step <= ticks), largest / ticks)
    count = math.ceil(largest / step - 1e-9) if tight else math.floor(largest / step + 1e-9)
    end = count * step if tight else largest
    return Scale(end, tuple(position * step for position in range(count + 1)), text, unit)


def number(value: float) -> str:
    """Write a number with as many digits as are of use."""
    value = float(value)
    if value.is_integer() or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.3g}"


def duration(seconds: float) -> str:
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


def _round_bytes(value: float) -> str:
    text = format_bytes(value)
    return text.replace(".0 ", " ") if value else "0"

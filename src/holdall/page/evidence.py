"""Evidence of verdicts in words.

In:  names and plain values, as `holdall watch` records them.  Out: names and text; what is not known stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdall.page.scale import duration, number
from holdall.units import format_bytes

_SIZES = frozenset({
    "bytes", "final", "final_pss", "grown", "high", "left", "low", "resident", "retained", "stacks_resident",
    "stacks_virtual",
})  # fmt: skip
_RATES = frozenset({"slope", "low", "high"})
_COUNTS_WITH_A_BUFFER = frozenset({"left", "slope"})


def in_words(evidence: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield every piece of evidence in words."""
    values = dict(evidence)
    unit = values.get("unit")
    for name, value in evidence:
        if name != "unit" and value is not None:
            yield name.replace("_", " "), _text(name, value, unit, "buffer" in values)


def _text(name: str, value: Any, unit: Any, of_a_buffer: bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if isinstance(unit, str) and name in _RATES:
        return f"{format_bytes(value)} {unit}"
    if name == "fill":
        return f"{value:.0%}"
    if name == "seconds":
        return duration(value)
    if (name in _SIZES or name.endswith("_bytes")) and not (of_a_buffer and name in _COUNTS_WITH_A_BUFFER):
        return format_bytes(value)
    return number(value)

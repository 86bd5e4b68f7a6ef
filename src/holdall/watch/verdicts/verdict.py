"""One verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What readings mean."""

    name: str
    severity: Severity
    text: str
    remedy: str
    evidence: dict[str, Any] = field(default_factory=dict)

    def as_words(self, moment: float) -> dict[str, Any]:
        """Return plain numbers and text, as they are recorded."""
        return {"kind": "verdict", "time": moment, **asdict(self)}


def in_time(seconds: float) -> str:
    """Write a length of time: `2 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} days"

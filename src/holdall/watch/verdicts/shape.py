"""The shape of the curve: steady, or up and down."""

from __future__ import annotations

from itertools import pairwise

from holdall.units import format_bytes
from holdall.watch.history import History
from holdall.watch.verdicts.filling import fills
from holdall.watch.verdicts.verdict import Verdict

_FEWEST = 12
_STEADY = 0.02
_SWING = 0.10
_CROSSINGS = 6


def plateau(history: History) -> list[Verdict]:
    """Say that memory is steady, if the newest third of the history is."""
    recent = history.readings[-len(history.readings) // 3 :]
    levels = [reading.pss for reading in recent]
    if len(levels) < _FEWEST or max(levels) - min(levels) > _STEADY * max(levels) or fills(history):
        return []
    return [
        Verdict(
            name="plateau",
            severity="info",
            text=f"steady at {format_bytes(levels[-1])}, within {format_bytes(max(levels) - min(levels))}",
            remedy="nothing to do",
            evidence={"low": min(levels), "high": max(levels), "readings": len(levels)},
        )
    ]


def sawtooth(history: History) -> list[Verdict]:
    """Say that memory goes up and down, and in which phase it is highest."""
    recent = history.readings[-len(history.readings) // 2 :]
    levels = [reading.pss for reading in recent]
    if len(levels) < _FEWEST:
        return []
    low, high = min(levels), max(levels)
    above = [level > (low + high) / 2 for level in levels]
    crossings = sum(before != after for before, after in pairwise(above))
    if high - low < _SWING * high or crossings < _CROSSINGS:
        return []
    peak = max(recent, key=lambda reading: reading.pss)
    phase = f", highest in phase {peak.phase!r}" if peak.phase else ""
    return [
        Verdict(
            name="sawtooth",
            severity="info",
            text=f"up and down between {format_bytes(low)} and {format_bytes(high)}{phase}; the peak has to fit",
            remedy="a smaller batch or a shorter rollout lowers the peak; it is no leak",
            evidence={"low": low, "high": high, "crossings": crossings, "phase": peak.phase},
        )
    ]

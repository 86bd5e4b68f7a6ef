"""Verdicts: what readings mean, each with its evidence and a remedy; one kind a file."""

from __future__ import annotations

from holdall.watch.history import History
from holdall.watch.verdicts.filling import filling
from holdall.watch.verdicts.heap import retained_heap
from holdall.watch.verdicts.leak import leaks
from holdall.watch.verdicts.runout import running_out
from holdall.watch.verdicts.shape import plateau, sawtooth
from holdall.watch.verdicts.threads import too_many_threads
from holdall.watch.verdicts.verdict import Verdict

__all__ = ["Verdict", "verdicts_on"]


def verdicts_on(history: History) -> list[Verdict]:
    """Judge a process by its history, the gravest first."""
    if not history.readings:
        return []
    leaking = leaks(history)
    found = [
        *running_out(history, leaking),
        *(leak.verdict for leak in leaking),
        *filling(history),
        *retained_heap(history),
        *too_many_threads(history),
        *sawtooth(history),
        *([] if leaking else plateau(history)),
    ]
    return sorted(found, key=lambda verdict: ("error", "warning", "info").index(verdict.severity))

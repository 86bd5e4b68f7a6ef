"""Filling: buffers that grow because they are not full yet, when they will be, and what the process takes then."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from holdall.units import format_bytes
from holdall.watch.history import History, buffers_of
from holdall.watch.verdicts.verdict import Verdict, in_time

_FEWEST = 4
_FULL = 0.995


@dataclass(frozen=True, slots=True)
class Fill:
    """A buffer on its way."""

    name: str
    share: float
    resident: int
    slope: float  # bytes a step, or a second
    left: float  # steps, or seconds, until it is full

    @property
    def to_come(self) -> float:
        """Bytes that it will still take."""
        return self.slope * self.left


def fills(history: History) -> list[Fill]:
    """Return the buffers that only grow, and are not full."""
    readings = history.readings
    if len(readings) < _FEWEST:
        return []
    found = []
    for name, parts in buffers_of(history.newest).items():
        share = max((part.fill for part in parts if part.fill is not None), default=None)
        if share is None or share >= _FULL:
            continue
        past = [(reading, buffers_of(reading).get(name, [])) for reading in readings[len(readings) // 3 :]]
        known = [
            (history.place(reading), max(part.fill or 0.0 for part in held), sum(part.resident for part in held))
            for reading, held in past
            if held
        ]
        grows = all(after[1] >= before[1] for before, after in pairwise(known))
        if len(known) < _FEWEST or not grows or known[-1][1] <= known[0][1] or known[-1][0] <= known[0][0]:
            continue  # a rollout begins anew, again and again: that is no filling
        distance = known[-1][0] - known[0][0]
        left = (1.0 - share) / ((known[-1][1] - known[0][1]) / distance)
        slope = max((known[-1][2] - known[0][2]) / distance, 0.0)
        found.append(Fill(name, share, known[-1][2], slope, left))
    return found


def filling(history: History) -> list[Verdict]:
    """Say which buffers fill, until when, and up to what."""
    verdicts = []
    newest = history.newest
    rate = (newest.steps_per_second or 0.0) if history.counts_steps else 1.0
    for fill in fills(history):
        end = f" at step {history.place(newest) + fill.left:,.0f}" if history.counts_steps else ""
        when = f", in {in_time(fill.left / rate)}" if rate > 0 else ""
        verdicts.append(
            Verdict(
                name="filling",
                severity="info",
                text=(
                    f"{fill.name} is {100 * fill.share:.0f} % full and takes {format_bytes(fill.resident)}; full{end}"
                    f"{when}, with {format_bytes(fill.resident + fill.to_come)}; the whole then takes "
                    f"{format_bytes(newest.pss + fill.to_come)}"
                ),
                remedy="nothing to do: this growth ends when the buffer is full",
                evidence={
                    "buffer": fill.name, "fill": fill.share, "resident": fill.resident, "slope": fill.slope,
                    "left": fill.left, "final": fill.resident + fill.to_come, "final_pss": newest.pss + fill.to_come,
                },
            )
        )  # fmt: skip
    return verdicts

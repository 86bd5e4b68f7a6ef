"""The history of a watch: as many readings as verdicts need, and never more.

In:  readings.  Out: series of them.
Invariant: the number of readings is bounded. When there are too many, every other one of the older half goes, so that a
day is remembered as well as a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from holdall.watch.reading import Part, Reading

_MOST = 720

ItemT = TypeVar("ItemT")


class Live(NamedTuple):
    """What live objects took at one moment, as the process's own allocators say; told more often than it is read."""

    time: float
    step: int | None
    phase: str | None
    heap: int  # of all kinds, without named buffers
    python: int  # of that, Python's objects of up to 512 bytes


class History:
    """Readings, and what was told between them, in order of time."""

    def __init__(self, most: int = _MOST) -> None:
        self.readings: list[Reading] = []
        self.live: list[Live] = []
        self._most = most

    def add(self, reading: Reading) -> None:
        """Remember a reading."""
        self.readings = self._thinned([*self.readings, reading])

    def hear(self, live: Live) -> None:
        """Remember what the process said of its live objects."""
        self.live = self._thinned([*self.live, live])

    def _thinned(self, items: list[ItemT]) -> list[ItemT]:
        half = len(items) // 2
        return items if len(items) <= self._most else items[:half:2] + items[half:]

    @property
    def newest(self) -> Reading:
        """The last reading."""
        return self.readings[-1]

    @property
    def counts_steps(self) -> bool:
        """Whether the process tells its steps; time stands in for them otherwise."""
        return self.newest.step is not None

    def place(self, reading: Reading) -> float:
        """Return where a reading stands: its step, or its time."""
        return reading.time if not self.counts_steps else float(reading.step or 0)

    def series(
        self, value: Callable[[Reading], float | None], readings: list[Reading] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return places and values of the readings that have one."""
        found = [(self.place(one), value(one)) for one in (self.readings if readings is None else readings)]
        known = [(place, number) for place, number in found if number is not None]
        return [place for place, _ in known], [number for _, number in known]

    def same_phase(self) -> list[Reading]:
        """Return the readings that were taken in the phase that most were: what another phase takes is no trend."""
        common = _commonest([reading.phase for reading in self.readings])
        return [reading for reading in self.readings if reading.phase == common]

    def live_in_same_phase(self) -> list[Live]:
        """Return the same of what was told between readings."""
        common = _commonest([live.phase for live in self.live])
        return [live for live in self.live if live.phase == common]


def _commonest(phases: list[str | None]) -> str | None:
    return max(set(phases), key=phases.count, default=None)


def buffers_of(reading: Reading) -> dict[str, list[Part]]:
    """Return the buffers of a reading by what they are parts of: `replay.rewards` is of `replay`."""
    found: dict[str, list[Part]] = {}
    for part in reading.parts:
        if part.group == "buffers":
            found.setdefault(part.name.partition(".")[0], []).append(part)
    return found

"""The history of a watch: as many readings as verdicts need, and never more.

In:  readings.  Out: series of them.
Invariant: the number of readings is bounded. When there are too many, every other one of the older half goes, so that a
day is remembered as well as a minute.
"""

from __future__ import annotations

from collections.abc import Callable

from holdall.watch.reading import Part, Reading

_MOST = 720


class History:
    """Readings in order of time."""

    def __init__(self, most: int = _MOST) -> None:
        self.readings: list[Reading] = []
        self._most = most

    def add(self, reading: Reading) -> None:
        """Remember a reading."""
        self.readings.append(reading)
        if len(self.readings) > self._most:
            half = len(self.readings) // 2
            self.readings = self.readings[:half:2] + self.readings[half:]

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
        counts: dict[str | None, int] = {}
        for reading in self.readings:
            counts[reading.phase] = counts.get(reading.phase, 0) + 1
        common = max(counts, key=lambda phase: counts[phase], default=None)
        return [reading for reading in self.readings if reading.phase == common]


def buffers_of(reading: Reading) -> dict[str, list[Part]]:
    """Return the buffers of a reading by what they are parts of: `replay.rewards` is of `replay`."""
    found: dict[str, list[Part]] = {}
    for part in reading.parts:
        if part.group == "buffers":
            found.setdefault(part.name.partition(".")[0], []).append(part)
    return found

"""Readings: where the memory of a process tree is at one moment, and a bounded history of readings.

The parts of a reading add up to the proportional set size (PSS) of the tree, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

IMPORT_PHASE = "import"
"""Phase of a process without steps while its main thread imports a module."""
BYTES_PER_PYTHON_OBJECT = 94
"""Estimate of the memory of a small Python object. CPython 3.11 takes 101 bytes with NumPy alone, 95 with torch and 93
with Stable-Baselines3. A single kind of object takes 16 to 512 bytes."""
_MAX_READINGS = 720
_MIN_SECONDS = 60.0
"""A process that reports no steps is judged this many seconds after its last import."""


@dataclass(frozen=True, slots=True)
class AttributedPart:
    """A part of the memory, with its group and its name."""

    group: str
    name: str
    resident: int  # Share of the tree's proportional set size.
    allocated: int  # Bytes of addresses, touched or not.
    fill: float | None = None  # Fraction of the buffer that is filled, from 0 to 1.
    grows: bool = False  # Whether more is allocated as the buffer fills: holdall's memories.
    budget: int | None = None  # Bytes that the whole memory may hold in RAM.


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes on a GPU. None where a figure is unknown."""

    requested: int | None  # Requested by tensors.
    allocated: int | None  # Requests rounded up to blocks.
    reserved: int | None  # Taken by torch from the driver.
    fragmented: int | None  # Reserved and free, in pieces.
    other: int | None  # CUDA context and libraries of the process.
    limit: int | None  # Memory of the GPU.


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a process tree at one moment."""

    time: float
    pss: int
    peak: int  # Highest PSS of the tree at a reading, or of the process itself at any time if that is higher.
    parts: tuple[AttributedPart, ...]
    step: int | None = None
    goal: int | None = None  # Step at which the training ends.
    phase: str | None = None
    gpu: GpuMemory | None = None
    steps_per_second: float | None = None
    pressure: float | None = None  # Percentage of the last 10 s in which a process waited for memory.
    threads: int = 0
    torch_threads: int | None = None
    cores: int = 1
    headroom: dict[str, int] | None = None  # Bytes left, by limit.
    spilled: int = 0  # Bytes that memories moved to disk.
    disk_free: int | None = None  # Bytes left where memories spill to.
    exact: bool = True  # False where the system reports only sums.

    def of(self, group: str) -> int:
        """Return the resident bytes of a group."""
        return sum(part.resident for part in self.parts if part.group == group)

    @property
    def attributed(self) -> float:
        """Fraction of the memory that has a name."""
        return 1.0 - self.of("unattributed") / self.pss if self.pss else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the reading as plain data, as it is recorded."""
        return {"kind": "reading", **asdict(self), "attributed": round(self.attributed, 4)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MemoryReading:
        """Return the reading that `as_dict` wrote."""
        named = {name: values[name] for name in cls.__slots__}
        named["parts"] = tuple(AttributedPart(**part) for part in named["parts"])
        if named["gpu"] is not None:
            named["gpu"] = GpuMemory(**named["gpu"])
        return cls(**named)


class LiveObjects(NamedTuple):
    """Counts of live objects by the allocators of the process, at one moment."""

    time: float
    step: int | None
    phase: str | None
    heap: int  # Bytes in the heap of the C library, except named buffers.
    python: int  # Number of small Python objects.


ItemT = TypeVar("ItemT", MemoryReading, LiveObjects)


class ReadingHistory:
    """Readings, and counts of live objects between them, in order of time. At most `max_readings` of each are kept."""

    def __init__(self, max_readings: int = _MAX_READINGS) -> None:
        self.readings: list[MemoryReading] = []
        self.live: list[LiveObjects] = []
        self._max_readings = max_readings

    def add(self, reading: MemoryReading) -> None:
        """Append a reading."""
        self.readings = self._thin([*self.readings, reading])

    def add_live(self, live: LiveObjects) -> None:
        """Append a count of live objects."""
        self.live = self._thin([*self.live, live])

    def _thin(self, items: list[ItemT]) -> list[ItemT]:
        """Drop every other item of the older half if there are too many items."""
        if len(items) <= self._max_readings:
            return items
        half = len(items) // 2
        return items[:half:2] + items[half:]

    @property
    def newest(self) -> MemoryReading:
        """The last reading."""
        return self.readings[-1]

    @property
    def counts_steps(self) -> bool:
        """Whether the process reports its steps. If not, time is used as the position of a reading."""
        return self.newest.step is not None

    def get_position(self, item: MemoryReading | LiveObjects) -> float:
        """Return the step of an item, or its time if the process reports no steps."""
        return float(item.step or 0) if self.counts_steps else item.time

    def select_training(self, items: list[ItemT]) -> list[ItemT]:
        """Return the items after the first step, or after the last import, that are in the most frequent phase.

        Before its first step, a process imports modules and allocates objects that it keeps. Phases need different
        amounts of memory.
        """
        if self.counts_steps:
            later = [item for item in items if item.step]
        else:
            imports = [index for index, item in enumerate(items) if item.phase == IMPORT_PHASE]
            later = items[max(imports, default=-1) + 1 :]
            if not later or later[-1].time - later[0].time < _MIN_SECONDS:
                return []
        phases = [item.phase for item in later]
        common_phase = max(set(phases), key=phases.count, default=None)
        return [item for item in later if item.phase == common_phase]

    def collect_series(
        self, value: Callable[[MemoryReading], float | None], readings: list[MemoryReading] | None = None
    ) -> tuple[list[float], list[float]]:
        """Return positions and values of the readings for which `value` is known."""
        positions: list[float] = []
        values: list[float] = []
        for reading in self.readings if readings is None else readings:
            number = value(reading)
            if number is not None:
                positions.append(self.get_position(reading))
                values.append(number)
        return positions, values

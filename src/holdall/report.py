"""Where the bytes of a memory are.

In:  counts that the stages keep.  Out: a record per field and their sums, for people and JSON.
Invariant: bytes are those of pages in use, counted by what was written; reserved address space
that was never touched is not counted. USS from the operating system is the judge in tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from holdall.units import format_bytes


def field_name(prefix: str, leaf: str) -> str:
    """Name a leaf of a space for people, by what it is part of and its own name there."""
    return f"{prefix}.{leaf}" if leaf else prefix


@dataclass(frozen=True, slots=True)
class FieldReport:
    """One field: its bytes by kind, and what was found about it."""

    name: str
    slice_bytes: int  # unique slices in memory, raw or sealed
    log_bytes: int  # logs of slice numbers and cursors into them
    row_bytes: int  # rows of flat rings
    plain_bytes: int  # what the plain layout takes for the same transitions
    finding: str
    sealed_bytes: int = 0  # of slice_bytes: compressed, or the index of what lies on disk
    disk_bytes: int = 0  # on disk, besides the bytes in memory

    @property
    def total_bytes(self) -> int:
        """Bytes in memory, of all kinds."""
        return self.slice_bytes + self.log_bytes + self.row_bytes

    def plus(self, before: FieldReport) -> FieldReport:
        """Add the same field of another memory, whose words stay."""
        added = {
            name: value + getattr(self, name) for name, value in asdict(before).items() if not isinstance(value, str)
        }
        return replace(before, **added)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All fields of a memory, and what is held besides them."""

    transitions: int
    fields: tuple[FieldReport, ...]
    staging_bytes: int  # memory of batches, kept for the next ones
    segments: int
    backlog: int = 0  # blocks that wait to be compressed or spilled, or are being
    # What went wrong when a block was compressed or spilled last; it then stays as it is. Also while transitions are
    # missing that were dropped for it.
    failure: str = ""
    budget_bytes: int | None = None  # the limit over everything, if one was named
    capacity_that_fits: int | None = None  # transitions that the limit holds, if fewer than asked for
    dropped_early: int = 0  # transitions that left before the capacity was reached, in all
    drop_reason: str = ""  # why the newest of them did, and what to do about it

    @classmethod
    def added_up(cls, parts: Collection[MemoryReport], staging_bytes: int = 0) -> MemoryReport:
        """Add up what some memories hold, such as the shards of one; words are those of the first that has any.

        Args:
            staging_bytes: Beside theirs.
        """
        fields: dict[str, FieldReport] = {}
        for field in (field for part in parts for field in part.fields):
            fields[field.name] = field.plus(fields[field.name]) if field.name in fields else field
        return cls(
            sum(part.transitions for part in parts), tuple(fields.values()),
            staging_bytes + sum(part.staging_bytes for part in parts), sum(part.segments for part in parts),
            sum(part.backlog for part in parts), next((part.failure for part in parts if part.failure), ""),
            dropped_early=sum(part.dropped_early for part in parts),
            drop_reason=next((part.drop_reason for part in parts if part.drop_reason), ""),
        )  # fmt: skip

    @property
    def total_bytes(self) -> int:
        """Bytes of all fields in memory."""
        return sum(field.total_bytes for field in self.fields)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk."""
        return sum(field.disk_bytes for field in self.fields)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the same transitions as plain arrays of obs and next_obs."""
        return sum(field.plain_bytes for field in self.fields)

    @property
    def bytes_per_transition(self) -> float:
        """Bytes of all fields over the transitions held; nan if there are none."""
        return self.total_bytes / self.transitions if self.transitions else float("nan")

    @property
    def ratio(self) -> float:
        """How many times smaller than the plain layout; nan if nothing is held."""
        return self.plain_bytes / self.total_bytes if self.total_bytes else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, ready for JSON."""
        sums = {
            "total_bytes": self.total_bytes,
            "disk_bytes": self.disk_bytes,
            "plain_bytes": self.plain_bytes,
            "bytes_per_transition": self.bytes_per_transition if self.transitions else None,
            "ratio": self.ratio if self.total_bytes else None,
        }
        return asdict(self) | sums

    def __str__(self) -> str:
        width = max((len(field.name) for field in self.fields), default=5)
        lines = [
            f"{field.name:<{width}}  {format_bytes(field.total_bytes):>10}"
            f"  of {format_bytes(field.plain_bytes):>10} plain  {field.finding}"
            for field in self.fields
        ]
        lines.append(
            f"{'total':<{width}}  {format_bytes(self.total_bytes):>10}"
            f"  of {format_bytes(self.plain_bytes):>10} plain  "
            f"{self.transitions} transitions" + (f", {self.ratio:.1f} times smaller" if self.transitions else "")
        )
        if self.disk_bytes:
            lines.append(f"{format_bytes(self.disk_bytes)} more on disk")
        if self.backlog:
            lines.append(f"{self.backlog} blocks wait to be compressed or spilled")
        if self.capacity_that_fits is not None and self.budget_bytes is not None:
            lines.append(
                f"the budget of {format_bytes(self.budget_bytes)} holds about {self.capacity_that_fits} transitions; "
                "from then on the oldest leave early"
            )
        if self.dropped_early:
            lines.append(f"{self.dropped_early} transitions were dropped early: {self.drop_reason}")
        elif self.failure:
            lines.append(f"the worker failed last with {self.failure}; what it concerns stays as it is")
        return "\n".join(lines)


PressureCheck = Callable[[int], bool]
"""Gets the bytes by which a memory grew. If it returns True, RAM is short, and the thread that adds waits until the
memory has compressed and spilled what it was asked to."""


class Tracked(Protocol):
    """A memory, as a watch and a fork see it."""

    def after_fork(self) -> None:
        """Close the memory. Called in a forked child, by its only thread."""

    @property
    def fill(self) -> float:
        """Fraction of the capacity that is filled, from 0 to 1."""
        ...

    def report(self) -> MemoryReport:
        """Account for the bytes held, field by field. Raise ClosedError after `close`."""

    def set_pressure_check(self, check: PressureCheck | None) -> None:
        """Call `check` each time the memory grew by a segment."""


LIVING: weakref.WeakSet[Tracked] = weakref.WeakSet()
"""The memories of this process. Each adds itself with `register`, and is removed when it is freed."""
_pressure_check: PressureCheck | None = None


def register(memory: Tracked) -> None:
    """Add a new memory to `LIVING`, and give it the pressure check of this process."""
    LIVING.add(memory)
    memory.set_pressure_check(_pressure_check)


def set_pressure_check(check: PressureCheck | None) -> None:
    """Give `check` to every memory of this process, and to every later one, in place of the one before."""
    global _pressure_check  # noqa: PLW0603  A process has one limit on its RAM, so it has one check.
    _pressure_check = check
    for memory in list(LIVING):
        memory.set_pressure_check(check)


def clear_pressure_check(check: PressureCheck) -> None:
    """Remove `check`. Do nothing if another check is in its place."""
    if _pressure_check == check:
        set_pressure_check(None)

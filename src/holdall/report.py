"""Where the bytes of a memory are: one record per field, and their sums.

Only bytes that were written count, and not address space that is only reserved. Tests compare the counts with the
process's unique memory (USS) that the operating system measures.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdall.units import format_bytes


def field_name(prefix: str, leaf: str) -> str:
    """Return the name of a leaf in reports, such as `obs.image`. `prefix` is the part of the transition."""
    return f"{prefix}.{leaf}" if leaf else prefix


@dataclass(frozen=True, slots=True)
class FieldReport:
    """The bytes of one field by kind, and how the field is stored.

    Examples:
        >>> [field.name for field in memory.report().fields]
        ['obs', 'action', 'reward', 'flags']
    """

    name: str
    slice_bytes: int  # Unique slices in memory, raw or compressed.
    log_bytes: int  # Logs of slice numbers, and cursors into them.
    row_bytes: int  # Rows of fields, or of parts of them, that are stored without slices.
    plain_bytes: int  # Bytes of the same transitions in plain arrays.
    finding: str  # How the field is stored.
    compressed_bytes: int = 0  # Part of `slice_bytes`: compressed slices, and the index of slices on disk.
    disk_bytes: int = 0  # Slices on disk, in `spill_dir` or in the files of a checkpoint.

    @property
    def total_bytes(self) -> int:
        """Bytes in memory, of all kinds."""
        return self.slice_bytes + self.log_bytes + self.row_bytes

    def plus(self, before: FieldReport) -> FieldReport:
        """Return the sums of this field and of the same field in another memory, with the texts of `before`."""
        sums = {
            name: value + getattr(self, name) for name, value in asdict(before).items() if not isinstance(value, str)
        }
        return replace(before, **sums)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The bytes of all fields of a memory, and what it dropped.

    Examples:
        >>> report = memory.report()
        >>> report.transitions, report.dropped_early
        (100, 0)
    """

    transitions: int
    fields: tuple[FieldReport, ...]
    staging_bytes: int  # Memory of freed batches that is kept for the next ones.
    segments: int
    backlog: int = 0  # Blocks that are to be compressed or moved to disk.
    # Why the last block could not be compressed or moved to disk. With a disk tier, this is also the reason of early
    # drops, until enough newer transitions are held to fill the capacity.
    failure: str = ""
    budget_bytes: int | None = None  # The hard limit. None without one.
    capacity_that_fits: int | None = None  # Transitions that the limit holds. None: the whole capacity, or not known.
    dropped_early: int = 0  # Number of transitions that were ever evicted before the capacity was reached.
    drop_reason: str = ""  # Why the last early drop happened, and what to do.

    @classmethod
    def added_up(cls, parts: Collection[MemoryReport], staging_bytes: int = 0) -> MemoryReport:
        """Return the sums of several memories, such as shards. Texts are those of the first memory that has any.

        Args:
            staging_bytes: Memory of freed batches in addition to that of the memories.
        """
        fields: dict[str, FieldReport] = {}
        for part in parts:
            for field in part.fields:
                fields[field.name] = field.plus(fields[field.name]) if field.name in fields else field
        return cls(
            transitions=sum(part.transitions for part in parts),
            fields=tuple(fields.values()),
            staging_bytes=staging_bytes + sum(part.staging_bytes for part in parts),
            segments=sum(part.segments for part in parts),
            backlog=sum(part.backlog for part in parts),
            failure=next((part.failure for part in parts if part.failure), ""),
            dropped_early=sum(part.dropped_early for part in parts),
            drop_reason=next((part.drop_reason for part in parts if part.drop_reason), ""),
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all fields in memory."""
        return sum(field.total_bytes for field in self.fields)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all fields on disk: in `spill_dir`, and in the files of the checkpoint that was loaded."""
        return sum(field.disk_bytes for field in self.fields)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the same transitions as plain arrays of obs and next_obs."""
        return sum(field.plain_bytes for field in self.fields)

    @property
    def bytes_per_transition(self) -> float:
        """Bytes of all fields in memory divided by the number of transitions. NaN for an empty memory."""
        return self.total_bytes / self.transitions if self.transitions else float("nan")

    @property
    def ratio(self) -> float:
        """Bytes of plain arrays divided by the bytes in memory and on disk. NaN for an empty memory."""
        held_bytes = self.total_bytes + self.disk_bytes
        return self.plain_bytes / held_bytes if held_bytes else float("nan")

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, ready for JSON."""
        sums = {
            "total_bytes": self.total_bytes,
            "disk_bytes": self.disk_bytes,
            "plain_bytes": self.plain_bytes,
            "bytes_per_transition": self.bytes_per_transition if self.transitions else None,
            "ratio": None if math.isnan(self.ratio) else self.ratio,
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
            f"{self.transitions} transitions{self._describe_ratio()}"
        )
        if self.backlog:
            lines.append(f"{self.backlog} blocks are still to be compressed or moved to disk")
        if self.capacity_that_fits is not None and self.budget_bytes is not None:
            lines.append(
                f"the budget of {format_bytes(self.budget_bytes)} holds about {self.capacity_that_fits} transitions; "
                "older ones are dropped early"
            )
        if self.dropped_early:
            lines.append(f"{self.dropped_early} transitions were dropped early: {self.drop_reason}")
        elif self.failure:
            lines.append(f"the last failure: {self.failure}")
        return "\n".join(lines)

    def _describe_ratio(self) -> str:
        """Return the ratio and the bytes on disk as the end of a sentence. Empty for an empty memory."""
        if not self.transitions:
            return ""
        on_disk = f" with {format_bytes(self.disk_bytes)} more on disk" if self.disk_bytes else ""
        return f", {self.ratio:.1f} times smaller{on_disk}"

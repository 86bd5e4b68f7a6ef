"""One reading: where the memory of a process tree is, at one moment.

Invariant: the parts add up to the tree's proportional set size, to the byte. What has no name is a part, too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

GROUPS = (
    "buffers", "torch", "python", "heap_retained", "stacks", "libraries", "shared", "workers", "other", "unattributed",
)  # fmt: skip
"""In the order in which they are stacked, shown and recorded."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some memory that has a name."""

    group: str
    name: str
    resident: int  # its share of the tree's proportional set size
    allocated: int  # addresses, touched or not
    fill: float | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """What is held on a GPU; None where nobody says."""

    requested: int | None  # by tensors
    allocated: int | None  # rounded up to blocks
    reserved: int | None  # by torch, from the driver
    fragmented: int | None  # reserved, free, and in pieces
    other: int | None  # of this process, but not torch's: the context, libraries
    limit: int | None


@dataclass(frozen=True, slots=True)
class Reading:
    """A process tree, at one moment."""

    time: float
    pss: int
    peak: int  # most that the process itself had resident
    parts: tuple[Part, ...]
    step: int | None = None
    goal: int | None = None
    phase: str | None = None
    gpu: Gpu | None = None
    steps_per_second: float | None = None
    pressure: float | None = None  # share of the last 10 s in which something waited for memory, in per cent
    threads: int = 0
    torch_threads: int | None = None
    cores: int = 1
    page_cache: int | None = None  # of the control group
    headroom: dict[str, int] | None = None  # bytes left, by what limits them
    spilled: int = 0  # bytes on disk
    disk_free: int | None = None  # where these are
    exact: bool = True  # False where the system tells only sums

    def of(self, group: str) -> int:
        """Return what one group takes."""
        return sum(part.resident for part in self.parts if part.group == group)

    @property
    def attributed(self) -> float:
        """Share of the memory that has a name."""
        return 1.0 - self.of("unattributed") / self.pss if self.pss else 1.0

    def as_words(self) -> dict[str, Any]:
        """Return plain numbers and text, as they are recorded."""
        return {"kind": "reading", **asdict(self), "attributed": round(self.attributed, 4)}

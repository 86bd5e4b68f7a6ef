"""Does it fit: phases against limits.

In:  what a run needs, by phase, and what this machine has left.  Out: fits, tight or does not fit, and of what.
Invariant: "fits" is said only if the upper bound of the largest phase is below the smallest limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from holdall.machine import Limit
from holdall.plan.experience import Experience
from holdall.plan.phases import (
    Measured,
    Phase,
    checkpoint_bytes,
    host_phases,
    shared_bytes,
    vram_phases,
)
from holdall.plan.spec import Spec


class Verdict(Enum):
    """Whether a run fits; the value is the command's exit code."""

    FITS = 0
    TIGHT = 1
    DOES_NOT_FIT = 2

    def __str__(self) -> str:
        return {0: "fits", 1: "tight", 2: "does not fit"}[self.value]


@dataclass(frozen=True, slots=True)
class Room:
    """What there is to fit into."""

    memory: tuple[Limit, ...]  # the smallest first
    vram: Limit | None = None
    disk: Limit | None = None
    shared_memory: Limit | None = None
    largest_mapping: int | None = None

    @property
    def limit_bytes(self) -> int:
        """Host memory that the run may take."""
        return self.memory[0].free_bytes


@dataclass(frozen=True, slots=True)
class Check:
    """One need against one limit."""

    what: str
    need_bytes: int
    most_bytes: int
    limit: Limit

    @property
    def verdict(self) -> Verdict:
        """Compare the two."""
        if self.need_bytes > self.limit.free_bytes:
            return Verdict.DOES_NOT_FIT
        return Verdict.FITS if self.most_bytes <= self.limit.free_bytes else Verdict.TIGHT


def largest(phases: Sequence[Phase]) -> Phase:
    """Return the phase that decides."""
    return max((phase for phase in phases if phase.happens), key=lambda phase: phase.most_bytes)


def checks(spec: Spec, measured: Measured, room: Room, holdall: Experience | None) -> list[Check]:
    """Compare every need of a run with what there is; `holdall`: its memory is used."""
    host = host_phases(spec, measured, holdall)
    need = max(phase.nbytes for phase in host if phase.happens)
    found = [Check(f"memory, {largest(host).name}", need, largest(host).most_bytes, room.memory[0])]
    if room.largest_mapping is not None and holdall is None:
        array = max(spec.layout().arrays, key=lambda array: array.nbytes)
        whole = Limit("memory and swap, for one array", room.largest_mapping, room.largest_mapping)
        found.append(Check(f"array {array.name}", array.nbytes, array.nbytes, whole))
    gpu = vram_phases(spec, measured)
    if gpu and room.vram is not None:
        most = largest(gpu)
        found.append(Check(f"GPU memory, {most.name}", most.nbytes, most.most_bytes, room.vram))
    if room.shared_memory is not None and (size := shared_bytes(spec)):
        found.append(Check("shared memory", size, size, room.shared_memory))
    if room.disk is not None and holdall is None and (size := checkpoint_bytes(spec, measured)):
        found.append(Check("one checkpoint", size, size, room.disk))
    return found


def verdict_of(spec: Spec, measured: Measured, room: Room, holdall: Experience | None) -> Verdict:
    """Return the worst of all checks."""
    return max((check.verdict for check in checks(spec, measured, room, holdall)), key=lambda verdict: verdict.value)

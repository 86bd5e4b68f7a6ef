"""Will it fit: the plan of the demo's own training under a limit, with either buffer.

In:  how many transitions, and a limit.  Out: what a run needs with each buffer, and the plan's verdict on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdall.demo.camera import CameraRover
from holdall.plan.planned import make_plan
from holdall.plan.spec import Spec
from holdall.plan.verdict import largest


@dataclass(frozen=True, slots=True)
class Fit:
    """What the plan says."""

    limit_bytes: int
    sb3_bytes: int
    sb3: str  # verdict
    holdall_bytes: int
    holdall: str

    def as_words(self) -> dict[str, Any]:
        """Return the rows of a table: buffer, need, verdict."""
        return {"sb3": (self.sb3_bytes, self.sb3), "holdall": (self.holdall_bytes, self.holdall)}


def fit(transitions: int, limit_bytes: int) -> Fit:
    """Plan the demo's training; its networks are a few kilobytes, and left out."""
    rover = CameraRover()
    spec = Spec("sac", rover.observation_space, rover.action_space, capacity=transitions, batch_size=32)
    plan = make_plan(spec, budget_bytes=limit_bytes, networks=False)
    return Fit(
        limit_bytes,
        largest(plan.phases).nbytes,
        str(plan.known.verdict(spec, holdall=False)),
        largest(plan.holdall_phases).nbytes,
        str(plan.known.verdict(spec, holdall=True)),
    )

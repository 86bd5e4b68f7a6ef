"""Will it fit: the plan's arithmetic over the demo's own training under a limit, with either buffer.

In:  how many transitions, and a limit; without one, a limit half-way between what the two buffers need.
Out: what a run needs with each buffer, and the plan's verdict on it.
The interpreter and the libraries are measured as they are after a first update; the demo's network, a few hundred
kilobytes, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdall.demo.camera import CameraRover
from holdall.machine import Limit
from holdall.plan.answers import Known, need_bytes
from holdall.plan.ask import ask
from holdall.plan.filling import from_spaces
from holdall.plan.phases import Measured
from holdall.plan.spec import Spec
from holdall.plan.verdict import Room

_ROUND_BYTES = 50 * 2**20


@dataclass(frozen=True, slots=True)
class Fit:
    """What the plan says."""

    limit_bytes: int
    sb3_bytes: int
    sb3: str  # verdict
    holdall_bytes: int
    holdall: str

    def rows(self) -> dict[str, tuple[int, str]]:
        """Return need and verdict by buffer."""
        return {"sb3": (self.sb3_bytes, self.sb3), "holdall": (self.holdall_bytes, self.holdall)}


def fit(transitions: int, limit_bytes: int | None) -> Fit:
    """Plan the demo's training."""
    rover = CameraRover()
    spec = Spec("sac", rover.observation_space, rover.action_space, capacity=transitions, batch_size=32)
    base = ask("baseline", spec=spec, networks=True)
    measured = Measured(libraries=base["updated"], libraries_anonymous=base["imported_anonymous"])
    needs = [need_bytes(spec, _known(measured, spec, 0), holdall=holdall) for holdall in (False, True)]
    limit = sum(needs) // (2 * _ROUND_BYTES) * _ROUND_BYTES if limit_bytes is None else limit_bytes
    known = _known(measured, spec, limit)
    plain, own = (str(known.verdict(spec, holdall=holdall)) for holdall in (False, True))
    return Fit(limit, needs[0], plain, needs[1], own)


def _known(measured: Measured, spec: Spec, limit_bytes: int) -> Known:
    return Known(measured, Room((Limit("--limit", limit_bytes, limit_bytes),)), from_spaces(spec))

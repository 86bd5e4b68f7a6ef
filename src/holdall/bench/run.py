"""The whole bench: every profile, buffer and seed, each in a fresh process, turn by turn.

In:  settings, what calibration found, and runs that are done already.  Out: runs, one by one, and the rankings.
Invariant: a run that fails or is stopped is a record, too; Ctrl-C keeps what is done.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdall.bench.calibrate import Calibration
from holdall.bench.child import ChildError
from holdall.bench.machine import machine, versions
from holdall.bench.result import FORMAT, Run
from holdall.bench.settings import Settings
from holdall.bench.task import Task, run_task

Tell = Callable[[str, float], None]
_PHASE_SHARES = {"construct": 0.0, "fill": 0.1, "train": 0.4, "save": 0.95}
"""Where a run is when a phase begins, roughly: for the bar alone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One run that is to be made."""

    profile: str
    buffer: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """What names it."""
        return self.profile, self.buffer, self.seed


def header(settings: Settings, calibration: Calibration, seconds: float) -> dict[str, Any]:
    """Describe what is measured, where, and how long it was said to take."""
    return {
        "kind": "header",
        "format": FORMAT,
        "command": sys.argv[1:],
        "machine": machine(),
        "versions": versions(),
        "env": settings.env,
        "algo": settings.algo,
        "limit": settings.limit_bytes,
        "announced_seconds": seconds,
        "settings": settings.as_dict(),
        "calibration": calibration.as_dict(),
    }


def turns(settings: Settings) -> list[Turn]:
    """Order the runs: whose turn comes first changes with every seed, so that no profile has the quiet hours."""
    found = []
    names = [(profile, buffer) for profile in settings.profiles for buffer in settings.buffers]
    for seed in range(settings.seeds):
        first = seed * max(len(names) // max(settings.seeds, 1), 1) % len(names)
        found += [Turn(profile, buffer, seed) for profile, buffer in names[first:] + names[:first]]
    return found


def announced(settings: Settings, calibration: Calibration, done: Sequence[Run] = ()) -> float:
    """Return the seconds that what is left is expected to take."""
    over = {run.key for run in done if run.status in {"done", "does not fit"}}
    return sum(_expected(turn, calibration) for turn in turns(settings) if turn.key not in over)


def benched(settings: Settings, calibration: Calibration, done: Sequence[Run], tell: Tell) -> Iterator[Run]:
    """Run what is left; yield every run as it ends.

    `tell` is told what is being run, and the seconds, of those announced, that are behind.
    """
    over = {run.key for run in done if run.status in {"done", "does not fit"}}
    behind = 0.0
    for turn in turns(settings):
        if turn.key in over:
            continue
        expected = _expected(turn, calibration)
        title = f"{turn.profile}, {turn.buffer}, seed {turn.seed}"
        yield _run(turn, settings, calibration, lambda share: tell(title, behind + share * expected))  # noqa: B023 used before the next turn
        behind += expected
        tell(title, behind)


def _run(turn: Turn, settings: Settings, calibration: Calibration, tell: Callable[[float], None]) -> Run:
    size = calibration.sizes[turn.profile]
    run = Run(turn.profile, turn.buffer, turn.seed, "does not fit", size.size, size.batch_size)
    if turn.buffer not in size.fits:
        why = f"{size.share:.0%} of the limit does not hold the process and one batch with this buffer"
        return _with(run, reason=why)
    task = Task(
        settings.env_id,
        settings.algo,
        turn.buffer,
        size.size,
        size.batch_size,
        settings.timesteps,
        turn.seed,
        settings.fills,
        settings.features,
        dict(settings.policy_kwargs),
        settings.threads,
    )
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        for message in run_task(task):
            found = message.get("result", found)
            if "phase" in message:
                tell(_share(message))
    except ChildError as error:
        return _with(run, status="failed", reason=str(error), seconds=time.perf_counter() - start)
    names = ("steps", "filled", "steps_per_second", "peaks", "bytes_per_transition", "rewards", "checkpoint")
    measured = {name: found[name] for name in names}
    return _with(run, status="done", seconds=time.perf_counter() - start, **measured)


def _with(run: Run, **changes: Any) -> Run:
    return Run.from_dict(run.as_dict() | changes)


def _share(message: dict[str, Any]) -> float:
    begin: float = _PHASE_SHARES[message["phase"]]
    end = min((share for share in _PHASE_SHARES.values() if share > begin), default=1.0)
    done: float = message["done"] / max(message["total"], 1)
    return begin + (end - begin) * min(done, 1.0)


def _expected(turn: Turn, calibration: Calibration) -> float:
    return calibration.seconds.get(f"{turn.profile}/{turn.buffer}", 0.0)

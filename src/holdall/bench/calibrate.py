"""Before a bench: short trials that say how large its profiles are and how long it takes.

In:  settings.  Out: every profile's sizes, by the plan's own arithmetic over what the trials measured; and for every
run the seconds that it is expected to take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from holdall.bench.settings import Settings
from holdall.bench.task import Task, run_task
from holdall.machine import Limit
from holdall.plan import spacetext
from holdall.plan.answers import PROFILES, Known, profiles
from holdall.plan.filling import from_spaces
from holdall.plan.phases import Measured
from holdall.plan.spec import Spec
from holdall.plan.verdict import Room

TRIED_SIZE = 1_000
_TRIED_STEPS = 120
_TRIED_ROLLOUT = 256


@dataclass(frozen=True, slots=True)
class Size:
    """What one profile comes to: the same for either buffer, so that the buffer is all that differs."""

    share: float
    limit_bytes: int
    batch_size: int
    size: int  # capacity of a replay buffer, or steps of a rollout; 0: nothing fits
    holdall_size: int | None  # what holdall's would hold in the same share
    fits: tuple[str, ...]  # buffers with which it fits


@dataclass(frozen=True, slots=True)
class Rates:
    """What one trial showed of how long things take."""

    start_s: float  # until the model is there, and after the end
    fill_per_second: float | None
    steps_per_second: float
    save_s_per_byte: float

    def seconds(self, size: Size, timesteps: int, bytes_each: float, *, fills: bool) -> float:
        """Work out what a run takes."""
        filling = size.size / self.fill_per_second if self.fill_per_second and fills else 0.0
        steps = timesteps if self.fill_per_second else -(-max(timesteps, size.size) // size.size) * size.size
        return self.start_s + filling + steps / self.steps_per_second + self.save_s_per_byte * size.size * bytes_each


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that was found out before."""

    sizes: dict[str, Size]
    seconds: dict[str, float]  # by "profile/buffer"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"sizes": {name: asdict(size) for name, size in self.sizes.items()}, "seconds": self.seconds}

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """Make it of what `as_dict` returned."""
        sizes = {name: Size(**{**size, "fits": tuple(size["fits"])}) for name, size in data["sizes"].items()}
        return cls(sizes, dict(data["seconds"]))


def calibrated(settings: Settings, tell: Callable[[str, float], None]) -> Calibration:
    """Try every batch size with every buffer, at a small size."""
    factors = {name: PROFILES[name][1] for name in settings.profiles}
    batches = sorted({settings.batch_size * factor for factor in factors.values()})
    trials: dict[tuple[int, str], dict[str, Any]] = {}
    wanted = [(batch, buffer) for batch in batches for buffer in settings.buffers]
    for number, (batch, buffer) in enumerate(wanted):
        tell(f"trial with {buffer}, batches of {batch}", number / len(wanted))
        trials[batch, buffer] = _trial(settings, batch, buffer)
    sizes = {}
    for name, factor in factors.items():
        batch = settings.batch_size * factor
        sizes[name] = _size(settings, name, batch, {buffer: trials[batch, buffer] for buffer in settings.buffers})
    seconds = {
        f"{name}/{buffer}": _rates(trials[size.batch_size, buffer]).seconds(
            size, settings.timesteps, trials[size.batch_size, buffer]["bytes_each"], fills=settings.fills
        )
        for name, size in sizes.items()
        for buffer in settings.buffers
        if buffer in size.fits
    }
    return Calibration(sizes, seconds)


def _trial(settings: Settings, batch: int, buffer: str) -> dict[str, Any]:
    size = _TRIED_ROLLOUT if settings.on_policy else max(TRIED_SIZE, 2 * batch)
    steps = 2 * size if settings.on_policy else _TRIED_STEPS
    task = Task(
        settings.env_id,
        settings.algo,
        buffer,
        size,
        batch,
        steps,
        0,
        True,
        settings.features,
        dict(settings.policy_kwargs),
        settings.threads,
    )
    start = time.perf_counter()
    found: dict[str, Any] = {}
    for message in run_task(task):
        found = message.get("result", found)
    found["size"] = size
    found["whole_seconds"] = time.perf_counter() - start
    found["bytes_each"] = found["checkpoint"]["bytes"] / size if not settings.on_policy else 0.0
    return found


def _rates(trial: dict[str, Any]) -> Rates:
    """Tell what grows with a run from what every run has: warming up and reading memory, too, which count once."""
    filled = trial["size"] / trial["fill_per_second"] if trial["fill_per_second"] else 0.0
    saved = trial["checkpoint"]
    known = filled + trial["steps"] / trial["steps_per_second"] + saved["seconds"]
    return Rates(
        start_s=trial["whole_seconds"] - known,
        fill_per_second=trial["fill_per_second"],
        steps_per_second=trial["steps_per_second"],
        save_s_per_byte=saved["seconds"] / max(saved["bytes"], 1),
    )


def _size(settings: Settings, name: str, batch: int, trials: dict[str, dict[str, Any]]) -> Size:
    """Ask the plan for what fits into a profile's share, over the memory that the trial showed."""
    trial = trials.get("sb3") or next(iter(trials.values()))
    spec = Spec(
        settings.algo,
        spacetext.restore(trial["observation"]),
        spacetext.restore(trial["action"]),
        batch_size=batch,
        n_steps=settings.batch_size if settings.on_policy else 0,
    )
    tried = spec.but(n_steps=trial["size"]) if settings.on_policy else spec.but(capacity=trial["size"])
    probe = {
        "constructed": trial["peaks"]["construct"],
        "trained": trial["peaks"]["train"],
        "buffer_bytes": tried.layout().resident_bytes(trial["size"]) if "sb3" in trials else 0,
        "processes": [],
    }
    room = Room((Limit("--limit", settings.limit_bytes, settings.limit_bytes),))
    known = Known(Measured(probe=probe), room, from_spaces(spec))
    found = next(profile for profile in profiles(spec, known) if profile.name == name)
    fits = tuple(
        buffer
        for buffer in settings.buffers
        if (found.sb3_size if buffer == "sb3" else found.holdall_size or 0) > batch
    )
    size = found.sb3_size if "sb3" in fits else (found.holdall_size or 0)
    return Size(found.share, found.limit_bytes, batch, size, found.holdall_size, fits)

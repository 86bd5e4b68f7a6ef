"""What a bench measures: environment, algorithm, profiles, seeds and buffers, under one memory limit.

A profile is a share of the limit. Short trials measure memory and speed first; from them follow the size of every
profile, by the same arithmetic as `holdall plan`, and the seconds that every run is expected to take.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdall.errors import ArgumentError
from holdall.machine import Limit, memory_limits
from holdall.tools.bench.child_process import OnProgress, Task, run_task
from holdall.tools.plan.environments import space_from_dict
from holdall.tools.plan.measure_memory import need_from_spaces
from holdall.tools.plan.phases import MachineLimits, MeasuredCosts, PlanInputs
from holdall.tools.plan.recommend import PROFILES, share_profiles
from holdall.tools.plan.spec import ALGORITHMS, Spec
from holdall.units import parse_bytes

ALGOS = ("sac", "td3", "dqn", "ppo")
BUFFERS = ("sb3", "holdall")
TRIAL_SIZE = 1_000
_TRIAL_STEPS = 120
_TRIAL_ROLLOUT = 256


SHIPPED_ENVS: dict[str, dict[str, Any]] = {
    "demo": {
        "env_id": "holdall.tools.demo.camera:CameraRover", "batch_size": 16, "limit": "2GiB", "timesteps": 400,
        "features": "holdall.tools.bench.training:CameraExtractor", "policy_kwargs": {"net_arch": [64, 64]},
        "threads": 1,  # more than one wait for each other longer than networks of this size take
    },
}  # fmt: skip
"""Environments that come with holdall, and the sizes at which a bench of them takes minutes."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Everything that decides what is run; what is left out takes its default."""

    env: str
    algo: str
    profiles: tuple[str, ...]
    timesteps: int
    seeds: int
    buffers: tuple[str, ...]
    limit_bytes: int
    batch_size: int
    fills: bool = True
    limit_said: str = ""  # where the limit comes from
    env_id: str = ""
    features: str = ""
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0  # of torch; 0: as many as it takes by itself

    @property
    def on_policy(self) -> bool:
        """Whether experience is used once and then dropped."""
        return ALGORITHMS[self.algo].on_policy

    def task(self, buffer: str, size: int, batch_size: int, timesteps: int, seed: int = 0, **changes: Any) -> Task:
        """Return what one process trains."""
        own = {name: getattr(self, name) for name in ("fills", "features", "threads", "policy_kwargs")}
        return Task(self.env_id, self.algo, buffer, size, batch_size, timesteps, seed, **own | changes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchSettings:
        """Make settings of what `asdict` returned."""
        return cls(**{**data, "profiles": tuple(data["profiles"]), "buffers": tuple(data["buffers"])})


def settings_of(
    env: str, algo: str, profiles: list[str], timesteps: int | None, seeds: int, buffers: list[str], limit: str | None,
    *,
    fills: bool = True, threads: int | None = None,
) -> BenchSettings:  # fmt: skip
    """Check what was asked for, and complete it."""
    names = list(PROFILES) if profiles == ["all"] else profiles
    _require("algo", [algo], ALGOS)
    _require("profiles", names, tuple(PROFILES))
    _require("buffers", buffers, BUFFERS)
    defaults = {"env_id": env, "batch_size": ALGORITHMS[algo].batch_size or 0, "limit": "machine", "timesteps": 5_000}
    chosen: dict[str, Any] = defaults | SHIPPED_ENVS.get(env, {})
    chosen |= {} if timesteps is None else {"timesteps": timesteps}
    chosen |= {} if threads is None else {"threads": threads}
    limit_bytes, source = _limit(limit, chosen.pop("limit"))
    return BenchSettings(
        env=env,
        algo=algo,
        profiles=tuple(dict.fromkeys(names)),
        seeds=seeds,
        buffers=tuple(dict.fromkeys(buffers)),
        limit_bytes=limit_bytes,
        limit_said=source,
        fills=fills,
        **chosen,
    )


def _limit(limit: str | None, usual: str) -> tuple[int, str]:
    here = memory_limits()[0]
    if (limit or usual) == "machine":
        return here.free_bytes, here.name
    if limit is None:
        return parse_bytes(usual), "scaled down so that this takes minutes; --limit machine for all there is"
    given = parse_bytes(limit, "limit")
    if given > here.free_bytes:
        raise ArgumentError(
            f"limit ({limit}) is more than the {here.free_bytes} bytes that are free ({here.name}); lower it, or write "
            "--limit machine"
        )
    return given, "--limit"


def _require(name: str, values: list[str], known: tuple[str, ...]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        raise ArgumentError(f"{name} ({', '.join(unknown) or None}) must be among {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class ProfileSize:
    """What one profile comes to: the same for either buffer, so that the buffer is all that differs."""

    share: float
    limit_bytes: int
    batch_size: int
    size: int  # capacity of a replay buffer, or steps of a rollout; 0: nothing fits
    holdall_size: int | None  # what holdall's would hold in the same share
    fits: tuple[str, ...]  # buffers with which it fits


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """What one trial showed of how long things take."""

    start_s: float  # until the model is there, and after the end
    fill_per_second: float | None
    steps_per_second: float
    save_s_per_byte: float

    def seconds(self, size: ProfileSize, timesteps: int, bytes_each: float, *, fills: bool) -> float:
        """Work out what a run takes."""
        filling = size.size / self.fill_per_second if self.fill_per_second and fills else 0.0
        steps = timesteps if self.fill_per_second else -(-max(timesteps, size.size) // size.size) * size.size
        return self.start_s + filling + steps / self.steps_per_second + self.save_s_per_byte * size.size * bytes_each


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything that was found out before."""

    sizes: dict[str, ProfileSize]
    seconds: dict[str, float]  # by "profile/buffer"

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """Make it of what `asdict` returned."""
        sizes = {name: ProfileSize(**{**size, "fits": tuple(size["fits"])}) for name, size in data["sizes"].items()}
        return cls(sizes, dict(data["seconds"]))


def calibrate(settings: BenchSettings, on_progress: OnProgress) -> Calibration:
    """Try every batch size with every buffer, at a small size."""
    batches = {name: settings.batch_size * PROFILES[name][1] for name in settings.profiles}
    wanted = [(batch, buffer) for batch in sorted(set(batches.values())) for buffer in settings.buffers]
    trials: dict[int, dict[str, dict[str, Any]]] = {batch: {} for batch in batches.values()}
    for number, (batch, buffer) in enumerate(wanted):
        on_progress(f"trial with {buffer}, batches of {batch}", number / len(wanted))
        trials[batch][buffer] = _trial(settings, batch, buffer)
    sizes = {name: _size(settings, name, batch, trials[batch]) for name, batch in batches.items()}
    seconds = {}
    for name, size in sizes.items():
        for buffer in size.fits:
            trial = trials[size.batch_size][buffer]
            taken = _rates(trial).seconds(size, settings.timesteps, trial["bytes_each"], fills=settings.fills)
            seconds[f"{name}/{buffer}"] = taken
    return Calibration(sizes, seconds)


def _trial(settings: BenchSettings, batch: int, buffer: str) -> dict[str, Any]:
    size = _TRIAL_ROLLOUT if settings.on_policy else max(TRIAL_SIZE, 2 * batch)
    steps = 2 * size if settings.on_policy else _TRIAL_STEPS
    start = time.perf_counter()
    found: dict[str, Any] = {}
    for message in run_task(settings.task(buffer, size, batch, steps, fills=True)):
        found = message.get("result", found)
    each = found["checkpoint"]["bytes"] / size if not settings.on_policy else 0.0
    return found | {"size": size, "whole_seconds": time.perf_counter() - start, "bytes_each": each}


def _rates(trial: dict[str, Any]) -> MeasuredRates:
    """Separate what grows with a run from what every run has once: warming up and reading memory, too."""
    filled = trial["size"] / trial["fill_per_second"] if trial["fill_per_second"] else 0.0
    saved = trial["checkpoint"]
    start_s = trial["whole_seconds"] - filled - trial["steps"] / trial["steps_per_second"] - saved["seconds"]
    save_s_per_byte = saved["seconds"] / max(saved["bytes"], 1)
    return MeasuredRates(start_s, trial["fill_per_second"], trial["steps_per_second"], save_s_per_byte)


def _size(settings: BenchSettings, name: str, batch: int, trials: dict[str, dict[str, Any]]) -> ProfileSize:
    """Ask the plan for what fits into a profile's share, over the memory that the trial showed."""
    trial = trials.get("sb3") or next(iter(trials.values()))
    seen, taken = space_from_dict(trial["observation"]), space_from_dict(trial["action"])
    n_steps = settings.batch_size if settings.on_policy else 0
    spec = Spec(settings.algo, seen, taken, batch_size=batch, n_steps=n_steps)
    tried = spec.but(n_steps=trial["size"]) if settings.on_policy else spec.but(capacity=trial["size"])
    probe = {
        "constructed": trial["peaks"]["construct"],
        "trained": trial["peaks"]["train"],
        "buffer_bytes": tried.layout().resident_bytes(trial["size"]) if "sb3" in trials else 0,
        "processes": [],
    }
    room = MachineLimits((Limit("--limit", settings.limit_bytes, settings.limit_bytes),))
    known = PlanInputs(MeasuredCosts(probe=probe), room, need_from_spaces(spec))
    found = next(profile for profile in share_profiles(spec, known) if profile.name == name)
    largest = {"sb3": found.sb3_size, "holdall": found.holdall_size or 0}
    fits = tuple(buffer for buffer in settings.buffers if largest[buffer] > batch)
    size = largest["sb3" if "sb3" in fits else "holdall"]
    return ProfileSize(found.share, found.limit_bytes, batch, size, found.holdall_size, fits)

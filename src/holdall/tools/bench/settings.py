"""Settings of a bench of profiles, and the calibration that computes the capacity of each profile.

A profile is a share of one memory limit, and a factor for the batch size. Short trials measure the memory and the speed
of a run with each buffer. From the trials, `calibrate` computes the capacity of every profile, and the seconds that
every run is expected to take.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdall.errors import ArgumentError
from holdall.machine import memory_limits
from holdall.tools.bench import OnProgress
from holdall.tools.bench.child import read_result
from holdall.tools.bench.task import Task, TrainingFigures, run_task
from holdall.units import parse_bytes

ALGOS = {"sac": "SAC", "td3": "TD3", "dqn": "DQN", "ppo": "PPO"}
"""Classes of Stable-Baselines3."""
_BATCH_SIZES = {"sac": 256, "td3": 256, "dqn": 32, "ppo": 64}
"""Defaults of Stable-Baselines3."""
BUFFERS = ("sb3", "holdall")
PROFILES = {
    "memory-efficient": (0.25, 1),
    "fast": (0.4, 1),
    "balanced": (0.55, 1),
    "quality": (0.7, 1),
    "aggressive": (0.55, 4),
}
"""Share of the limit that a whole run may take, and the factor by which the algorithm's batch size is multiplied."""
_TRIAL_SIZE = 1_000
"""Capacity of a trial's replay buffer, unless two batches are larger."""
_TRIAL_STEPS = 120
_TRIAL_ROLLOUT = 256
"""Steps of a trial's rollout."""
_MIN_SAVED_PER_SECOND = 200e6
"""Lower bound on the bytes per second at which a large checkpoint is predicted to be written. The rate of a trial's
small checkpoint is too low, because creating its files takes most of the time."""

SHIPPED_ENVS: dict[str, dict[str, Any]] = {
    "demo": {
        "env_id": "holdall.tools.demo:CameraRover",
        "batch_size": 16,
        "limit": "2GiB",
        "timesteps": 400,
        "features": "holdall.tools.bench.training:CameraExtractor",
        "policy_kwargs": {"net_arch": [64, 64]},
        "threads": 1,  # With such small networks, several threads wait for each other longer than they compute.
    },
}
"""Environments that come with holdall, and the sizes at which a bench of them takes minutes."""


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of a bench: the environment, the algorithm, and the runs."""

    env: str
    algo: str
    profiles: tuple[str, ...]
    timesteps: int
    seeds: int
    buffers: tuple[str, ...]
    limit_bytes: int
    batch_size: int
    fills: bool = True  # Whether random actions fill the buffer before training.
    limit_source: str = ""  # Name of the system's limit, or of the option.
    env_id: str = ""
    features: str = ""  # Class of the features extractor, as module:Class. Empty: the default of the algorithm.
    policy_kwargs: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0  # Number of torch's threads. 0: torch's default.

    @property
    def is_on_policy(self) -> bool:
        """Whether experience is used once and then dropped."""
        return self.algo == "ppo"

    def make_task(self, buffer: str, size: int, batch_size: int, timesteps: int, seed: int = 0, **changes: Any) -> Task:
        """Return the settings of one training."""
        own = {name: getattr(self, name) for name in ("fills", "features", "threads", "policy_kwargs")}
        return Task(self.env_id, self.algo, buffer, size, batch_size, timesteps, seed, **own | changes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchSettings:
        """Return the settings that `asdict` wrote."""
        return cls(**{**data, "profiles": tuple(data["profiles"]), "buffers": tuple(data["buffers"])})


def make_settings(
    env: str,
    algo: str,
    profiles: Sequence[str],
    timesteps: int | None,
    seeds: int,
    buffers: Sequence[str],
    limit: str | None,
    *,
    fills: bool = True,
    threads: int | None = None,
) -> BenchSettings:
    """Check the arguments, add the defaults of `algo` and `env`, and return the settings."""
    names = list(PROFILES) if list(profiles) == ["all"] else list(profiles)
    _require_known("algo", [algo], ALGOS)
    _require_known("profiles", names, PROFILES)
    _require_known("buffers", buffers, BUFFERS)
    chosen: dict[str, Any] = {"env_id": env, "batch_size": _BATCH_SIZES[algo], "limit": "machine", "timesteps": 5_000}
    chosen |= SHIPPED_ENVS.get(env, {})
    if timesteps is not None:
        chosen["timesteps"] = timesteps
    if threads is not None:
        chosen["threads"] = threads
    limit_bytes, source = _read_limit(limit, chosen.pop("limit"))
    return BenchSettings(
        env=env,
        algo=algo,
        profiles=tuple(dict.fromkeys(names)),
        seeds=seeds,
        buffers=tuple(dict.fromkeys(buffers)),
        limit_bytes=limit_bytes,
        limit_source=source,
        fills=fills,
        **chosen,
    )


def _read_limit(limit: str | None, default: str) -> tuple[int, str]:
    nearest = memory_limits()[0]
    if (limit or default) == "machine":
        return nearest.free_bytes, nearest.name
    if limit is None:
        source = "default of this environment, so that the bench takes minutes; --limit machine uses all free memory"
        return parse_bytes(default), source
    given = parse_bytes(limit, "limit")
    if given > nearest.free_bytes:
        raise ArgumentError(
            f"limit ({limit}) is more than the {nearest.free_bytes} bytes that are free ({nearest.name}). Lower it, or "
            "write --limit machine."
        )
    return given, "--limit"


def _require_known(name: str, values: Sequence[str], known: Any) -> None:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        raise ArgumentError(f"{name} ({', '.join(unknown) or None}) must be among {', '.join(known)}.")


# ---------------------------------------------------------------- calibration


@dataclass(frozen=True, slots=True)
class ProfileSize:
    """Size of one profile. It is the same for either buffer, so that only the buffer differs."""

    share: float
    limit_bytes: int
    batch_size: int
    size: int  # Capacity of a replay buffer, or steps of a rollout. 0: nothing fits.
    holdall_size: int | None  # Largest size with holdall's buffer in the same share. None: not measured.
    fits: tuple[str, ...]  # Buffers with which the profile fits.


@dataclass(frozen=True, slots=True)
class Calibration:
    """Sizes and expected seconds, computed from the trials."""

    sizes: dict[str, ProfileSize]
    seconds: dict[str, float]  # Expected seconds of a run, by "profile/buffer".

    @classmethod
    def from_dict(cls, data: Any) -> Calibration:
        """Return the calibration that `asdict` wrote."""
        sizes = {name: ProfileSize(**{**size, "fits": tuple(size["fits"])}) for name, size in data["sizes"].items()}
        return cls(sizes, dict(data["seconds"]))


@dataclass(frozen=True, slots=True)
class Trial:
    """Figures of a short run, from which the figures of a longer one are predicted."""

    size: int
    buffer_bytes: int  # Bytes of the full buffer. On-policy: also those of the copy in an update.
    peak_bytes: int
    figures: TrainingFigures
    whole_seconds: float  # Seconds of the whole process.

    @property
    def bytes_each(self) -> float:
        """Bytes of one more transition or step."""
        return self.buffer_bytes / self.size

    def predict_peak(self, size: int) -> int:
        """Return the peak memory of a run with another size."""
        return int(self.peak_bytes + self.bytes_each * (size - self.size))

    def find_largest(self, limit_bytes: int) -> int:
        """Return the largest size whose peak stays below a limit. 0 if there is none."""
        return max(int((limit_bytes - self.peak_bytes) / self.bytes_each) + self.size, 0)

    def predict_seconds(self, size: int, timesteps: int, *, fills: bool) -> float:
        """Return how long a run takes: start, filling, training and saving."""
        filled_per_s = self.figures.fill_per_second
        steps_per_s = self.figures.steps_per_second
        saved = self.figures.checkpoint
        start_s = self.whole_seconds - self.figures.steps / steps_per_s - saved.seconds
        if filled_per_s is None:  # An on-policy algorithm.
            steps = -(-max(timesteps, size) // size) * size  # Rollouts are always completed.
            return start_s + steps / steps_per_s + saved.seconds
        start_s -= self.size / filled_per_s
        fill_s = size / filled_per_s if fills else 0.0
        saved_per_s = max(saved.nbytes / saved.seconds, _MIN_SAVED_PER_SECOND)
        save_s = saved.seconds + saved.nbytes * (size / self.size - 1) / saved_per_s
        return start_s + fill_s + timesteps / steps_per_s + save_s


def run_trial(settings: BenchSettings, batch_size: int, buffer: str) -> Trial:
    """Train for a short time with a small buffer."""
    size = _TRIAL_ROLLOUT if settings.is_on_policy else max(_TRIAL_SIZE, 2 * batch_size)
    steps = 2 * size if settings.is_on_policy else _TRIAL_STEPS
    started = time.perf_counter()
    figures = read_result(run_task(settings.make_task(buffer, size, batch_size, steps, fills=True)))
    copies = 2 if settings.is_on_policy else 1
    seconds = time.perf_counter() - started
    return Trial(size, copies * figures.buffer_bytes, figures.peak_bytes, figures, seconds)


def calibrate(settings: BenchSettings, on_progress: OnProgress) -> Calibration:
    """Try every batch size with every buffer."""
    batch_sizes = {name: settings.batch_size * PROFILES[name][1] for name in settings.profiles}
    wanted = [(batch, buffer) for batch in sorted(set(batch_sizes.values())) for buffer in settings.buffers]
    trials: dict[tuple[int, str], Trial] = {}
    for number, (batch, buffer) in enumerate(wanted):
        on_progress(f"trial with {buffer}, batches of {batch}", number / len(wanted))
        trials[batch, buffer] = run_trial(settings, batch, buffer)
    sizes: dict[str, ProfileSize] = {}
    seconds: dict[str, float] = {}
    for name, batch in batch_sizes.items():
        by_buffer = {buffer: trials[batch, buffer] for buffer in settings.buffers}
        size = compute_size(settings, name, batch, by_buffer)
        sizes[name] = size
        for buffer in size.fits:
            predicted = by_buffer[buffer].predict_seconds(size.size, settings.timesteps, fills=settings.fills)
            seconds[f"{name}/{buffer}"] = predicted
    return Calibration(sizes, seconds)


def compute_size(settings: BenchSettings, name: str, batch_size: int, trials: Mapping[str, Trial]) -> ProfileSize:
    """Return the size of a profile: the largest size that fits into its share of the limit.

    Stable-Baselines3's buffer decides. If it does not fit, the first buffer that fits decides. 0: no buffer fits.
    """
    share, _ = PROFILES[name]
    limit_bytes = int(share * settings.limit_bytes)
    largest = {buffer: trial.find_largest(limit_bytes) for buffer, trial in trials.items()}
    fits = tuple(buffer for buffer in settings.buffers if largest[buffer] > batch_size)
    size = 0
    if fits:
        size = largest["sb3" if "sb3" in fits else fits[0]]
    return ProfileSize(share, limit_bytes, batch_size, size, largest.get("holdall"), fits)

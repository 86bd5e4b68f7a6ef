"""What a bench measures: environment, algorithm, profiles, seeds and buffers, under one memory limit.

A profile is a share of the limit. Short trials measure memory and speed first; from them follow the size of every
profile, by the same arithmetic as `holdall plan`, and the seconds that every run is expected to take.
A search looks for the best settings with Optuna, every trial in a process of its own. A trial that does not fit by the
plan is not started; one whose memory grows towards more than the limit is stopped before it gets there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError, MissingPackageError
from holdall.machine import memory_limits
from holdall.tools.bench import ChildError, OnProgress, Task, result_of, run_task
from holdall.tools.plan.environments import space_from_dict
from holdall.tools.plan.needs import Experience, FitVerdict, HoldallUse, RunNeeds
from holdall.tools.plan.planner import PROFILES, Plan, find_limits, name_policy, plan_settings, write_model_code
from holdall.tools.plan.spec import ALGORITHMS, Spec
from holdall.tools.probe.stored import measure_spaces
from holdall.units import format_bytes, parse_bytes

ALGOS = ("sac", "td3", "dqn", "ppo")
BUFFERS = ("sb3", "holdall")
TRIAL_SIZE = 1_000
_TRIAL_STEPS = 120
_TRIAL_ROLLOUT = 256


SHIPPED_ENVS: dict[str, dict[str, Any]] = {
    "demo": {
        "env_id": "holdall.tools.demo:CameraRover", "batch_size": 16, "limit": "2GiB", "timesteps": 400,
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
    chosen["limit_bytes"], chosen["limit_said"] = _limit(limit, chosen.pop("limit"))
    chosen |= {"profiles": tuple(dict.fromkeys(names)), "buffers": tuple(dict.fromkeys(buffers))}
    return BenchSettings(env=env, algo=algo, seeds=seeds, fills=fills, **chosen)


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
            seconds[f"{name}/{buffer}"] = run_seconds(trial, size, settings.timesteps, fills=settings.fills)
    return Calibration(sizes, seconds)


def _trial(settings: BenchSettings, batch: int, buffer: str) -> dict[str, Any]:
    size = _TRIAL_ROLLOUT if settings.on_policy else max(TRIAL_SIZE, 2 * batch)
    steps = 2 * size if settings.on_policy else _TRIAL_STEPS
    start = time.perf_counter()
    found = result_of(run_task(settings.task(buffer, size, batch, steps, fills=True)))
    each = found["checkpoint"]["bytes"] / size if not settings.on_policy else 0.0
    return found | {"size": size, "whole_seconds": time.perf_counter() - start, "bytes_each": each}


def run_seconds(trial: Mapping[str, Any], size: ProfileSize, timesteps: int, *, fills: bool) -> float:
    """Work out what a run takes, by a trial: what grows with a run, and what every run has once, as warming up."""
    filling, training, saved = trial["fill_per_second"], trial["steps_per_second"], trial["checkpoint"]
    filled = trial["size"] / filling if filling else 0.0
    start_s = trial["whole_seconds"] - filled - trial["steps"] / training - saved["seconds"]
    steps = timesteps if filling else -(-max(timesteps, size.size) // size.size) * size.size
    save_s_per_byte = saved["seconds"] / max(saved["bytes"], 1)
    fill_s = size.size / filling if filling and fills else 0.0
    return float(start_s + fill_s + steps / training + save_s_per_byte * size.size * trial["bytes_each"])


def _size(settings: BenchSettings, name: str, batch: int, trials: dict[str, dict[str, Any]]) -> ProfileSize:
    """Compute what fits into a profile's share, over the memory that the trial showed."""
    share, _ = PROFILES[name]
    limit_bytes = int(settings.limit_bytes * share)
    needs = _needs_of_trial(settings, batch, trials)
    largest = {
        "sb3": needs.largest_size(None, limit_bytes),
        "holdall": needs.largest_size(HoldallUse(), limit_bytes),
    }
    fits = tuple(buffer for buffer in settings.buffers if largest[buffer] > batch)
    size = largest["sb3" if "sb3" in fits else "holdall"]
    return ProfileSize(share, limit_bytes, batch, size, largest["holdall"], fits)


def _needs_of_trial(settings: BenchSettings, batch: int, trials: dict[str, dict[str, Any]]) -> RunNeeds:
    """Return what a run needs, from the peaks of a trial's phases."""
    trial = trials.get("sb3") or next(iter(trials.values()))
    observation = space_from_dict(trial["observation"])
    action = space_from_dict(trial["action"])
    size = {"n_steps": trial["size"]} if settings.on_policy else {"capacity": trial["size"]}
    layout = Spec(settings.algo, observation, action, batch_size=batch, **size).layout()
    experience = Experience(
        name="buffer",
        library="SB3",
        rows=layout.rows,
        n_envs=layout.n_envs,
        row_bytes=layout.nbytes / layout.rows,
        copied_row_bytes=layout.flatten_bytes / layout.rows,
        is_rollout=settings.on_policy,
    )
    base = trial["peaks"]["construct"]
    has_sb3_buffer = "sb3" in trials
    known = base + (layout.resident_bytes(trial["size"]) if has_sb3_buffer else 0)
    kept = max(trial["kept_bytes"] - known, 0)
    peak = max(trial["peaks"]["train"] - known, kept)
    return RunNeeds(
        experience=experience,
        base_bytes=base,
        update_bytes=peak - kept,
        settled_bytes=kept,
        update_source="measured",
        batch_size=batch,
        measured_batch_size=batch,
        stored=measure_spaces(observation, action, is_rollout=settings.on_policy),
        free_bytes=settings.limit_bytes,
    )


_PROJECTED_FROM = 0.2
"""Share of the buffer from which on its final size is predicted; before, the heap still grows for other reasons."""
_MORE_THAN_FITS = 1.25
"""The largest capacity that is tried, of what the plan says fits: the plan is careful."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is searched."""

    capacity: tuple[int, int]
    batch_sizes: tuple[int, ...]
    num_envs: tuple[int, ...]
    threads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial."""

    number: int
    state: str  # complete, pruned, failed
    settings: dict[str, int]
    samples_per_second: float | None  # transitions that updates learn from
    steps_per_second: float | None
    peak_bytes: int | None
    reason: str = ""
    is_best: bool = False  # no other one is both faster and larger

    @property
    def capacity(self) -> int:
        """Transitions held."""
        return self.settings.get("capacity", 0)


class TrialStopped(Exception):  # noqa: N818 it is no error: the trial ends early
    """A trial ends early; the message says why."""


class Search:
    """A study, new or continued.

    Args:
        settings: Of a bench: environment, algorithm, steps and limit; of its buffers the first is searched with.
        storage: A file to which trials are added; an existing one is continued.
        space: What is searched; None: what the plan says could fit.
    """

    def __init__(self, settings: BenchSettings, storage: Path, space: SearchSpace | None = None) -> None:
        optuna = _optuna()
        if settings.on_policy:
            raise ArgumentError(
                f"algo ({settings.algo}) keeps no replay buffer to search the size of; take sac, td3 or dqn"
            )
        self.settings = settings
        self._use = HoldallUse() if settings.buffers[0] == "holdall" else None
        plan = _measure_plan(settings)
        self._needs = plan.needs
        self._policy = name_policy(plan.snapshot.models[0])
        self.space = space or self._default_space()
        self._study = optuna.create_study(
            study_name=f"{settings.env} {settings.algo} {settings.buffers[0]} {settings.limit_bytes}",
            storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(storage))),
            directions=["maximize", "maximize"],
            sampler=optuna.samplers.TPESampler(seed=0),
            load_if_exists=True,
        )

    def run(self, trials: int, on_progress: OnProgress) -> Iterator[SearchTrial]:
        """Add trials until there are so many; yield each."""
        while sum(trial.state.is_finished() for trial in self._study.trials) < trials:
            trial = self._study.ask()
            drawn = self._suggest(trial)
            state = _optuna().trial.TrialState
            try:
                figures = self._measure(drawn, partial(on_progress, f"trial {trial.number}"))
            except (TrialStopped, ChildError) as error:
                trial.set_user_attr("reason", str(error))
                self._study.tell(trial, state=state.PRUNED if isinstance(error, TrialStopped) else state.FAIL)
            else:
                for name in ("steps_per_second", "peak_bytes"):
                    trial.set_user_attr(name, figures[name])
                self._study.tell(trial, [figures["samples_per_second"], float(drawn["capacity"])])
            yield next(found for found in self.trials() if found.number == trial.number)

    def trials(self) -> list[SearchTrial]:
        """Return every trial that has ended."""
        best = {trial.number for trial in self._study.best_trials}
        return [
            SearchTrial(
                trial.number,
                {"complete": "complete", "pruned": "pruned"}.get(trial.state.name.lower(), "failed"),
                dict(trial.params),
                trial.values[0] if trial.values else None,
                trial.user_attrs.get("steps_per_second"),
                trial.user_attrs.get("peak_bytes"),
                trial.user_attrs.get("reason", ""),
                trial.number in best,
            )
            for trial in self._study.trials
            if trial.state.is_finished()
        ]

    def code(self, found: SearchTrial) -> str:
        """Return the lines to paste for a trial."""
        needs = self._needs_with(found.settings)
        lines = [f"torch.set_num_threads({found.settings['threads']})"]
        if needs.experience.n_envs > 1:
            lines.append(f"env = make_vec_env(..., n_envs={needs.experience.n_envs})")
        algorithm = ALGORITHMS[self.settings.algo].name
        return "\n".join([*lines, write_model_code(algorithm, self._policy, needs, self._use)])

    def _suggest(self, trial: Any) -> dict[str, int]:
        drawn = {"capacity": trial.suggest_int("capacity", *self.space.capacity, log=True)}
        choices = {"batch_size": self.space.batch_sizes, "num_envs": self.space.num_envs, "threads": self.space.threads}
        return drawn | {name: trial.suggest_categorical(name, list(values)) for name, values in choices.items()}

    def _measure(self, drawn: dict[str, int], on_progress: Callable[[float], None]) -> dict[str, Any]:
        self._require_fit(drawn)
        settings = self.settings
        task = settings.task(
            settings.buffers[0], drawn["capacity"], drawn["batch_size"], settings.timesteps,
            fills=True, threads=drawn["threads"], num_envs=drawn["num_envs"],
        )  # fmt: skip
        bases: list[int] = []

        def follow(message: dict[str, Any]) -> None:
            if "resident" in message:
                bases.append(message["resident"])
                self._require_room(message, bases[0])
                share = min(message["done"] / message["total"], 1.0)
                on_progress(share * (0.5 if message["phase"] == "fill" else 1.0))

        with closing(run_task(task)) as lines:  # closing kills the child, with SIGKILL
            figures = result_of(lines, follow)
        peak = max(figures["peaks"].values())
        steps = figures["steps_per_second"]
        return {"steps_per_second": steps, "samples_per_second": steps * drawn["batch_size"], "peak_bytes": peak}

    def _require_fit(self, drawn: dict[str, int]) -> None:
        needs = self._needs_with(drawn)
        if needs.verdict(self._use, self.settings.limit_bytes) is FitVerdict.DOES_NOT_FIT:
            need = format_bytes(needs.need_bytes(self._use))
            raise TrialStopped(f"not started: the plan says {need}, of {format_bytes(self.settings.limit_bytes)}")

    def _require_room(self, message: dict[str, Any], base: int) -> None:
        """Stop a trial that is past the limit, or will be when its buffer is full."""
        resident, done = message["resident"], message["done"] / message["total"]
        limit = self.settings.limit_bytes
        is_filling = message["phase"] == "fill" and done >= _PROJECTED_FROM
        foreseen = int(base + (resident - base) / done) if is_filling else resident
        if foreseen > limit:
            raise TrialStopped(
                f"stopped at {format_bytes(resident)}: {format_bytes(foreseen)} to come, of {format_bytes(limit)}"
            )

    def _needs_with(self, drawn: dict[str, int]) -> RunNeeds:
        """Return what the run needs with the settings of a trial."""
        needs = self._needs.with_envs(drawn["num_envs"]).with_batch(drawn["batch_size"])
        return needs.resized(drawn["capacity"])

    def _default_space(self) -> SearchSpace:
        base = self.settings.batch_size
        most = int(_MORE_THAN_FITS * self._needs.largest_size(self._use, self.settings.limit_bytes))
        if most < 4 * base:
            size = format_bytes(self.settings.limit_bytes)
            raise ArgumentError(f"limit ({size}) leaves no room for a buffer besides the process; raise it")
        return SearchSpace((max(most // 16, 2 * base), most), (base, 2 * base, 4 * base, 8 * base), (1, 2, 4), (1, 2))


def _measure_plan(settings: BenchSettings) -> Plan:
    """Plan the searched run once, by a probe of a stand-in for it."""
    named = {
        "env": settings.env_id,
        "algo": settings.algo,
        "batch_size": settings.batch_size,
        "policy_kwargs": dict(settings.policy_kwargs),
    }
    return plan_settings(named, find_limits(budget_bytes=settings.limit_bytes))


def _optuna() -> Any:
    try:
        import optuna  # noqa: PLC0415 an extra
        import optuna.storages.journal  # noqa: PLC0415 likewise
    except ImportError as error:
        raise MissingPackageError("holdall bench search needs optuna; run `pip install 'holdall[search]'`") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

"""Search capacity, batch size, environments and threads for the best settings under a memory limit, with Optuna.

Every trial is a process of its own. A trial that does not fit by the plan is not started; one whose memory grows
towards more than the limit is stopped before it gets there. Both are stored with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError, MissingPackageError
from holdall.tools.bench.child_process import ChildError, OnProgress, run_task
from holdall.tools.bench.settings import SHIPPED_ENVS, BenchSettings
from holdall.tools.plan.config import spec_from_settings
from holdall.tools.plan.phases import FitVerdict, PlanInputs
from holdall.tools.plan.planner import make_plan
from holdall.tools.plan.recommend import code_to_paste, largest_size
from holdall.tools.plan.spec import Spec
from holdall.units import format_bytes

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
        _optuna()
        if settings.on_policy:
            raise ArgumentError(
                f"algo ({settings.algo}) keeps no replay buffer to search the size of; take sac, td3 or dqn"
            )
        self._storage = storage
        self._holdall = settings.buffers[0] == "holdall"
        self._spec, self._known = _measure_plan(settings)
        self._open(settings, space)

    def reopened(self, space: SearchSpace, settings: BenchSettings | None = None) -> Search:
        """Return the same study over another space, with what was measured for the plan."""
        other = copy(self)
        other._open(settings or self.settings, space)
        return other

    def _open(self, settings: BenchSettings, space: SearchSpace | None) -> None:
        optuna = _optuna()
        self.settings = settings
        self.space = space or self._default_space()
        self._study = optuna.create_study(
            study_name=f"{settings.env} {settings.algo} {settings.buffers[0]} {settings.limit_bytes}",
            storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(self._storage))),
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
        spec = self._spec_of(found.settings)
        lines = [f"torch.set_num_threads({found.settings['threads']})"]
        if spec.num_envs > 1:
            lines.append(f"env = make_vec_env(..., n_envs={spec.num_envs})")
        return "\n".join([*lines, code_to_paste(spec, holdall=self._holdall)])

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
        base = 0
        figures: dict[str, Any] = {}
        with closing(run_task(task)) as lines:  # closing kills the child, with SIGKILL
            for message in lines:
                figures = message.get("result", figures)
                if "resident" in message:
                    base = base or message["resident"]
                    self._require_room(message, base)
                    share = min(message["done"] / message["total"], 1.0)
                    on_progress(share * (0.5 if message["phase"] == "fill" else 1.0))
        peak = max(figures["peaks"].values())
        steps = figures["steps_per_second"]
        return {"steps_per_second": steps, "samples_per_second": steps * drawn["batch_size"], "peak_bytes": peak}

    def _require_fit(self, drawn: dict[str, int]) -> None:
        spec = self._spec_of(drawn)
        if self._known.verdict(spec, holdall=self._holdall) is FitVerdict.DOES_NOT_FIT:
            need = format_bytes(self._known.need_bytes(spec, holdall=self._holdall))
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

    def _spec_of(self, drawn: dict[str, int]) -> Spec:
        return self._spec.but(**{name: drawn[name] for name in ("capacity", "batch_size", "num_envs")})

    def _default_space(self) -> SearchSpace:
        base = self.settings.batch_size
        most = int(_MORE_THAN_FITS * largest_size(self._spec, self._known, holdall=self._holdall))
        if most < 4 * base:
            size = format_bytes(self.settings.limit_bytes)
            raise ArgumentError(f"limit ({size}) leaves no room for a buffer besides the process; raise it")
        return SearchSpace((max(most // 16, 2 * base), most), (base, 2 * base, 4 * base, 8 * base), (1, 2, 4), (1, 2))


def _measure_plan(settings: BenchSettings) -> tuple[Spec, PlanInputs]:
    """Measure what the plan needs once; the shipped environment's small network is left out of it."""
    named = {"env": settings.env_id, "algo": settings.algo, "batch_size": settings.batch_size}
    spec, environment = spec_from_settings(named)
    networks = settings.env not in SHIPPED_ENVS
    plan = make_plan(spec, budget_bytes=settings.limit_bytes, networks=networks, environment=environment)
    return spec, plan.known


def _optuna() -> Any:
    try:
        import optuna  # noqa: PLC0415 an extra
        import optuna.storages.journal  # noqa: PLC0415 likewise
    except ImportError as error:
        raise MissingPackageError("holdall bench search needs optuna; run `pip install 'holdall[search]'`") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

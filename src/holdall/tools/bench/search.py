"""Search for the best settings with Optuna, every trial in a process of its own under a memory limit.

A trial that does not fit is not started. A trial that is going to exceed the limit is stopped before it does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from holdall.errors import ArgumentError, MissingPackageError
from holdall.tools.bench import OnProgress
from holdall.tools.bench.child import ChildError, ChildProgress, read_result
from holdall.tools.bench.settings import ALGOS, BenchSettings, Trial, run_trial
from holdall.tools.bench.task import Task, TrainingFigures, run_task
from holdall.units import format_bytes

_MIN_PROJECTED_SHARE = 0.2
"""Filled share of a buffer from which on its final size is predicted. Before, the heap also grows for other reasons."""
_MAX_BATCH_FACTOR = 8
"""Largest batch that is tried, as a multiple of the algorithm's default."""
_LARGEST_SHARE = 1.25
"""Largest capacity that is tried, as a share of the capacity that is predicted to fit."""


RunTask = Callable[[Task], Generator[ChildProgress | TrainingFigures, None, None]]


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Values that are tried."""

    capacity: tuple[int, int]
    batch_sizes: tuple[int, ...]
    num_envs: tuple[int, ...]
    threads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """One trial."""

    number: int
    state: str  # "complete", "pruned" or "failed".
    settings: dict[str, int]
    samples_per_second: float | None  # Transitions that updates learn from.
    steps_per_second: float | None
    peak_bytes: int | None
    reason: str = ""
    is_best: bool = False  # Whether no other trial is both faster and larger.

    @property
    def capacity(self) -> int:
        """Transitions of the buffer."""
        return self.settings.get("capacity", 0)


class TrialStopped(Exception):  # noqa: N818  It is not an error: the trial ends early.
    """A trial ends early. The message says why."""


class Search:
    """A study, new or continued.

    Args:
        settings: Environment, algorithm, steps and limit of a bench. The first of its buffers is used.
        storage: File to which trials are added. An existing study is continued.
        space: Values that are tried. None: those that could fit.
        trial: Figures of a short run. None: it is measured.
        run_task: Runs one training, and yields its messages.
    """

    def __init__(
        self,
        settings: BenchSettings,
        storage: Path,
        space: SearchSpace | None = None,
        trial: Trial | None = None,
        run_task: RunTask = run_task,
    ) -> None:
        optuna = _import_optuna()
        if settings.is_on_policy:
            raise ArgumentError(f"algo ({settings.algo}) has no replay buffer whose size could be searched. Take sac.")
        self.settings = settings
        self._run_task = run_task
        # The largest batches need most memory. A capacity that fits with them fits with all batches.
        self.trial = trial or run_trial(settings, _MAX_BATCH_FACTOR * settings.batch_size, settings.buffers[0])
        self.space = space or self._choose_space()
        self._study = optuna.create_study(
            study_name=f"{settings.env} {settings.algo} {settings.buffers[0]} {settings.limit_bytes}",
            storage=optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(storage))),
            directions=["maximize", "maximize"],
            sampler=optuna.samplers.TPESampler(seed=0),
            load_if_exists=True,
        )

    def run(self, trials: int, on_progress: OnProgress) -> Iterator[SearchTrial]:
        """Add trials until there are `trials` of them. Yield each one."""
        states = _import_optuna().trial.TrialState
        while sum(trial.state.is_finished() for trial in self._study.trials) < trials:
            trial = self._study.ask()
            chosen = self._draw_settings(trial)
            try:
                figures = self._measure(chosen, partial(on_progress, f"trial {trial.number}"))
            except (TrialStopped, ChildError) as error:
                trial.set_user_attr("reason", str(error))
                self._study.tell(trial, state=states.PRUNED if isinstance(error, TrialStopped) else states.FAIL)
            else:
                trial.set_user_attr("steps_per_second", figures.steps_per_second)
                trial.set_user_attr("peak_bytes", figures.peak_bytes)
                samples_per_second = figures.steps_per_second * chosen["batch_size"]
                self._study.tell(trial, [samples_per_second, float(chosen["capacity"])])
            yield next(found for found in self.list_trials() if found.number == trial.number)

    def list_trials(self) -> list[SearchTrial]:
        """Return every trial that has ended."""
        best = {trial.number for trial in self._study.best_trials}
        states = {"COMPLETE": "complete", "PRUNED": "pruned"}
        return [
            SearchTrial(
                number=trial.number,
                state=states.get(trial.state.name, "failed"),
                settings=dict(trial.params),
                samples_per_second=trial.values[0] if trial.values else None,
                steps_per_second=trial.user_attrs.get("steps_per_second"),
                peak_bytes=trial.user_attrs.get("peak_bytes"),
                reason=trial.user_attrs.get("reason", ""),
                is_best=trial.number in best,
            )
            for trial in self._study.trials
            if trial.state.is_finished()
        ]

    def write_code(self, found: SearchTrial) -> str:
        """Return the lines to paste for a trial."""
        lines = [f"torch.set_num_threads({found.settings['threads']})"]
        arguments = [f"buffer_size={found.capacity:_}", f"batch_size={found.settings['batch_size']}"]
        if found.settings["num_envs"] > 1:
            lines.append(f"env = make_vec_env(..., n_envs={found.settings['num_envs']})")
            arguments.append("gradient_steps=-1")
        if self.settings.buffers[0] == "holdall":
            lines.append("from holdall.sb3 import ReplayBuffer")
            arguments.append("replay_buffer_class=ReplayBuffer")
        call = "".join(f"\n    {argument}," for argument in ["policy, env", *arguments])
        return "\n".join([*lines, f"model = {ALGOS[self.settings.algo]}({call}\n)"])

    def _draw_settings(self, trial: Any) -> dict[str, int]:
        return {
            "capacity": trial.suggest_int("capacity", *self.space.capacity, log=True),
            "batch_size": trial.suggest_categorical("batch_size", list(self.space.batch_sizes)),
            "num_envs": trial.suggest_categorical("num_envs", list(self.space.num_envs)),
            "threads": trial.suggest_categorical("threads", list(self.space.threads)),
        }

    def _measure(self, chosen: dict[str, int], on_progress: Callable[[float], None]) -> TrainingFigures:
        settings = self.settings
        need_bytes = self.trial.predict_peak(chosen["capacity"])
        if need_bytes > _LARGEST_SHARE * settings.limit_bytes:
            limit = format_bytes(settings.limit_bytes)
            raise TrialStopped(f"not started: it would take {format_bytes(need_bytes)}, and the limit is {limit}")
        task = settings.make_task(
            settings.buffers[0],
            chosen["capacity"],
            chosen["batch_size"],
            settings.timesteps,
            fills=True,
            threads=chosen["threads"],
            num_envs=chosen["num_envs"],
        )
        base_bytes = 0

        def follow(progress: ChildProgress) -> None:
            nonlocal base_bytes
            if progress.resident_bytes is not None:
                base_bytes = base_bytes or progress.resident_bytes
                require_room(progress, base_bytes, settings.limit_bytes)
                on_progress(progress.share * (0.5 if progress.phase == "fill" else 1.0))

        with closing(self._run_task(task)) as messages:  # Closing kills the child.
            figures = read_result(messages, follow)
        require_peak(figures.peak_bytes, settings.limit_bytes)
        return figures

    def _choose_space(self) -> SearchSpace:
        base = self.settings.batch_size
        largest = int(_LARGEST_SHARE * self.trial.find_largest(self.settings.limit_bytes))
        if largest < 4 * base:
            limit = format_bytes(self.settings.limit_bytes)
            raise ArgumentError(f"limit ({limit}) is too small for the process and a buffer. Raise it.")
        batch_sizes = (base, 2 * base, 4 * base, _MAX_BATCH_FACTOR * base)
        return SearchSpace((max(largest // 16, 2 * base), largest), batch_sizes, (1, 2, 4), (1, 2))


def require_room(progress: ChildProgress, base_bytes: int, limit_bytes: int) -> None:
    """Raise TrialStopped if a trial exceeds the limit, or will exceed it when its buffer is full."""
    resident = progress.resident_bytes or 0
    expected = resident
    if progress.phase == "fill" and progress.share >= _MIN_PROJECTED_SHARE:
        expected = int(base_bytes + (resident - base_bytes) / progress.share)
    if expected > limit_bytes:
        raise TrialStopped(
            f"stopped at {format_bytes(resident)}: it would take {format_bytes(expected)}, and the limit is "
            f"{format_bytes(limit_bytes)}"
        )


def require_peak(peak_bytes: int, limit_bytes: int) -> None:
    """Raise TrialStopped if a trial exceeded the limit between two readings."""
    if peak_bytes > limit_bytes:
        raise TrialStopped(f"took {format_bytes(peak_bytes)} at its peak, and the limit is {format_bytes(limit_bytes)}")


def _import_optuna() -> Any:
    try:
        import optuna  # noqa: PLC0415  An extra.
        import optuna.storages.journal  # noqa: PLC0415  Likewise.
    except ImportError as error:
        raise MissingPackageError("holdall bench search needs optuna. Run: pip install 'holdall[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna

"""`holdall bench`: `profiles` finds the best profile, `buffers` the best buffer, and `search` the best settings.

Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake on the command line, 3 some runs failed, 130 stopped
with Ctrl-C. Ctrl-C keeps finished runs, and `--resume` makes the remaining ones.
"""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich import progress
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from holdall.cli import AsJson, OptInt, OptPath, OptText, OptTexts, Verbose, option, writing
from holdall.errors import ArgumentError, MissingPackageError
from holdall.tools.bench import OnProgress, compare_buffers
from holdall.tools.bench import run as trainings
from holdall.tools.bench.buffer_libraries import find_setups
from holdall.tools.bench.compare_buffers import CASES, BufferCase
from holdall.tools.bench.search import Search, SearchTrial
from holdall.tools.bench.settings import BenchSettings, Calibration, calibrate, make_settings
from holdall.tools.report.results import ProfileRanking, TrainingRun
from holdall.units import count_noun, format_bytes, format_seconds

FAILED_EXIT_CODE = 3
STOPPED_EXIT_CODE = 130
_LONG_S = 3_600  # Seconds from which on a bench is announced as long.
_MAX_SHOWN_TRIALS = 12


def repeat_option_names(words: Sequence[str], options: Collection[str]) -> list[str]:
    """Repeat each of `options` before every word that belongs to it."""
    repeated: list[str] = []
    option = ""
    is_first = True
    for word in words:
        if word.startswith("-"):
            option = word if word in options else ""
            is_first = True
            repeated.append(word)
            continue
        if option and not is_first:
            repeated.append(option)
        repeated.append(word)
        is_first = False
    return repeated


class ListCommand(TyperCommand):
    """A command with options that take several words, such as `--profiles fast balanced`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        lists = {"--buffers", "--case", "--libraries", "--profiles", "--trace"}
        return list(super().parse_args(ctx, repeat_option_names(args, lists)))


@contextmanager
def _show_progress(console: Console, total: float, *columns: progress.ProgressColumn) -> Iterator[OnProgress]:
    """Show a progress bar that disappears at the end. Yield the function that moves it."""
    shown = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *columns)
    with progress.Progress(*shown, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        yield lambda work, done: bars.update(task, description=work, completed=done)


def _make_time_columns() -> tuple[progress.ProgressColumn, ...]:
    return progress.TimeElapsedColumn(), progress.TextColumn("left"), progress.TimeRemainingColumn()


def buffers(
    case: Annotated[OptTexts, option(f"Cases to play: {', '.join(CASES)}.")] = None,
    trace: Annotated[list[Path] | None, option("Recorded traces (.npz), in place of cases.")] = None,
    env: Annotated[OptText, option("An environment, ID or module:Class, in place of cases.")] = None,
    wrapper: Annotated[str, option("atari: Stable-Baselines3's AtariWrapper.")] = "",
    frame_stack: Annotated[int, option("Frames that are stacked.", min=1)] = 1,
    libraries: Annotated[OptTexts, option("sb3, sb3-extra-buffers, cpprb, torchrl, tianshou, holdall, or all.")] = None,
    transitions: Annotated[
        OptInt, option("Transitions held at the end. Default: 20,000, or all of a trace.", min=512)
    ] = None,
    rounds: Annotated[int, option("Processes per library. Figures are medians over them.", min=1)] = 3,
    out: Annotated[OptPath, option("File of the results, one JSON object per line.")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Measure replay buffers alone: memory, add, sample, save, load, and whether the data is returned unchanged."""
    cases = _choose_cases(case, trace, env, wrapper, frame_stack)
    setups = find_setups(libraries or ["all"])
    records: list[dict[str, Any]] = []
    is_stopped = False
    console = Console(stderr=True, markup=False)
    with ExitStack() as stack:
        with writing("out", out or Path()):
            file = None if out is None else stack.enter_context(out.open("w", encoding="utf-8"))
        share = progress.TextColumn("{task.percentage:3.0f}%")
        on_progress = stack.enter_context(_show_progress(console, 1.0, share, progress.TimeElapsedColumn()))
        try:
            for record in compare_buffers.measure_buffers(cases, setups, transitions, rounds, on_progress):
                records.append(record)
                trainings.write_line(file, record)
                if json:
                    typer.echo(json_format.dumps(record))
        except KeyboardInterrupt:
            is_stopped = True
    if not json:
        _show_buffers(records)
    if is_stopped:
        console.print("Stopped. Finished rounds are kept.", style="yellow")
        raise typer.Exit(STOPPED_EXIT_CODE)


def _choose_cases(
    names: list[str] | None, traces: list[Path] | None, env: str | None, wrapper: str, stack: int
) -> list[BufferCase]:
    if sum(bool(given) for given in (names, traces, env)) > 1:
        raise ArgumentError(
            "case, trace and env were given together. Each of them names the experience. Pass one of them."
        )
    if traces:
        for file in traces:
            if not file.is_file():
                raise ArgumentError(f"trace ({file}) is not a file. Name an .npz file, or record one with --env.")
        return [BufferCase(file.stem, file=file) for file in traces]
    if env:
        return [BufferCase(env, env, wrapper, stack)]
    return [compare_buffers.find_case(name) for name in names or ["atari", "camera"]]


def _show_buffers(records: list[dict[str, Any]]) -> None:
    console = Console(highlight=False, markup=False)
    for case in compare_buffers.list_cases(records):
        console.print(compare_buffers.draw_case(records, case))
        console.print()
    for line in compare_buffers.list_remarks(records):
        console.print(line, style="dim", highlight=False, soft_wrap=True)


def search(
    env: Annotated[str, option("demo, an ID that gymnasium knows, or module:Class.")] = "demo",
    algo: Annotated[str, option("sac, td3 or dqn.")] = "sac",
    buffer: Annotated[str, option("sb3 or holdall.")] = "holdall",
    trials: Annotated[int, option("Trials in all, including those in the storage.", min=1)] = 20,
    timesteps: Annotated[OptInt, option("Steps to train after the buffer is full.", min=50)] = None,
    limit: Annotated[OptText, option('Memory limit of a run: "2GiB", or machine. Default for demo: 2GiB.')] = None,
    storage: Annotated[Path, option("File of the trials. A search with the same file continues.")] = Path(
        "search.journal"
    ),
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Search for settings that learn from most samples per second with the largest memory that fits."""
    console = Console(stderr=True, highlight=False, markup=False)
    study = Search(make_settings(env, algo, ["balanced"], timesteps, 1, [buffer], limit), storage)
    done = len(study.list_trials())
    if done:
        console.print(f"{storage} has {count_noun(done, 'trial')} already.")
    with _show_progress(console, trials, progress.MofNCompleteColumn(), *_make_time_columns()) as on_progress:

        def show_share(work: str, share: float) -> None:
            on_progress(f"{work}, {share:.0%}", done)

        try:
            for trial in study.run(trials, show_share):
                done += 1
                on_progress("", done)
                if json:
                    typer.echo(json_format.dumps(asdict(trial)))
        except KeyboardInterrupt:
            console.print(f"Stopped. The trials are in {storage}. The same command continues.", style="yellow")
            raise typer.Exit(STOPPED_EXIT_CODE) from None
    if not json:
        _show_search(study)


def _show_search(study: Search) -> None:
    console = Console(highlight=False, markup=False)
    trials = study.list_trials()
    best = sorted((trial for trial in trials if trial.is_best), key=lambda trial: -trial.capacity)
    table = Table(title="No other trial is both faster and larger", title_justify="left", box=None, pad_edge=False)
    for head in ("capacity", "batch", "envs", "threads", "samples/s", "steps/s", "peak memory"):
        table.add_column(head, justify="right")
    for trial in best[:_MAX_SHOWN_TRIALS]:
        table.add_row(*_format_trial(trial))
    console.print(table)
    for state in ("pruned", "failed"):
        ended = [trial for trial in trials if trial.state == state]
        if ended:
            last = ended[-1]
            console.print(f"{len(ended)} {state}, such as trial {last.number}: {last.reason}", soft_wrap=True)
    if best:
        fastest = max(best, key=lambda trial: trial.samples_per_second or 0.0)
        console.print(f"\nThe fastest of these trials, {fastest.capacity:,} transitions:")
        console.print(study.write_code(fastest), style="cyan", soft_wrap=True)


def _format_trial(trial: SearchTrial) -> tuple[str, ...]:
    counts = [f"{trial.settings[name]:,}" for name in ("capacity", "batch_size", "num_envs", "threads")]
    samples = f"{trial.samples_per_second or 0.0:,.0f}"
    steps = f"{trial.steps_per_second or 0.0:.1f}"
    return (*counts, samples, steps, format_bytes(trial.peak_bytes or 0))


def profiles(
    env: Annotated[str, option("demo, an ID that gymnasium knows, or module:Class.")] = "demo",
    algo: Annotated[str, option("sac, td3, dqn or ppo.")] = "sac",
    profiles: Annotated[OptTexts, option("memory-efficient fast balanced quality aggressive, or all.")] = None,
    timesteps: Annotated[OptInt, option("Steps to train after the buffer is full.", min=50)] = None,
    seeds: Annotated[int, option("Trainings per profile and buffer.", min=1)] = 3,
    buffers: Annotated[OptTexts, option("sb3 holdall: either or both.")] = None,
    limit: Annotated[
        OptText, option('Limit of which profiles take a share: "2GiB", or machine. Default for demo: 2GiB.')
    ] = None,
    threads: Annotated[OptInt, option("Threads of torch. Default for demo: 1, otherwise torch's own.", min=1)] = None,
    fill: Annotated[bool, option("Fill buffers before training. Without this, memory is not ranked.")] = True,
    out: Annotated[Path, option("File of the results, one JSON object per line.")] = Path("results.jsonl"),
    resume: Annotated[OptPath, option("Results of a stopped bench, which is continued.")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Train every profile with every buffer, each in a fresh process, and rank them if the figures differ clearly."""
    console = Console(stderr=True, highlight=False, markup=False)
    _require_sb3()
    if resume is not None:
        settings, calibration, done, header = _read_stopped_bench(resume)
        out = resume
    else:
        settings = make_settings(
            env,
            algo,
            profiles or ["all"],
            timesteps,
            seeds,
            buffers or ["sb3", "holdall"],
            limit,
            fills=fill,
            threads=threads,
        )
        with _show_progress(console, 1.0) as on_progress:
            calibration = calibrate(settings, on_progress)
        done = []
        seconds = trainings.predict_seconds(settings, calibration)
        header = trainings.make_results_header(settings, calibration, seconds)
    _announce(settings, calibration, done, console)
    with ExitStack() as stack:
        with writing("out", out):
            file = stack.enter_context(trainings.open_results(out, is_resumed=resume is not None))
        if resume is None:
            trainings.write_line(file, header)
        runs, is_stopped = _run_all(settings, calibration, done, file, console)
        rankings = trainings.rank_runs(runs, missing=len(trainings.plan_runs(settings)) - len(runs))
        if not is_stopped:
            for ranking in rankings:
                trainings.write_line(file, ranking.as_dict())
    _show_results(json, header, runs, rankings, out)
    if is_stopped:
        console.print(
            f"Stopped. {count_noun(len(runs), 'run')} kept. Continue with `holdall bench profiles --resume {out}`.",
            style="yellow",
        )
        raise typer.Exit(STOPPED_EXIT_CODE)
    if any(run.status == "failed" for run in runs):
        raise typer.Exit(FAILED_EXIT_CODE)


def _announce(settings: BenchSettings, calibration: Calibration, done: list[TrainingRun], console: Console) -> None:
    console.print(f"Limit: {format_bytes(settings.limit_bytes)} ({settings.limit_source}).", soft_wrap=True)
    for name, size in calibration.sizes.items():
        content = "nothing fits"
        if size.size:
            content = f"{size.size:,} {'steps' if settings.is_on_policy else 'transitions'}"
            if size.holdall_size:
                content += f"; holdall's buffer would hold {size.holdall_size:,}"
        console.print(f"  {name}: {size.share:.0%}, {format_bytes(size.limit_bytes)}: {content}", soft_wrap=True)
    count = len(trainings.plan_runs(settings)) - len(done)
    seconds = trainings.predict_seconds(settings, calibration, done)
    console.print(f"{count_noun(count, 'run')}, about {format_seconds(round(seconds))} in all.", style="bold")
    if seconds > _LONG_S:
        console.print("Filling the buffers takes long. A lower --limit, fewer --profiles or fewer --seeds take less.")


def _run_all(
    settings: BenchSettings, calibration: Calibration, done: list[TrainingRun], file: TextIO, console: Console
) -> tuple[list[TrainingRun], bool]:
    """Make the remaining runs. Return all runs, and whether Ctrl-C stopped the bench."""
    runs = list(done)
    total = trainings.predict_seconds(settings, calibration, done)
    start = time.perf_counter()
    with _show_progress(console, total, *_make_time_columns()) as on_progress:
        try:
            for run in trainings.run_bench(settings, calibration, done, on_progress):
                runs.append(run)
                trainings.write_line(file, run.as_dict())
        except KeyboardInterrupt:
            return runs, True
    seconds = time.perf_counter() - start
    trainings.write_line(file, {"kind": "time", "announced_seconds": total, "seconds": seconds})
    console.print(f"The runs took {format_seconds(round(seconds))}. {format_seconds(round(total))} was announced.")
    return runs, False


def _read_stopped_bench(path: Path) -> tuple[BenchSettings, Calibration, list[TrainingRun], dict[str, Any]]:
    """Return the settings, the calibration, the finished runs and the header of a file of results."""
    header, runs = trainings.read_results(path)
    try:
        settings = BenchSettings.from_dict(header.unchecked["settings"])
        calibration = Calibration.from_dict(header.unchecked["calibration"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(
            f"resume ({path}) has no bench that can be continued ({error!r}). Start a new one without --resume."
        ) from error
    done = [run for run in runs if run.status in {"done", "does not fit"}]
    return settings, calibration, done, header.unchecked


def _show_results(
    as_json: bool, header: dict[str, Any], runs: list[TrainingRun], rankings: list[ProfileRanking], out: Path
) -> None:
    if as_json:
        for record in (header, *(run.as_dict() for run in runs), *(ranking.as_dict() for ranking in rankings)):
            typer.echo(json_format.dumps(record))
        return
    console = Console(highlight=False, markup=False)
    for part in trainings.draw_results(header, runs, rankings):
        console.print(part)
    console.print(f"Results: {out}", style="dim", soft_wrap=True)


def _require_sb3() -> None:
    if find_spec("stable_baselines3") is None:
        raise MissingPackageError(
            "holdall bench trains with stable-baselines3, which is not installed. Run: pip install 'holdall[sb3]'"
        )


bench = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
bench.command("profiles", cls=ListCommand)(profiles)
bench.command("buffers", cls=ListCommand)(buffers)
bench.command("search")(search)


@bench.callback()
def describe() -> None:
    """Measure on this machine: profiles of settings, buffers alone, or a search for settings."""

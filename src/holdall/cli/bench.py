"""`holdall bench`: which settings are best on this machine; `bench buffers`: which buffer is; `bench search`: a study.

Exit codes: 0 all is well, 1 an error that holdall raised, 2 a mistake on the command line, 3 some runs failed, 130
stopped with Ctrl-C: what was done is kept, and `--resume` does the rest.
"""

from __future__ import annotations

import json as json_format
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from holdall.bench.calibrate import Calibration, calibrated
from holdall.bench.ranking import rankings
from holdall.bench.result import Lines, Run, read, runs_of
from holdall.bench.run import announced, benched, header, turns
from holdall.bench.settings import Settings, settings_of
from holdall.bench.table import tables
from holdall.cli.bench_buffers import BuffersCommand, buffers
from holdall.cli.bench_search import search
from holdall.cli.lists import ListsGroup
from holdall.cli.verbosity import Verbose
from holdall.cli.width import wide_console
from holdall.errors import ArgumentError, MissingPackageError
from holdall.units import format_bytes

FAILED, STOPPED = 3, 130
_LONG_S = 3_600


class BenchGroup(ListsGroup):
    """Its options that take several words."""

    lists = ("--profiles", "--buffers")


bench = typer.Typer(cls=BenchGroup, invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)
bench.command("buffers", cls=BuffersCommand)(buffers)
bench.command("search")(search)


@bench.callback()
def profiles(
    context: typer.Context,
    env: Annotated[str, typer.Option(help="demo, an ID that gymnasium knows, or module:Class.")] = "demo",
    algo: Annotated[str, typer.Option(help="sac, td3, dqn or ppo.")] = "sac",
    profiles: Annotated[
        list[str] | None, typer.Option(help="memory-efficient fast balanced quality aggressive, or all.")
    ] = None,
    timesteps: Annotated[int | None, typer.Option(help="Steps to train, once the buffer is full.", min=50)] = None,
    seeds: Annotated[int, typer.Option(help="Trainings per profile and buffer.", min=1)] = 3,
    buffers: Annotated[list[str] | None, typer.Option(help="sb3 holdall: either or both.")] = None,
    limit: Annotated[
        str | None, typer.Option(help='What the profiles are shares of: "2GiB", or machine; for demo 2GiB.')
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="torch's threads; for demo 1, else its own number.", min=1)
    ] = None,
    fill: Annotated[bool, typer.Option(help="Fill buffers before training; without, memory is not ranked.")] = True,
    out: Annotated[Path, typer.Option(help="Results, a JSON object a line.")] = Path("results.jsonl"),
    resume: Annotated[Path | None, typer.Option(help="Finish a bench that was stopped: its results.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the lines in place of the table.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train every profile with every buffer, each in a fresh process, and say which is best where that can be told."""
    if context.invoked_subcommand is not None:
        return
    told = Console(stderr=True, highlight=False)
    _require_sb3()
    if resume is not None:
        settings, calibration, done, first = _resumed(resume)
        out = resume
    else:
        settings = settings_of(
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
        calibration, done = _calibrated(settings, told), []
        first = header(settings, calibration, announced(settings, calibration))
    _announce(settings, calibration, done, told)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(out.open("a" if resume else "w", encoding="utf-8"))
        except OSError as error:
            raise ArgumentError(f"out ({out}) cannot be written: {error.strerror}; name another file") from error
        lines = Lines(file)
        if resume is None:
            lines.write(first)
        runs, stopped = _run(settings, calibration, done, lines, told)
        found = rankings(runs, missing=len(turns(settings)) - len(runs))
        if not stopped:
            for ranking in found:
                lines.write(ranking.as_dict())
    _show(json, first, runs, found, out)
    if stopped:
        told.print(f"Stopped; {len(runs)} runs are kept. Go on with `holdall bench --resume {out}`.", style="yellow")
        raise typer.Exit(STOPPED)
    if any(run.status == "failed" for run in runs):
        raise typer.Exit(FAILED)


def _calibrated(settings: Settings, console: Console) -> Calibration:
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=1.0)
        return calibrated(settings, lambda what, done: bars.update(task, description=what, completed=done))


def _announce(settings: Settings, calibration: Calibration, done: list[Run], console: Console) -> None:
    console.print(f"Limit: {format_bytes(settings.limit_bytes)} ({settings.limit_said}).", soft_wrap=True)
    for name, size in calibration.sizes.items():
        more = f"; holdall's would hold {size.holdall_size:,}" if size.holdall_size else ""
        held = (
            f"{size.size:,} {'steps' if settings.on_policy else 'transitions'}{more}" if size.size else "nothing fits"
        )
        console.print(f"  {name}: {size.share:.0%}, {format_bytes(size.limit_bytes)}: {held}", soft_wrap=True)
    count = len(turns(settings)) - len(done)
    seconds = announced(settings, calibration, done)
    console.print(f"{count} runs, which take about {_minutes(seconds)}.", style="bold")
    if seconds > _LONG_S:
        console.print("Filling the buffers takes long; a lower --limit, fewer --profiles or --seeds make it shorter.")


def _run(
    settings: Settings, calibration: Calibration, done: list[Run], lines: Lines, console: Console
) -> tuple[list[Run], bool]:
    runs = list(done)
    total = announced(settings, calibration, done)
    start = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=total)
        try:
            for run in benched(
                settings, calibration, done, lambda what, behind: bars.update(task, description=what, completed=behind)
            ):
                runs.append(run)
                lines.write(run.as_dict())
        except KeyboardInterrupt:
            return runs, True
    took = time.perf_counter() - start
    lines.write({"kind": "time", "announced_seconds": total, "seconds": took})
    console.print(f"Took {_minutes(took)}; {_minutes(total)} was announced.")
    return runs, False


def _resumed(path: Path) -> tuple[Settings, Calibration, list[Run], dict[str, Any]]:
    first, records = read(path)
    try:
        settings, calibration = Settings.from_dict(first["settings"]), Calibration.from_dict(first["calibration"])
        done = [run for run in runs_of(records) if run.status in {"done", "does not fit"}]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"resume ({path}) holds no bench that can go on ({error!r}); begin a new one") from error
    return settings, calibration, done, first


def _show(as_json: bool, first: dict[str, Any], runs: list[Run], found: list[Any], out: Path) -> None:
    if as_json:
        for record in (first, *(run.as_dict() for run in runs), *(ranking.as_dict() for ranking in found)):
            typer.echo(json_format.dumps(record))
        return
    console = wide_console()
    for part in tables(first, runs, found):
        console.print(part, soft_wrap=True)
    console.print(f"Results: {out}", style="dim", soft_wrap=True)


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 2 * _LONG_S else f"{seconds / 3_600:.1f} h"


def _require_sb3() -> None:
    import importlib.util  # noqa: PLC0415 asked here alone

    if importlib.util.find_spec("stable_baselines3") is None:
        raise MissingPackageError("holdall bench trains with stable-baselines3; run `pip install 'holdall[sb3]'`")

"""`holdall bench buffers`: replay buffers alone, against whatever is installed beside holdall."""

from __future__ import annotations

import json as json_format
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from holdall.bench.buffers.cases import CASES, Case, case_named
from holdall.bench.buffers.compare import compared
from holdall.bench.buffers.table import cases_of, drawn, remarks
from holdall.bench.buffers.ways import ways_of
from holdall.cli.lists import ListsCommand
from holdall.cli.verbosity import Verbose
from holdall.cli.width import wide_console
from holdall.errors import ArgumentError

STOPPED = 130


class BuffersCommand(ListsCommand):
    """Its options that take several words."""

    lists = ("--case", "--libraries", "--trace")


def buffers(
    case: Annotated[list[str] | None, typer.Option(help=f"What is played: {', '.join(CASES)}.")] = None,
    trace: Annotated[list[Path] | None, typer.Option(help="Recorded traces (.npz), in place of cases.")] = None,
    env: Annotated[str | None, typer.Option(help="An environment, ID or module:Class, in place of cases.")] = None,
    wrapper: Annotated[str, typer.Option(help="atari: Stable-Baselines3's AtariWrapper.")] = "",
    frame_stack: Annotated[int, typer.Option(help="Frames that are stacked.", min=1)] = 1,
    libraries: Annotated[
        list[str] | None, typer.Option(help="sb3, sb3-extra-buffers, cpprb, torchrl, tianshou, holdall, or all.")
    ] = None,
    transitions: Annotated[
        int | None, typer.Option(help="Held at the end; 20,000, or all of a trace.", min=512)
    ] = None,
    rounds: Annotated[int, typer.Option(help="Processes per library; figures are medians over them.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="Write the results there, a JSON object a line.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the lines in place of the tables.")] = False,
    verbose: Verbose = False,
) -> None:
    """Measure replay buffers alone: memory, add, sample, save, load, and whether the data came back right."""
    cases = _cases(case, trace, env, wrapper, frame_stack)
    ways = ways_of(libraries or ["all"])
    records: list[dict[str, Any]] = []
    stopped = False
    told = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    with ExitStack() as stack:
        lines = None if out is None else stack.enter_context(_opened(out))
        bars = stack.enter_context(Progress(*columns, console=told, transient=True))
        task = bars.add_task("", total=1.0)
        try:
            for record in compared(
                cases, ways, transitions, rounds, lambda what, done: bars.update(task, description=what, completed=done)
            ):
                records.append(record)
                if lines is not None:
                    print(json_format.dumps(record), file=lines, flush=True)
                if json:
                    typer.echo(json_format.dumps(record))
        except KeyboardInterrupt:
            stopped = True
    if not json:
        _show(records)
    if stopped:
        told.print("Stopped; the rounds that were done are kept.", style="yellow")
        raise typer.Exit(STOPPED)


def _cases(names: list[str] | None, traces: list[Path] | None, env: str | None, wrapper: str, stack: int) -> list[Case]:
    if sum(bool(given) for given in (names, traces, env)) > 1:
        raise ArgumentError("case, trace and env are three ways to say what is played; give one of them")
    if traces:
        for file in traces:
            if not file.is_file():
                raise ArgumentError(f"trace ({file}) is no file; name an .npz file, or record one with --env")
        return [Case(file.stem, file=file) for file in traces]
    if env:
        return [Case(env, env, wrapper, stack)]
    return [case_named(name) for name in names or ["atari", "camera"]]


def _opened(path: Path) -> Any:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            f"out ({path}) cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from error


def _show(records: list[dict[str, Any]]) -> None:
    console = wide_console()
    for case in cases_of(records):
        console.print(drawn(records, case), soft_wrap=True)
        console.print()
    for line in remarks(records):
        console.print(line, style="dim", highlight=False, soft_wrap=True)

"""`holdall bench search`: the best capacity, batch, environments and threads under a memory limit."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from holdall.bench.search import Found, Search
from holdall.bench.settings import settings_of
from holdall.cli.verbosity import Verbose
from holdall.cli.width import wide_console
from holdall.units import format_bytes

STOPPED = 130
_SHOWN = 12


def search(
    env: Annotated[str, typer.Option(help="demo, an ID that gymnasium knows, or module:Class.")] = "demo",
    algo: Annotated[str, typer.Option(help="sac, td3 or dqn.")] = "sac",
    buffer: Annotated[str, typer.Option(help="sb3 or holdall.")] = "holdall",
    trials: Annotated[int, typer.Option(help="Trials, those that the storage holds already among them.", min=1)] = 20,
    timesteps: Annotated[int | None, typer.Option(help="Steps to train, once the buffer is full.", min=50)] = None,
    limit: Annotated[str | None, typer.Option(help='What a run may take: "2GiB", or machine; for demo 2GiB.')] = None,
    storage: Annotated[Path, typer.Option(help="Remembers trials; the same one again goes on.")] = Path(
        "search.journal"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print trials as JSON lines in place of the table.")] = False,
    verbose: Verbose = False,
) -> None:
    """Search for settings that learn from most samples per second with the largest memory that fits."""
    told = Console(stderr=True, highlight=False)
    study = Search(settings_of(env, algo, ["balanced"], timesteps, 1, [buffer], limit), storage)
    if before := len(study.found()):
        told.print(f"{before} trials are in {storage} already.")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=told, transient=True) as bars:
        task = bars.add_task("", total=trials, completed=before)
        try:
            for found in study.run(trials, lambda what, share: bars.update(task, description=f"{what}, {share:.0%}")):
                bars.update(task, advance=1)
                if json:
                    typer.echo(json_format.dumps(asdict(found)))
        except KeyboardInterrupt:
            told.print(f"Stopped; the trials are in {storage}, and the same command goes on.", style="yellow")
            raise typer.Exit(STOPPED) from None
    if not json:
        _show(study)


def _show(study: Search) -> None:
    console = wide_console()
    found = study.found()
    best = sorted((one for one in found if one.is_best), key=lambda one: -one.capacity)
    table = Table(title="No other trial is both faster and larger", title_justify="left", box=None, pad_edge=False)
    for number, head in enumerate(("capacity", "batch", "envs", "threads", "samples/s", "steps/s", "peak memory")):
        table.add_column(head, justify="left" if number < 0 else "right")
    for one in best[:_SHOWN]:
        table.add_row(*_cells(one))
    console.print(table)
    for state in ("pruned", "failed"):
        those = [one for one in found if one.state == state]
        if those:
            console.print(f"{len(those)} {state}, as trial {those[-1].number}: {those[-1].reason}", soft_wrap=True)
    if best:
        fastest = max(best, key=lambda one: one.samples_per_second or 0.0)
        console.print(
            f"\nThe fastest of them, {fastest.capacity:,} transitions:\n[cyan]{study.code(fastest)}[/]", soft_wrap=True
        )


def _cells(one: Found) -> tuple[str, ...]:
    counts = (one.settings[name] for name in ("capacity", "batch_size", "num_envs", "threads"))
    samples, steps = one.samples_per_second or 0.0, one.steps_per_second or 0.0
    return (*(f"{count:,}" for count in counts), f"{samples:,.0f}", f"{steps:.1f}", format_bytes(one.peak_bytes or 0))

"""`holdall trim`: have a process return free memory that its C library keeps to the system."""

from __future__ import annotations

import json as json_
from typing import Annotated

import typer

from holdall.cli.conventions import AsJson, Verbose, option
from holdall.errors import ArgumentError
from holdall.tools.watch.agent_files import trim_process, trim_self
from holdall.tools.watch.process_watcher import ProcessWatcher
from holdall.units import format_bytes


def trim(
    pid: Annotated[int | None, typer.Argument(help="A process with an agent: see `holdall watch`.")] = None,
    this: Annotated[bool, option("Trim this very process, to see that it works.", "--self")] = False,
    dry_run: Annotated[bool, option("Only say what a trim would return.", "--dry-run")] = False,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Return free memory of a process to the system."""
    if (pid is None) != this:
        raise ArgumentError("trim takes a process id, or --self; name one of them")
    would = None if pid is None else ProcessWatcher(pid).read().of("heap_retained")
    words: dict[str, int | None] = {"pid": pid, "would_return": would}
    if not dry_run:
        done = trim_self() if pid is None else trim_process(pid)
        words |= {"returned": done.returned, "before": done.before, "after": done.after}
    if json:
        typer.echo(json_.dumps(words))
        return
    if would is not None:
        typer.echo(f"would return up to {format_bytes(would)}")
    if not dry_run:
        span = f"{format_bytes(done.before)} before, {format_bytes(done.after)} after"
        typer.echo(f"returned {format_bytes(done.returned)}: {span}")

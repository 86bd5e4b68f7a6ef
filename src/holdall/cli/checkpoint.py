"""`holdall checkpoint`: list, verify, clean up, import and export checkpoints.

Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake on the command line, 3 something is damaged.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json as json_
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress
from rich.console import Console
from rich.table import Table

from holdall.checkpoint import (
    CheckpointReader,
    Manifest,
    collect_all,
    find_damage,
    open_reader,
    require_whole,
)
from holdall.cli import AsJson, OneLineErrors, OptInt, Verbose, option
from holdall.errors import ArgumentError, CheckpointError, DamageError
from holdall.memory import ReplayMemory
from holdall.sampling import Uniform
from holdall.schema import malformed_refused, schema_of
from holdall.tools.datasets import export_minari, import_minari, memory_from_arrays
from holdall.units import counted, format_bytes

_MINARI = "minari:"
DAMAGED = 3  # exit code: the checkpoints were read, and something is damaged
checkpoint = typer.Typer(
    cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="List, check, clean up, export and import checkpoints.",
)  # fmt: skip
Url = Annotated[str, typer.Argument(help="A directory, or a prefix of an object store: s3://, gs://, az://.")]


class PlaceholderSampler(Uniform):
    """Stands in for whatever sampler a memory was saved with: nothing is drawn."""


@checkpoint.command()
def ls(url: Url, json: AsJson = False, verbose: Verbose = False) -> None:
    """List checkpoints, newest first."""
    reader = open_reader(url)
    reader.require()
    sizes = reader.file_sizes()
    entries = [_describe(reader, number, sizes) for number in reader.numbers()]
    if json:
        typer.echo(json_.dumps({"url": reader.url, "checkpoints": entries}))
        return
    table = Table(box=None, pad_edge=False)  # lines between columns would leave a terminal of 80 no room for dates
    for name in ("number", "saved (UTC)", "transitions", "lanes", "segments", "bytes", "files", "state"):
        table.add_column(name, no_wrap=name not in {"files", "state"}, overflow="fold")
    for entry in entries:
        saved = entry["saved"].partition("+")[0]
        counts = (str(entry[name]) for name in ("transitions", "num_envs", "segments"))
        table.add_row(str(entry["number"]), saved, *counts,
                      format_bytes(entry["bytes"]), ", ".join(entry["attached"]) or "-", entry["state"])  # fmt: skip
    Console(markup=False).print(table)


def _describe(reader: CheckpointReader, number: int, sizes: dict[str, int]) -> dict[str, Any]:
    entry: dict[str, Any] = dict.fromkeys(("saved", "transitions", "num_envs", "segments"), "?")
    entry |= {"number": number, "bytes": 0, "attached": [], "state": "whole"}
    try:
        manifest = reader.manifest(number)
        entry |= _facts(manifest)
        require_whole(manifest, reader, sizes)
    except (DamageError, CheckpointError) as error:
        entry["state"] = str(error)
    return entry


def _facts(manifest: Manifest) -> dict[str, Any]:
    with malformed_refused("its schema"):
        lanes = schema_of(manifest.schema).num_envs
    transitions = (manifest.next_tick - manifest.first_tick) * lanes
    return {
        "saved": _date(manifest.time),
        "transitions": transitions + sum(shard.transitions for shard in manifest.shards),
        "num_envs": lanes,
        "segments": len(manifest.segments),
        "bytes": sum(manifest.files.values()) + sum(shard.nbytes for shard in manifest.shards),
        "attached": sorted(manifest.attached),
    }


def _date(seconds: float) -> str:
    """Return a date; a manifest may hold any number."""
    try:
        saved = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "?"
    return saved.isoformat(sep=" ", timespec="seconds")


@checkpoint.command()
def verify(
    url: Url,
    number: Annotated[OptInt, option("Only this checkpoint; all of them otherwise.")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Read every byte of the checkpoints and compare it with its checksum."""
    reader = open_reader(url)
    reader.require()
    numbers = reader.numbers() if number is None else [number]
    if not numbers:
        raise CheckpointError(f"{reader.url} holds no checkpoint")
    results = []
    with _progress(progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()) as bar:
        for each in numbers:
            try:
                manifest = reader.manifest(each)
            except DamageError as error:
                results.append({"number": each, "damages": [{"file": "", "start": 0, "reason": str(error)}]})
                continue
            nbytes = [ref.nbytes for ref in dict.fromkeys(manifest.refs)] + [shard.nbytes for shard in manifest.shards]
            task = bar.add_task(f"checkpoint {each}", total=sum(nbytes))
            found = find_damage(reader, manifest, functools.partial(bar.advance, task))
            reasons = [{"file": one.file, "start": one.start, "reason": one.reason} for one in found]
            results.append({"number": each, "damages": reasons})
    if json:
        typer.echo(json_.dumps({"url": reader.url, "checkpoints": results}))
    else:
        for result in results:
            for damage in result["damages"]:  # type: ignore[attr-defined]
                typer.echo(f"checkpoint {result['number']}: {damage['reason']}")
            if not result["damages"]:
                typer.echo(f"checkpoint {result['number']} is whole")
    if any(result["damages"] for result in results):
        raise typer.Exit(DAMAGED)


@checkpoint.command()
def gc(
    url: Url,
    keep: Annotated[int, option("How many checkpoints stay.", min=1)] = 3,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Remove all but the newest checkpoints, and every file that none of them names."""
    reader = open_reader(url)
    reader.require()
    freed = collect_all(reader, keep)
    left = reader.numbers()
    words = {"url": reader.url, "freed_bytes": freed, "left": left}
    typer.echo(json_.dumps(words) if json else f"{format_bytes(freed)} freed, {counted(len(left), 'checkpoint')} left")


@checkpoint.command()
def export(
    url: Url,
    dataset: Annotated[str, typer.Argument(help="The Minari dataset to make: robots/dog-v0.")],
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write the newest checkpoint's transitions as a local Minari dataset, without loss."""
    with ReplayMemory.load(url, sampler=PlaceholderSampler()) as memory, _transition_progress("exporting") as advance:
        episodes, transitions = export_minari(memory, dataset, advance), len(memory)
    if json:
        typer.echo(json_.dumps({"dataset": dataset, "transitions": transitions, "episodes": episodes}))
        return
    typer.echo(
        f"{counted(transitions, 'transition')} in {counted(episodes, 'episode')}: minari.load_dataset({dataset!r})"
    )


@checkpoint.command("import")
def import_(
    source: Annotated[str, typer.Argument(help="Stable-Baselines3's buffer.pkl, or minari:robots/dog-v0.")],
    url: Url,
    trust: Annotated[
        bool, option("Unpickle it, which runs the code that it holds: only for your own files.", "--trust")
    ] = False,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Turn a pickled buffer of Stable-Baselines3, or a local Minari dataset, into a checkpoint."""
    if source.startswith(_MINARI):
        with _transition_progress("importing") as advance:
            imported = import_minari(source.removeprefix(_MINARI), advance)
        _save(imported, url, json)
        return
    file = Path(source)
    if not file.is_file():
        raise ArgumentError(f"source ({source!r}) is no file; name a buffer that model.save_replay_buffer wrote")
    if not trust:
        raise ArgumentError(
            f"source ({source!r}) is a pickle, which runs whatever code it holds when it is read; if it is your own, "
            "pass --trust"
        )
    typer.echo(f"warning: unpickling {file} in a process of its own; it runs the code that it holds", err=True)
    with tempfile.TemporaryDirectory(prefix="holdall-") as folder:
        program = [sys.executable, "-P", "-m", "holdall.tools.datasets", str(file), folder]
        done = subprocess.run(program, check=False, capture_output=True, text=True)
        if done.returncode:
            signal = f"killed by signal {-done.returncode}" if done.returncode < 0 else ""
            reason = done.stderr.strip().rpartition("\n")[2] or signal or f"exit code {done.returncode}"
            raise ArgumentError(f"source ({source!r}) could not be read as a replay buffer ({reason})")
        with _transition_progress("importing") as advance:
            imported = memory_from_arrays(Path(folder), advance)
        _save(imported, url, json)


def _save(memory: ReplayMemory, url: str, as_json: bool) -> None:
    with memory, _progress(progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()) as bar:
        task = bar.add_task("saving", total=None)
        saved = memory.save(url, progress=lambda _, done, total: bar.update(task, completed=done, total=total)).result()
    if as_json:
        facts = {"number": saved.number, "transitions": saved.transitions, "bytes_written": saved.bytes_written}
        typer.echo(json_.dumps({"url": url} | facts))
        return
    typer.echo(
        f"checkpoint {saved.number} of {counted(saved.transitions, 'transition')}, {format_bytes(saved.bytes_written)}"
    )


@contextlib.contextmanager
def _transition_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar over transitions, with rate and time left; yield the function that moves it."""
    with _progress(progress.MofNCompleteColumn(), progress.TaskProgressColumn(show_speed=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _progress(*columns: progress.ProgressColumn) -> progress.Progress:
    shown = (progress.TextColumn("{task.description}"), progress.BarColumn(), *columns, progress.TimeRemainingColumn())
    return progress.Progress(*shown, console=Console(stderr=True))

"""`holdall checkpoint`: list, verify, clean up, import and export checkpoints.

Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake on the command line, 3 something is damaged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json as json_
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress
from rich.console import Console

from holdall.checkpoint import (
    CheckpointReader,
    Damage,
    Manifest,
    collect_all,
    find_damage,
    is_remote,
    normalized_url,
    open_reader,
    require_whole,
)
from holdall.checks import refuse_malformed
from holdall.cli import AsJson, OneLineErrors, OptInt, Verbose, option
from holdall.dataset import METADATA
from holdall.errors import ArgumentError, BlobMissingError, CheckpointError, DamageError, HoldallError
from holdall.memory import ReplayMemory
from holdall.sampling import Uniform
from holdall.schema_json import schema_from_json
from holdall.tools.datasets import export_minari, import_minari, memory_from_arrays
from holdall.tools.exports import export_npz, export_sb3
from holdall.tools.imports import READERS, import_recording
from holdall.units import count_noun, format_bytes

_COMPLETE = "complete"
"""State of a checkpoint whose files all exist with all their bytes."""
_MINARI = "minari:"
_PICKLE_SUFFIX = ".pkl"
_DATASET_NAME = re.compile(r".*-v[0-9]+")
_FILE_EXPORTS = {".npz": export_npz, _PICKLE_SUFFIX: export_sb3}
DAMAGED = 3
"""Exit code: the checkpoints were read, and something is damaged."""
checkpoint = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="List, check, clean up, export and import checkpoints.",
)
Url = Annotated[str, typer.Argument(help="A directory, or a prefix of an object store: s3://, gs://, az://.")]


class PlaceholderSampler(Uniform):
    """Replaces the saved sampler, whose class may be the user's own. The commands draw no batches."""


@checkpoint.command()
def ls(url: Url, json: AsJson = False, verbose: Verbose = False) -> None:
    """List checkpoints, newest first. The state says whether all files exist. `verify` reads them."""
    reader = open_reader(url)
    reader.require_checkpoint()
    sizes = reader.file_sizes()
    entries = [_describe(reader, number, sizes) for number in reader.numbers()]
    entries = [entry for entry in entries if entry["state"] == _COMPLETE or not _is_removed(reader, entry["number"])]
    if json:
        typer.echo(json_.dumps({"url": reader.url, "checkpoints": entries}))
        return
    for line in _format_table(entries):
        typer.echo(line)


def _format_table(entries: list[dict[str, Any]]) -> list[str]:
    """Return a line of at most 80 columns per checkpoint. Attached files and damage have lines of their own."""
    lines = [
        f"{'number':>6}  {'saved (UTC)':<19}  {'transitions':>12}  {'lanes':>5}  {'segments':>8}  {'bytes':>10}  state"
    ]
    for entry in entries:
        saved = entry["saved"].partition("+")[0]
        state = _COMPLETE if entry["state"] == _COMPLETE else "damaged"
        lines.append(
            f"{entry['number']:>6}  {saved:<19}  {entry['transitions']:>12}  {entry['num_envs']:>5}  "
            f"{entry['segments']:>8}  {format_bytes(entry['bytes']):>10}  {state}"
        )
        if entry["attached"]:
            lines.append(f"        attached: {', '.join(entry['attached'])}")
        if entry["state"] != _COMPLETE:
            lines.append(f"        {entry['state']}")
    return lines


def _describe(reader: CheckpointReader, number: int, sizes: dict[str, int]) -> dict[str, Any]:
    entry: dict[str, Any] = dict.fromkeys(("saved", "transitions", "num_envs", "segments"), "?")
    entry |= {"number": number, "bytes": 0, "attached": [], "state": _COMPLETE}
    try:
        manifest = reader.manifest(number)
        entry |= _summarize(manifest)
        require_whole(manifest, reader, sizes)
    except (DamageError, CheckpointError) as error:
        entry["state"] = str(error)
    return entry


def _summarize(manifest: Manifest) -> dict[str, Any]:
    with refuse_malformed("its schema"):
        lanes = schema_from_json(manifest.schema).num_envs
    return {
        "saved": _format_date(manifest.time),
        "transitions": manifest.transitions,
        "num_envs": lanes,
        "segments": len(manifest.segments),
        "bytes": sum(manifest.files.values()) + sum(shard.nbytes for shard in manifest.shards),
        "attached": sorted(manifest.attached),
    }


def _format_date(seconds: float) -> str:
    """Return a date, or "?" if no date has this number: a manifest may contain any number."""
    try:
        saved = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return "?"
    return saved.isoformat(sep=" ", timespec="seconds")


@checkpoint.command()
def verify(
    url: Url,
    number: Annotated[OptInt, option("Number of the checkpoint. Default: all checkpoints.")] = None,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Read every byte of the checkpoints and compare it with its checksum."""
    reader = open_reader(url)
    reader.require_checkpoint()
    found: dict[int, _Verified] = {}
    with _make_progress(progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()) as bar:
        for checked_number in reader.numbers() if number is None else [number]:
            try:
                verified = _verify(reader, checked_number, bar)
            except BlobMissingError as error:
                if number is not None:
                    raise
                verified = _Verified(None, [Damage("", 0, str(error))])
            if verified.damages and _is_removed(reader, checked_number):
                typer.echo(f"checkpoint {checked_number} was removed meanwhile", err=True)
                continue
            found[checked_number] = verified
    _print_verified(reader.url, found, json)
    if any(verified.damages for verified in found.values()):
        raise typer.Exit(DAMAGED)


@dataclasses.dataclass(frozen=True)
class _Verified:
    """A checkpoint that was read completely."""

    transitions: int | None  # None: the manifest cannot be read.
    damages: list[Damage]


def _print_verified(url: str, found: dict[int, _Verified], as_json: bool) -> None:
    """Print the transitions and the damages of every checkpoint, by its number."""
    if as_json:
        entries = [{"number": number, **dataclasses.asdict(verified)} for number, verified in found.items()]
        typer.echo(json_.dumps({"url": url, "checkpoints": entries}))
        return
    for number, verified in found.items():
        for damage in verified.damages:
            typer.echo(f"checkpoint {number}: {damage.reason}")
        if not verified.damages and verified.transitions is not None:
            typer.echo(f"checkpoint {number} is intact: {count_noun(verified.transitions, 'transition')}")


def _is_removed(reader: CheckpointReader, number: int) -> bool:
    """Return whether a checkpoint was removed since it was listed, by a memory that saves to the place."""
    return number not in reader.numbers()


def _verify(reader: CheckpointReader, number: int, bar: progress.Progress) -> _Verified:
    """Read a checkpoint completely."""
    try:
        manifest = reader.manifest(number)
    except DamageError as error:
        return _Verified(None, [Damage("", 0, str(error))])
    nbytes = [ref.nbytes for ref in dict.fromkeys(manifest.refs)] + [shard.nbytes for shard in manifest.shards]
    task = bar.add_task(f"checkpoint {number}", total=sum(nbytes))
    return _Verified(manifest.transitions, find_damage(reader, manifest, functools.partial(bar.advance, task)))


@checkpoint.command()
def gc(
    url: Url,
    keep: Annotated[int, option("Number of newest checkpoints to keep.", min=1)] = 3,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Remove all but the newest checkpoints, and every file that none of them names."""
    reader = open_reader(url)
    reader.require_checkpoint()
    with _file_progress("removing") as advance:
        freed = collect_all(reader, keep, advance)
    left = reader.numbers()
    if json:
        typer.echo(json_.dumps({"url": reader.url, "freed_bytes": freed, "left": left}))
        return
    typer.echo(f"{format_bytes(freed)} freed, {count_noun(len(left), 'checkpoint')} left")


@checkpoint.command()
def export(
    url: Url,
    target: Annotated[
        str,
        typer.Argument(
            help="A file that ends with .npz, a file that ends with .pkl for load_replay_buffer of "
            "Stable-Baselines3, or the name of a Minari dataset: robots/dog-v0."
        ),
    ],
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Write the transitions of the newest checkpoint to a file or a local Minari dataset, without loss."""
    if Path(target).suffix in _FILE_EXPORTS:
        _export_file(url, Path(target), json)
        return
    if not _DATASET_NAME.fullmatch(target):
        raise ArgumentError(
            f"target ({target!r}) is of an unknown kind. Pass a file that ends with .npz or .pkl, or the name of a "
            "Minari dataset with its version, as in robots/dog-v0."
        )
    with ReplayMemory.load(url, sampler=PlaceholderSampler()) as memory, _transition_progress("exporting") as advance:
        episodes = export_minari(memory, target, advance)
        transitions = len(memory)
    if json:
        typer.echo(json_.dumps({"dataset": target, "transitions": transitions, "episodes": episodes}))
        return
    typer.echo(
        f"{count_noun(transitions, 'transition')} in {count_noun(episodes, 'episode')}: minari.load_dataset({target!r})"
    )


def _export_file(url: str, file: Path, as_json: bool) -> None:
    """Write the newest checkpoint to an .npz file, or to a replay buffer of Stable-Baselines3."""
    if file.exists():
        raise ArgumentError(f"target ({str(file)!r}) already exists. Choose another name.")
    with ReplayMemory.load(url, sampler=PlaceholderSampler()) as memory, _transition_progress("exporting") as advance:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            transitions = _FILE_EXPORTS[file.suffix](memory, file, advance)
        except HoldallError:
            raise
        except OSError as error:
            raise ArgumentError(
                f"target ({str(file)!r}) cannot be written: {error}. Free disk space, or choose another place."
            ) from error
    if as_json:
        typer.echo(json_.dumps({"file": str(file), "transitions": transitions}))
        return
    typer.echo(f"{count_noun(transitions, 'transition')} in {file}")


@checkpoint.command("import")
def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="lerobot:FOLDER, robomimic:FILE.hdf5, minari:robots/dog-v0, or buffer.pkl of Stable-Baselines3."
        ),
    ],
    url: Url,
    prefer: Annotated[str, option("How much slower sampling may get: speed, balanced or memory.")] = "balanced",
    drop_last: Annotated[
        bool,
        option("Leave out steps without a next observation. Default: repeat their own observation.", "--drop-last"),
    ] = False,
    trust: Annotated[
        bool, option("Unpickle the file, which runs the code in it: only for your own files.", "--trust")
    ] = False,
    json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Turn a recorded data set, or a pickled buffer of Stable-Baselines3, into a checkpoint."""
    kind, _, place = source.partition(":")
    if drop_last and kind not in READERS:
        raise ArgumentError(
            f"--drop-last does not apply to source ({source!r}). Its steps have their own next observations. Leave out "
            "--drop-last."
        )
    if kind not in READERS and not source.startswith(_MINARI):
        _import_pickle(source, url, trust, json)
        return
    with _new_spill_folder(url) as folder, _transition_progress("importing") as advance:
        settings = {"budget": None, "spill_dir": folder, "prefer": prefer}
        if kind in READERS:
            recording = READERS[kind](Path(place))
            imported = import_recording(recording, advance, drop_last=drop_last, **settings)
            metadata = recording.metadata
        else:
            imported = import_minari(place, advance, **settings)
            metadata = {"source": "minari", "dataset": place}
        _save(imported, url, json, {METADATA: json_.dumps(metadata).encode()})


def _import_pickle(source: str, url: str, trust: bool, as_json: bool) -> None:
    """Turn a replay buffer that Stable-Baselines3 pickled into a checkpoint. Another process unpickles it."""
    file = Path(source)
    if file.suffix != _PICKLE_SUFFIX:
        raise ArgumentError(
            f"source ({source!r}) is of an unknown kind. Pass lerobot:FOLDER, robomimic:FILE.hdf5, "
            "minari:robots/dog-v0, or a .pkl file that model.save_replay_buffer of Stable-Baselines3 wrote."
        )
    if not file.is_file():
        raise ArgumentError(f"source ({source!r}) is not a file. Pass a file that model.save_replay_buffer wrote.")
    if not trust:
        raise ArgumentError(
            f"source ({source!r}) is a pickle, which can run code when it is read. If you trust the file, pass --trust."
        )
    typer.echo(f"warning: unpickling {file} in a process of its own. This runs the code in the file.", err=True)
    with tempfile.TemporaryDirectory(prefix="holdall-") as folder:
        program = [sys.executable, "-P", "-m", "holdall.tools.datasets", str(file), folder]
        done = subprocess.run(program, check=False, capture_output=True, text=True)
        if done.returncode:
            signal = f"killed by signal {-done.returncode}" if done.returncode < 0 else ""
            reason = done.stderr.strip().rpartition("\n")[2] or signal or f"exit code {done.returncode}"
            raise ArgumentError(
                f"source ({source!r}) could not be read as a replay buffer ({reason}). Pass a file that "
                "model.save_replay_buffer wrote."
            )
        with _transition_progress("importing") as advance:
            imported = memory_from_arrays(Path(folder), advance)
        _save(imported, url, as_json)


@contextlib.contextmanager
def _new_spill_folder(url: str) -> Iterator[str]:
    """Yield a temporary folder on the disk of the new checkpoint, so that importing needs little memory."""
    location = normalized_url(url)
    parent = None
    if not is_remote(location):
        parent = Path(location).parent
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="holdall-import-", dir=parent) as folder:
        yield folder


def _save(memory: ReplayMemory, url: str, as_json: bool, attach: dict[str, bytes] | None = None) -> None:
    with memory, _make_progress(progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()) as bar:
        task = bar.add_task("saving", total=None)
        handle = memory.save(
            url, attach=attach, progress=lambda _, done, total: bar.update(task, completed=done, total=total)
        )
        saved = handle.result()
    if as_json:
        summary = {"url": url, "number": saved.number, "transitions": saved.transitions}
        typer.echo(json_.dumps(summary | {"bytes_written": saved.bytes_written}))
        return
    typer.echo(
        f"checkpoint {saved.number} of {count_noun(saved.transitions, 'transition')}, "
        f"{format_bytes(saved.bytes_written)}"
    )


@contextlib.contextmanager
def _transition_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with a count and the rate of transitions. Yield the function that moves it."""
    with _make_progress(progress.MofNCompleteColumn(), progress.TaskProgressColumn(show_speed=True)) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def _file_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with a count of files, from the first file on. Yield the function that moves it."""
    with _make_progress(progress.MofNCompleteColumn()) as bar:
        task = bar.add_task(label, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _make_progress(*columns: progress.ProgressColumn) -> progress.Progress:
    shown = (progress.TextColumn("{task.description}"), progress.BarColumn(), *columns, progress.TimeRemainingColumn())
    return progress.Progress(*shown, console=Console(stderr=True))

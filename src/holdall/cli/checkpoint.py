"""`holdall checkpoint`: list, verify, clean up, import and export checkpoints.

An exported episode holds transitions whose observations follow each other; where they do not, a new episode begins.
Numbers and images are stored without loss. A pickle can run code, so `python -m holdall.cli.checkpoint FILE DIR` reads
it in a process of its own and writes only arrays; `memory_from_arrays` reads these.
Exit codes: 0 success, 1 an error that holdall raised, 2 a mistake on the command line, 3 something is damaged.
"""

from __future__ import annotations

import contextlib
import datetime
import json as json_
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from gymnasium import spaces
from numpy.typing import NDArray
from rich import progress
from rich.console import Console
from rich.table import Table

from holdall.checkpoint import CheckpointReader, Manifest, collect_all, damages, open_reader, open_writer, require_whole
from holdall.cli import AsJson, OneLineErrors, OptInt, Verbose, option
from holdall.errors import ArgumentError, CheckpointError, DamageError, MissingPackageError
from holdall.native import chosen_kernels
from holdall.replay import ReplayMemory
from holdall.sampling import Uniform
from holdall.schema import Tree, malformed_refused, schema_of
from holdall.space_leaves import stored_space
from holdall.units import counted, format_bytes

_MINARI = "minari:"
DAMAGED = 3  # exit code: the checkpoints were read, and something is damaged
checkpoint = typer.Typer(
    cls=OneLineErrors, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="List, check, clean up and import checkpoints.",
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
    Console().print(table)


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
    coder = chosen_kernels().coder
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
            found = damages(reader, manifest, coder, lambda nbytes, task=task: bar.advance(task, nbytes))  # type: ignore[misc]
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
    open_reader(url).require()
    place = open_writer(url)
    try:
        freed = collect_all(place, keep)
        left = place.reader.numbers()
    finally:
        place.close()
    words = {"url": place.url, "freed_bytes": freed, "left": left}
    typer.echo(json_.dumps(words) if json else f"{format_bytes(freed)} freed, {counted(len(left), 'checkpoint')} left")


@checkpoint.command()
def export(
    url: Url,
    dataset: Annotated[str, typer.Argument(help="The Minari dataset to make: robots/dog-v0.")],
    verbose: Verbose = False,
) -> None:
    """Write the newest checkpoint's transitions as a local Minari dataset, without loss."""
    with ReplayMemory.load(url, sampler=PlaceholderSampler()) as memory, _transition_progress("exporting") as advance:
        episodes, transitions = export_minari(memory, dataset, advance), len(memory)
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
    verbose: Verbose = False,
) -> None:
    """Turn a pickled buffer of Stable-Baselines3, or a local Minari dataset, into a checkpoint."""
    if source.startswith(_MINARI):
        with _transition_progress("importing") as advance:
            imported = import_minari(source.removeprefix(_MINARI), advance)
        _save(imported, url)
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
        program = [sys.executable, "-m", "holdall.cli.checkpoint", str(file), folder]
        done = subprocess.run(program, check=False, capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise ArgumentError(f"source ({source!r}) could not be read as a replay buffer ({reason})")
        with _transition_progress("importing") as advance:
            imported = memory_from_arrays(Path(folder), advance)
        _save(imported, url)


def _save(memory: ReplayMemory, url: str) -> None:
    with memory, _progress(progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()) as bar:
        task = bar.add_task("saving", total=None)
        saved = memory.save(url, progress=lambda _, done, total: bar.update(task, completed=done, total=total)).result()
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


_FLUSH_BYTES = 64 * 2**20
_STEPS_AT_ONCE = 256

OnProgress = Callable[[int, int], None]
"""Gets how many transitions are done, and how many there are."""
_Episode = dict[str, list[NDArray[Any]]]
"""The arrays of consecutive transitions by field, one for every leaf."""


def export_minari(memory: ReplayMemory, dataset_id: str, on_progress: OnProgress = lambda _done, _all: None) -> int:
    """Write all transitions of a memory, lane by lane, as a local Minari dataset; return its episodes."""
    minari, schema = _minari(), memory.schema
    path = _new_dataset_path(minari, dataset_id)
    settings = {
        "observation_space": _space_of(schema.observation),
        "action_space": _space_of(schema.action),
        "jpeg_encoding": False,  # it would lose bits
    }
    dataset: Any = None
    count, done, held, buffers = 0, 0, 0, []
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, path, ignore_errors=True)  # half a dataset is in the way of the next try
        for episode in _episodes(memory):
            observed = zip(episode["obs"], episode["next_obs"], strict=True)
            buffers.append(
                minari.data_collector.EpisodeBuffer(
                    observations=schema.observation.build([np.concatenate([rows, end[-1:]]) for rows, end in observed]),
                    actions=schema.action.build(episode["action"]),
                    rewards=episode["reward"][0],
                    terminations=episode["terminated"][0],
                    truncations=episode["truncated"][0],
                )
            )
            done += len(episode["reward"][0])
            on_progress(done, len(memory))
            count, held = count + 1, held + sum(array.nbytes for arrays in episode.values() for array in arrays)
            if held >= _FLUSH_BYTES:
                dataset, held, buffers = _write_episodes(minari, dataset, dataset_id, buffers, settings), 0, []
        if count == 0:
            raise ArgumentError("the memory holds no transitions, so there is nothing to export; add some first")
        if buffers:
            _write_episodes(minari, dataset, dataset_id, buffers, settings)
        undo.pop_all()
    return count


def import_minari(dataset_id: str, on_progress: OnProgress = lambda _done, _all: None) -> ReplayMemory:
    """Return a memory of one lane with all transitions of a local Minari dataset."""
    try:
        dataset = _minari().load_dataset(dataset_id)
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise ArgumentError(f"dataset ({dataset_id!r}) is not here ({error}); see `minari list local`") from error
    memory = ReplayMemory(dataset.observation_space, dataset.action_space, max(1, int(dataset.total_steps)))
    observation, action = memory.schema.observation, memory.schema.action
    for episode in dataset.iterate_episodes():
        steps = len(episode.rewards)
        seen = observation.flatten(episode.observations, (steps + 1,), "observations")
        taken = action.flatten(episode.actions, (steps,), "actions")
        ended, cut = (np.asarray(flags, np.bool_) for flags in (episode.terminations, episode.truncations))
        for start in range(0, steps, _STEPS_AT_ONCE):
            now = slice(start, min(start + _STEPS_AT_ONCE, steps))
            after = slice(now.start + 1, now.stop + 1)
            memory.extend(
                observation.build([rows[now, None] for rows in seen]),
                action.build([rows[now, None] for rows in taken]),
                np.asarray(episode.rewards)[now, None],
                observation.build([rows[after, None] for rows in seen]),
                ended[now, None],
                cut[now, None],
            )
            on_progress(len(memory), int(dataset.total_steps))
    return memory


def _new_dataset_path(minari: Any, dataset_id: str) -> Path:
    """Return where a dataset will lie, if Minari takes the name and nothing is there."""
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:  # TypeError: it has no version
        raise ArgumentError(
            f"dataset ({dataset_id!r}) is no name that Minari takes; use letters, digits, '_' and '-', and end with "
            "a version, such as robots/dog-v0"
        ) from error
    path = Path(minari.storage.get_dataset_path(dataset_id))
    if path.exists():
        raise ArgumentError(f"dataset ({dataset_id!r}) is there already, in {path}; choose another name or version")
    return path


def _episodes(memory: ReplayMemory) -> Iterator[_Episode]:
    """Yield runs of one lane's transitions that follow each other."""
    lanes = memory.num_envs
    for first in range(memory.first_id, memory.first_id + lanes):
        parts: list[_Episode] = []
        for start in range(first, memory.next_id, lanes * _STEPS_AT_ONCE):
            # From the last one of the block before, which shows whether this block goes on from there.
            ids = np.arange(max(start - lanes, first), min(start + lanes * _STEPS_AT_ONCE, memory.next_id), lanes)
            ids = ids[memory.are_valid(ids)]
            batch = _arrays(memory, ids)
            begin = int(np.searchsorted(ids, start))
            cuts = [row for row in _episode_starts(batch, ids, lanes) if row >= begin]
            for row, end in pairwise([begin, *cuts, len(ids)]):
                if row in cuts and parts:
                    yield _joined(parts)
                    parts = []
                if end > row:
                    parts.append({name: [rows[row:end] for rows in arrays] for name, arrays in batch.items()})
        if parts:
            yield _joined(parts)


def _arrays(memory: ReplayMemory, ids: NDArray[np.int64]) -> _Episode:
    """Gather transitions as lists of arrays, one for every leaf of a field."""
    batch, schema = memory.gather(ids), memory.schema
    trees = {"obs": schema.observation, "action": schema.action, "next_obs": schema.observation}
    found = {name: tree.flatten(getattr(batch, name), (len(ids),), name) for name, tree in trees.items()}
    return found | {name: [getattr(batch, name)] for name in ("reward", "terminated", "truncated")}


def _episode_starts(batch: _Episode, ids: NDArray[np.int64], lanes: int) -> list[int]:
    """Name the rows of a batch that do not go on from the row before."""
    ends = batch["terminated"][0][:-1] | batch["truncated"][0][:-1] | (np.diff(ids) != lanes)
    for before, after in zip(batch["next_obs"], batch["obs"], strict=True):
        old, new = (rows.reshape(len(rows), prod(rows.shape[1:])) for rows in (before[:-1], after[1:]))
        ends |= (np.ascontiguousarray(old).view(np.uint8) != np.ascontiguousarray(new).view(np.uint8)).any(axis=1)
    return [0, *(np.flatnonzero(ends) + 1).tolist()]


def _joined(parts: list[_Episode]) -> _Episode:
    return {
        name: [np.concatenate(leaf) for leaf in zip(*(part[name] for part in parts), strict=True)] for name in parts[0]
    }


def _write_episodes(minari: Any, dataset: Any, name: str, buffers: list[Any], settings: dict[str, Any]) -> Any:
    if dataset is None:
        with warnings.catch_warnings():
            # Author, link to code and environment are for datasets that are published; nobody is asked for them here.
            warnings.filterwarnings("ignore", ".* (is set to None|is None, no environment)", UserWarning, "minari")
            return minari.create_dataset_from_buffers(dataset_id=name, buffer=buffers, **settings)
    dataset.update_dataset_from_buffer(buffers)
    return dataset


def _space_of(tree: Tree) -> spaces.Space[Any]:
    def build(structure: Any) -> spaces.Space[Any]:
        if isinstance(structure, dict):
            return spaces.Dict({key: build(child) for key, child in structure.items()})
        if isinstance(structure, tuple):
            return spaces.Tuple([build(child) for child in structure])
        return stored_space(structure.shape, structure.dtype)

    return build(tree.build(tree.leaves))


def _minari() -> Any:
    try:
        import minari  # noqa: PLC0415  an extra
        import minari.data_collector  # noqa: PLC0415
        import minari.dataset.minari_dataset  # noqa: PLC0415
        import minari.storage  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError("Minari datasets need minari; run \"pip install 'holdall[minari]'\"") from error
    return minari


def memory_from_arrays(folder: Path, on_progress: OnProgress = lambda _done, _all: None) -> ReplayMemory:
    """Add all transitions to a new memory, as `holdall.sb3.ReplayBuffer` would have."""
    header = json_.loads((folder / "words.json").read_text(encoding="utf-8"))

    def opened(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    keys = header["keys"]

    def observed(name: str) -> dict[str, Any]:
        return {"": opened(name)} if keys is None else {key: opened(f"{name}.{i}") for i, key in enumerate(keys)}

    def nested(parts: dict[str, Any]) -> Any:
        return parts[""] if keys is None else parts

    obs, following = observed("observations"), observed("next_observations")
    actions, rewards, dones, timeouts = (opened(name) for name in ("actions", "rewards", "dones", "timeouts"))
    stored = {key: stored_space(rows.shape[2:], rows.dtype) for key, rows in obs.items()}
    memory = ReplayMemory(
        stored[""] if keys is None else spaces.Dict(OrderedDict(stored)),
        stored_space(actions.shape[2:], actions.dtype),
        header["capacity"],
        header["num_envs"],
    )
    for start in range(0, len(rewards), _STEPS_AT_ONCE):
        steps = slice(start, start + _STEPS_AT_ONCE)
        done, cut = np.asarray(dones[steps], np.bool_), np.asarray(timeouts[steps], np.bool_)
        seen, then = (nested({key: np.asarray(rows[steps]) for key, rows in one.items()}) for one in (obs, following))
        memory.extend(seen, np.asarray(actions[steps]), np.asarray(rewards[steps]), then, done ^ cut, cut)
        on_progress(memory.next_id, rewards.size)
    return memory


def extract_arrays(file: Path, folder: Path) -> None:
    """Unpickle a buffer and save its arrays, oldest transition first."""
    with file.open("rb") as stream:
        buffer: Any = pickle.load(stream)
    order = np.arange(buffer.pos)
    if buffer.full:
        order = np.roll(np.arange(buffer.buffer_size), -buffer.pos)
    is_dict = isinstance(buffer.observations, dict)
    for name in ("observations", "next_observations"):
        rows, found = order, getattr(buffer, name)
        if not is_dict and name == "next_observations" and buffer.optimize_memory_usage:
            rows, found = (order + 1) % buffer.buffer_size, buffer.observations
        for number, part in enumerate(found.values() if is_dict else [found]):
            label = f"{name}.{number}.npy" if is_dict else f"{name}.npy"
            np.save(folder / label, np.asarray(part)[rows], allow_pickle=False)
    for name in ("actions", "rewards", "dones", "timeouts"):
        np.save(folder / f"{name}.npy", np.asarray(getattr(buffer, name))[order], allow_pickle=False)
    header = {
        "keys": list(buffer.observations) if is_dict else None,
        "capacity": int(buffer.buffer_size * buffer.n_envs),
        "num_envs": int(buffer.n_envs),
    }
    (folder / "words.json").write_text(json_.dumps(header), encoding="utf-8")


if __name__ == "__main__":
    extract_arrays(Path(sys.argv[1]), Path(sys.argv[2]))

"""Transitions of other programs: Minari's datasets, and pickled replay buffers of Stable-Baselines3.

memory -> episodes -> dataset -> memory; pickle -> arrays -> memory

In an exported episode, the `next_obs` of each transition is the `obs` of the following one. Where it is not, a new
episode begins. Numbers and images are stored without loss. Extras are stored in the infos of an episode.

A pickle can run code. So `python -m holdall.tools.datasets FILE FOLDER` reads it in a process of its own, and writes
only arrays, which `memory_from_arrays` reads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import shutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError
from holdall.memory import ReplayMemory
from holdall.schema import Tree
from holdall.space_leaves import stored_space

_FLUSH_BYTES = 64 * 2**20
_STEPS_AT_ONCE = 256
_EXTRAS = "holdall_extras"
"""Key of the extras in the infos of an exported episode."""

OnProgress = Callable[[int, int], None]
"""Called with the number of transitions that are done, and the number of all transitions."""
_Episode = dict[str, list[NDArray[Any]]]
"""The arrays of consecutive transitions by field, one for every leaf."""


def export_minari(memory: ReplayMemory, dataset_id: str, on_progress: OnProgress = lambda _done, _all: None) -> int:
    """Write all transitions of a memory, lane by lane, as a local Minari dataset. Return the number of episodes."""
    minari = _import_package()
    schema = memory.schema
    path = _new_dataset_path(minari, dataset_id)
    settings = {
        "observation_space": space_of(schema.observation),
        "action_space": space_of(schema.action),
        "jpeg_encoding": False,  # JPEG is not exact.
    }
    for name, tree in (("the observation", schema.observation), ("action", schema.action), ("extras", schema.extras)):
        _require_names(space_of(tree), name)
    dataset: Any = None
    count = 0
    done = 0
    held_bytes = 0
    buffers: list[Any] = []
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, path, ignore_errors=True)  # A part of a dataset would block the next attempt.
        for episode in read_episodes(memory):
            observed = zip(episode["obs"], episode["next_obs"], strict=True)
            buffers.append(
                minari.data_collector.EpisodeBuffer(
                    observations=schema.observation.build([np.concatenate([rows, end[-1:]]) for rows, end in observed]),
                    actions=schema.action.build(episode["action"]),
                    rewards=episode["reward"][0],
                    terminations=episode["terminated"][0],
                    truncations=episode["truncated"][0],
                    infos={_EXTRAS: schema.extras.build(episode["extras"])} if schema.extras.leaves else None,
                )
            )
            done += len(episode["reward"][0])
            on_progress(done, len(memory))
            count += 1
            held_bytes += sum(array.nbytes for arrays in episode.values() for array in arrays)
            if held_bytes >= _FLUSH_BYTES:
                dataset = _write_episodes(minari, dataset, dataset_id, buffers, settings, held_bytes)
                held_bytes = 0
                buffers = []
        if count == 0:
            raise ArgumentError("The memory holds no transitions, so there is nothing to export. Add some first.")
        if buffers:
            _write_episodes(minari, dataset, dataset_id, buffers, settings, held_bytes)
        undo.pop_all()
    return count


def import_minari(dataset_id: str, on_progress: OnProgress = lambda _done, _all: None, **settings: Any) -> ReplayMemory:
    """Return a memory of one lane, made with `settings`, that has all transitions of a local Minari dataset.

    Minari returns whole episodes, so the import needs RAM for two of the longest episodes, besides the new memory.
    """
    try:
        dataset = _import_package().load_dataset(dataset_id)
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise ArgumentError(f"dataset ({dataset_id!r}) was not found ({error}). Run `minari list local`.") from error
    first = next(iter(dataset.iterate_episodes()), None)
    if first is None:
        raise ArgumentError(f"dataset ({dataset_id!r}) has no episodes, so there is nothing to import.")
    stored_in_first = (first.infos or {}).get(_EXTRAS)
    has_extras = stored_in_first is not None
    memory = ReplayMemory(
        dataset.observation_space,
        dataset.action_space,
        max(1, int(dataset.total_steps)),
        extras=dict(_space_like(stored_in_first).items()) if has_extras else None,
        reward_shape=np.shape(first.rewards)[1:],
        **settings,
    )
    del first, stored_in_first
    observation = memory.schema.observation
    action = memory.schema.action
    extras = memory.schema.extras
    for episode in dataset.iterate_episodes():
        steps = len(episode.rewards)
        more = extras.flatten(_with_tuples(episode.infos[_EXTRAS]), (steps,), "extras") if has_extras else []
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
                extras=extras.build([rows[now, None] for rows in more]) if more else None,
            )
            # Wait for the compressor. Otherwise it would fall behind, keep blocks in RAM, and use its fast codecs.
            memory.store.wait_idle()
            on_progress(len(memory), int(dataset.total_steps))
    return memory


def _new_dataset_path(minari: Any, dataset_id: str) -> Path:
    """Return the path of a new dataset. Raise ArgumentError if the name is malformed or taken."""
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:  # TypeError: the name has no version.
        raise ArgumentError(
            f"dataset ({dataset_id!r}) is not a name of a Minari dataset. Use letters, digits, '_' and '-', and a "
            "version at the end, as in robots/dog-v0."
        ) from error
    with _writing_dataset(dataset_id):
        path = Path(minari.storage.get_dataset_path(dataset_id))
    if path.exists():
        raise ArgumentError(f"dataset ({dataset_id!r}) already exists in {path}. Choose another name or version.")
    return path


@contextlib.contextmanager
def _writing_dataset(dataset_id: str) -> Iterator[None]:
    """Turn errors of Minari's files into ArgumentError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # HDF5 raises RuntimeError for some errors of the disk.
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"dataset ({dataset_id!r}) cannot be written ({reason}). Free disk space, or set MINARI_DATASETS_PATH to "
            "another folder."
        ) from error


def _require_names(space: spaces.Space[Any], field: str) -> None:
    """Raise ArgumentError for keys that HDF5 cannot use as names. It would lose them or read them as paths."""
    parts: dict[str, spaces.Space[Any]] = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
    if isinstance(space, spaces.Tuple):
        parts = {f"_index_{number}": part for number, part in enumerate(space.spaces)}
    for key, part in parts.items():
        if key in {"", "."} or not {"/", "\0"}.isdisjoint(key):
            raise ArgumentError(
                f"{field} has the key {key!r}, which a Minari dataset cannot have. Its keys are not empty and not '.', "
                "and contain no '/'. Export .npz."
            )
        _require_names(part, field)


def read_episodes(memory: ReplayMemory, steps_at_once: int = _STEPS_AT_ONCE) -> Iterator[_Episode]:
    """Yield the transitions of each lane, cut into episodes. At most `steps_at_once` steps are read at a time."""
    lanes = memory.num_envs
    for first in range(memory.first_id, memory.first_id + lanes):
        parts: list[_Episode] = []
        for start in range(first, memory.next_id, lanes * steps_at_once):
            # Start with the last transition of the block before, to see whether the episode continues.
            ids = np.arange(max(start - lanes, first), min(start + lanes * steps_at_once, memory.next_id), lanes)
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
    batch = memory.gather(ids)
    schema = memory.schema
    trees = {"obs": schema.observation, "action": schema.action, "next_obs": schema.observation}
    found = {name: tree.flatten(getattr(batch, name), (len(ids),), name) for name, tree in trees.items()}
    if schema.extras.leaves:
        found["extras"] = schema.extras.flatten(dict(batch.extras), (len(ids),), "extras")
    return found | {name: [getattr(batch, name)] for name in ("reward", "terminated", "truncated")}


def _episode_starts(batch: _Episode, ids: NDArray[np.int64], lanes: int) -> list[int]:
    """Return the rows of a batch that do not continue the row before."""
    ends = batch["terminated"][0][:-1] | batch["truncated"][0][:-1] | (np.diff(ids) != lanes)
    for before, after in zip(batch["next_obs"], batch["obs"], strict=True):
        old = before[:-1].reshape(len(before) - 1, prod(before.shape[1:]))
        new = after[1:].reshape(len(after) - 1, prod(after.shape[1:]))
        ends |= (np.ascontiguousarray(old).view(np.uint8) != np.ascontiguousarray(new).view(np.uint8)).any(axis=1)
    return [0, *(np.flatnonzero(ends) + 1).tolist()]


def _joined(parts: list[_Episode]) -> _Episode:
    return {
        name: [np.concatenate(leaf) for leaf in zip(*(part[name] for part in parts), strict=True)] for name in parts[0]
    }


def _write_episodes(
    minari: Any, dataset: Any, name: str, buffers: list[Any], settings: dict[str, Any], nbytes: int
) -> Any:
    with _writing_dataset(name), warnings.catch_warnings():
        place = Path(minari.storage.get_dataset_path(""))
        if shutil.disk_usage(place).free < nbytes:  # HDF5 itself would end the process.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if dataset is None:
            # Minari warns that author, code link and environment are missing. Only published datasets need them.
            warnings.filterwarnings("ignore", ".* (is set to None|is None, no environment)", UserWarning, "minari")
            return minari.create_dataset_from_buffers(dataset_id=name, buffer=buffers, **settings)
        dataset.update_dataset_from_buffer(buffers)
    return dataset


def space_of(tree: Tree) -> spaces.Space[Any]:
    """Return the space of a field."""

    def build(structure: Any) -> spaces.Space[Any]:
        if isinstance(structure, dict):
            return spaces.Dict({key: build(child) for key, child in structure.items()})
        if isinstance(structure, tuple):
            return spaces.Tuple([build(child) for child in structure])
        return stored_space(structure.shape, structure.dtype)

    return build(tree.build(tree.leaves))


def _with_tuples(value: Any) -> Any:
    """Return extras with tuples again. Minari writes a tuple as a dict of `_index_0`, `_index_1` ..."""
    if not isinstance(value, dict):
        return value
    read = {key: _with_tuples(part) for key, part in value.items()}
    indices = [f"_index_{number}" for number in range(len(read))]
    return tuple(read[index] for index in indices) if read and read.keys() == set(indices) else read


def _space_like(value: Any) -> Any:
    """Return the space of one step of stored extras, which have a leading axis of steps."""
    value = _with_tuples(value)
    if isinstance(value, dict):
        return spaces.Dict({key: _space_like(part) for key, part in value.items()})
    if isinstance(value, tuple):
        return spaces.Tuple([_space_like(part) for part in value])
    return stored_space(value.shape[1:], value.dtype)


def _import_package() -> Any:
    try:
        import minari  # noqa: PLC0415  an extra
        import minari.data_collector  # noqa: PLC0415
        import minari.dataset.minari_dataset  # noqa: PLC0415
        import minari.storage  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError("Minari datasets need minari. Run: pip install 'holdall[minari]'") from error
    return minari


def memory_from_arrays(folder: Path, on_progress: OnProgress = lambda _done, _all: None) -> ReplayMemory:
    """Return a new memory with the transitions whose arrays `extract_arrays` wrote to `folder`."""
    header = json.loads((folder / "words.json").read_text(encoding="utf-8"))

    def opened(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    keys = header["keys"]

    def observed(name: str) -> dict[str, Any]:
        return {"": opened(name)} if keys is None else {key: opened(f"{name}.{i}") for i, key in enumerate(keys)}

    def nested(parts: dict[str, Any]) -> Any:
        return parts[""] if keys is None else parts

    obs = observed("observations")
    following = observed("next_observations")
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
        done = np.asarray(dones[steps], np.bool_)
        cut = np.asarray(timeouts[steps], np.bool_)
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
        if buffer.optimize_memory_usage:
            order = order[1:]  # The newest next observation has replaced the oldest observation.
    is_dict = isinstance(buffer.observations, dict)
    for name in ("observations", "next_observations"):
        is_shared = name == "next_observations" and buffer.optimize_memory_usage
        rows = (order + 1) % buffer.buffer_size if is_shared else order
        found = buffer.observations if is_shared else getattr(buffer, name)
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
    (folder / "words.json").write_text(json.dumps(header), encoding="utf-8")


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # The buffer's class may be in a module of this folder.
    extract_arrays(Path(sys.argv[1]), Path(sys.argv[2]))

"""Transitions of other programs: Minari's datasets, and pickled replay buffers of Stable-Baselines3.

memory -> episodes -> dataset -> memory; pickle -> arrays -> memory

Within an exported episode, the `next_obs` of each transition is the `obs` of the following one. A transition that does
not continue the previous one begins a new episode. Numbers and images are stored without loss. Extras are stored in
the infos of an episode.

A pickle can run code. So `python -m holdall.tools.datasets FILE FOLDER` unpickles a buffer in a process of its own, and
writes only arrays, which `memory_from_arrays` reads.
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
"""Bytes of episodes that are collected before they are written."""
_STEPS_AT_ONCE = 256
"""Steps that are read or added at once."""
_EXTRAS = "holdall_extras"
"""Key of the extras in the infos of an exported episode."""

OnProgress = Callable[[int, int], None]
"""Called with the number of transitions that are done, and the number of all transitions."""
_Episode = dict[str, list[NDArray[Any]]]
"""Consecutive transitions: a list of arrays for every field, with one array for every leaf of the field."""


def export_minari(memory: ReplayMemory, dataset_id: str, on_progress: OnProgress = lambda _done, _all: None) -> int:
    """Write all transitions of a memory, lane by lane, as a local Minari dataset. Return the number of episodes."""
    minari = _import_minari()
    schema = memory.schema
    path = _find_new_path(minari, dataset_id)
    settings = {
        "observation_space": build_space(schema.observation),
        "action_space": build_space(schema.action),
        "jpeg_encoding": False,  # JPEG is not exact.
    }
    for name, tree in (("the observation", schema.observation), ("action", schema.action), ("extras", schema.extras)):
        _require_valid_names(build_space(tree), name)
    dataset: Any = None
    count = 0
    done = 0
    collected_bytes = 0
    buffers: list[Any] = []
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, path, ignore_errors=True)  # An incomplete dataset would block the next attempt.
        for episode in read_episodes(memory):
            leaves = zip(episode["obs"], episode["next_obs"], strict=True)
            observations = [np.concatenate([obs, next_obs[-1:]]) for obs, next_obs in leaves]
            buffers.append(
                minari.data_collector.EpisodeBuffer(
                    observations=schema.observation.build(observations),
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
            collected_bytes += sum(array.nbytes for arrays in episode.values() for array in arrays)
            if collected_bytes >= _FLUSH_BYTES:
                dataset = _write_episodes(minari, dataset, dataset_id, buffers, settings, collected_bytes)
                collected_bytes = 0
                buffers = []
        if count == 0:
            raise ArgumentError("The memory holds no transitions, so there is nothing to export. Add some first.")
        if buffers:
            _write_episodes(minari, dataset, dataset_id, buffers, settings, collected_bytes)
        undo.pop_all()
    return count


def import_minari(dataset_id: str, on_progress: OnProgress = lambda _done, _all: None, **settings: Any) -> ReplayMemory:
    """Return a memory of one lane, made with `settings`, that has all transitions of a local Minari dataset.

    Minari returns whole episodes, so the import needs RAM for two of the longest episodes, besides the new memory.
    """
    try:
        dataset = _import_minari().load_dataset(dataset_id)
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise ArgumentError(f"dataset ({dataset_id!r}) was not found ({error}). Run `minari list local`.") from error
    total_steps = int(dataset.total_steps)
    first = next(iter(dataset.iterate_episodes()), None)
    if first is None:
        raise ArgumentError(f"dataset ({dataset_id!r}) has no episodes, so there is nothing to import.")
    first_extras = (first.infos or {}).get(_EXTRAS)
    has_extras = first_extras is not None
    memory = ReplayMemory(
        dataset.observation_space,
        dataset.action_space,
        max(1, total_steps),
        extras=dict(_infer_space(first_extras).items()) if has_extras else None,
        reward_shape=np.shape(first.rewards)[1:],
        **settings,
    )
    del first, first_extras
    schema = memory.schema
    for episode in dataset.iterate_episodes():
        steps = len(episode.rewards)
        observations = schema.observation.flatten(episode.observations, (steps + 1,), "observations")
        actions = schema.action.flatten(episode.actions, (steps,), "actions")
        rewards = np.asarray(episode.rewards)
        terminated = np.asarray(episode.terminations, np.bool_)
        truncated = np.asarray(episode.truncations, np.bool_)
        extras: list[NDArray[Any]] = []
        if has_extras:
            extras = schema.extras.flatten(_restore_tuples(episode.infos[_EXTRAS]), (steps,), "extras")
        for start in range(0, steps, _STEPS_AT_ONCE):
            now = slice(start, min(start + _STEPS_AT_ONCE, steps))
            after = slice(now.start + 1, now.stop + 1)
            memory.extend(
                schema.observation.build([rows[now, None] for rows in observations]),
                schema.action.build([rows[now, None] for rows in actions]),
                rewards[now, None],
                schema.observation.build([rows[after, None] for rows in observations]),
                terminated[now, None],
                truncated[now, None],
                extras=schema.extras.build([rows[now, None] for rows in extras]) if extras else None,
            )
            # Wait for the compactor. Otherwise it would fall behind, keep blocks in RAM, and use its fast codecs.
            memory.store.wait_idle()
            on_progress(len(memory), total_steps)
    return memory


def _find_new_path(minari: Any, dataset_id: str) -> Path:
    """Return the path of a new dataset. Raise ArgumentError if the name is malformed or taken."""
    try:
        minari.dataset.minari_dataset.parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:  # TypeError: the name has no version.
        raise ArgumentError(
            f"dataset ({dataset_id!r}) is not a name of a Minari dataset. Use letters, digits, '_' and '-', and a "
            "version at the end, as in robots/dog-v0."
        ) from error
    with _convert_write_errors(dataset_id):
        path = Path(minari.storage.get_dataset_path(dataset_id))
    if path.exists():
        raise ArgumentError(f"dataset ({dataset_id!r}) already exists in {path}. Choose another name or version.")
    return path


@contextlib.contextmanager
def _convert_write_errors(dataset_id: str) -> Iterator[None]:
    """Convert errors that writing Minari's files raises in the `with` block to ArgumentError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # HDF5 raises RuntimeError for some errors of the disk.
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"dataset ({dataset_id!r}) cannot be written ({reason}). Free disk space, or set MINARI_DATASETS_PATH to "
            "another folder."
        ) from error


def _require_valid_names(space: spaces.Space[Any], field: str) -> None:
    """Raise ArgumentError for keys that HDF5 cannot use as names: it would lose them or read them as paths."""
    parts: dict[str, spaces.Space[Any]] = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
    if isinstance(space, spaces.Tuple):
        parts = {f"_index_{number}": part for number, part in enumerate(space.spaces)}
    for key, part in parts.items():
        if key in {"", "."} or not {"/", "\0"}.isdisjoint(key):
            raise ArgumentError(
                f"{field} has the key {key!r}, which a Minari dataset cannot have. Its keys are not empty and not '.', "
                "and contain no '/'. Export .npz."
            )
        _require_valid_names(part, field)


def read_episodes(memory: ReplayMemory, steps_at_once: int = _STEPS_AT_ONCE) -> Iterator[_Episode]:
    """Yield the transitions of each lane, cut into episodes. About `steps_at_once` steps are read at a time."""
    lanes = memory.num_envs
    for first in range(memory.first_id, memory.first_id + lanes):
        parts: list[_Episode] = []
        for start in range(first, memory.next_id, lanes * steps_at_once):
            # Read one earlier transition again, to find out whether its episode continues.
            ids = np.arange(max(start - lanes, first), min(start + lanes * steps_at_once, memory.next_id), lanes)
            ids = ids[memory.are_valid(ids)]
            batch = _gather_leaves(memory, ids)
            first_row = int(np.searchsorted(ids, start))
            episode_starts = [row for row in _find_episode_starts(batch, ids, lanes) if row >= first_row]
            for row, end in pairwise([first_row, *episode_starts, len(ids)]):
                if row in episode_starts and parts:
                    yield _concatenate(parts)
                    parts = []
                if end > row:
                    parts.append({name: [rows[row:end] for rows in arrays] for name, arrays in batch.items()})
        if parts:
            yield _concatenate(parts)


def _gather_leaves(memory: ReplayMemory, ids: NDArray[np.int64]) -> _Episode:
    """Gather transitions as lists of arrays, one for every leaf of a field."""
    batch = memory.gather(ids)
    schema = memory.schema
    trees = {"obs": schema.observation, "action": schema.action, "next_obs": schema.observation}
    leaves = {name: tree.flatten(getattr(batch, name), (len(ids),), name) for name, tree in trees.items()}
    if schema.extras.leaves:
        leaves["extras"] = schema.extras.flatten(dict(batch.extras), (len(ids),), "extras")
    return leaves | {name: [getattr(batch, name)] for name in ("reward", "terminated", "truncated")}


def _find_episode_starts(batch: _Episode, ids: NDArray[np.int64], lanes: int) -> list[int]:
    """Return the rows of a batch that do not continue the previous row. Row 0 is always one of them."""
    is_end = batch["terminated"][0][:-1] | batch["truncated"][0][:-1] | (np.diff(ids) != lanes)
    for next_obs, obs in zip(batch["next_obs"], batch["obs"], strict=True):
        expected = np.ascontiguousarray(next_obs[:-1].reshape(len(next_obs) - 1, prod(next_obs.shape[1:])))
        following = np.ascontiguousarray(obs[1:].reshape(len(obs) - 1, prod(obs.shape[1:])))
        is_end |= (expected.view(np.uint8) != following.view(np.uint8)).any(axis=1)
    return [0, *(np.flatnonzero(is_end) + 1).tolist()]


def _concatenate(parts: list[_Episode]) -> _Episode:
    return {
        name: [np.concatenate(leaf) for leaf in zip(*(part[name] for part in parts), strict=True)] for name in parts[0]
    }


def _write_episodes(
    minari: Any, dataset: Any, dataset_id: str, buffers: list[Any], settings: dict[str, Any], nbytes: int
) -> Any:
    """Append episodes to `dataset`, or create a dataset with them if `dataset` is None. Return the dataset."""
    with _convert_write_errors(dataset_id), warnings.catch_warnings():
        folder = Path(minari.storage.get_dataset_path(""))
        if shutil.disk_usage(folder).free < nbytes:  # On a full disk, HDF5 would end the process.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if dataset is None:
            # Minari warns that author, code link and environment are missing. Only published datasets need them.
            warnings.filterwarnings("ignore", ".* (is set to None|is None, no environment)", UserWarning, "minari")
            return minari.create_dataset_from_buffers(dataset_id=dataset_id, buffer=buffers, **settings)
        dataset.update_dataset_from_buffer(buffers)
    return dataset


def build_space(tree: Tree) -> spaces.Space[Any]:
    """Return the space of a field."""

    def build(structure: Any) -> spaces.Space[Any]:
        if isinstance(structure, dict):
            return spaces.Dict({key: build(child) for key, child in structure.items()})
        if isinstance(structure, tuple):
            return spaces.Tuple([build(child) for child in structure])
        return stored_space(structure.shape, structure.dtype)

    return build(tree.build(tree.leaves))


def _restore_tuples(value: Any) -> Any:
    """Return extras with their tuples. Minari writes a tuple as a dict of `_index_0`, `_index_1` ..."""
    if not isinstance(value, dict):
        return value
    parts = {key: _restore_tuples(part) for key, part in value.items()}
    indices = [f"_index_{number}" for number in range(len(parts))]
    is_tuple = bool(parts) and parts.keys() == set(indices)
    return tuple(parts[index] for index in indices) if is_tuple else parts


def _infer_space(value: Any) -> Any:
    """Return the space of one step of stored extras, which have a leading axis of steps."""
    value = _restore_tuples(value)
    if isinstance(value, dict):
        return spaces.Dict({key: _infer_space(part) for key, part in value.items()})
    if isinstance(value, tuple):
        return spaces.Tuple([_infer_space(part) for part in value])
    return stored_space(value.shape[1:], value.dtype)


def _import_minari() -> Any:
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
    header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    keys = header["keys"]

    def open_array(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    def open_observations(name: str) -> dict[str, Any]:
        """Return the arrays by key. An observation that is no dict has the key ''."""
        if keys is None:
            return {"": open_array(name)}
        return {key: open_array(f"{name}.{number}") for number, key in enumerate(keys)}

    def read_observations(arrays: dict[str, Any], steps: slice) -> Any:
        parts = {key: np.asarray(rows[steps]) for key, rows in arrays.items()}
        return parts[""] if keys is None else parts

    obs = open_observations("observations")
    next_obs = open_observations("next_observations")
    actions, rewards, dones, timeouts = (open_array(name) for name in ("actions", "rewards", "dones", "timeouts"))
    parts = {key: stored_space(rows.shape[2:], rows.dtype) for key, rows in obs.items()}
    memory = ReplayMemory(
        parts[""] if keys is None else spaces.Dict(OrderedDict(parts)),
        stored_space(actions.shape[2:], actions.dtype),
        header["capacity"],
        header["num_envs"],
    )
    for start in range(0, len(rewards), _STEPS_AT_ONCE):
        steps = slice(start, start + _STEPS_AT_ONCE)
        done = np.asarray(dones[steps], np.bool_)
        truncated = np.asarray(timeouts[steps], np.bool_)
        memory.extend(
            read_observations(obs, steps),
            np.asarray(actions[steps]),
            np.asarray(rewards[steps]),
            read_observations(next_obs, steps),
            done ^ truncated,
            truncated,
        )
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
        observations = buffer.observations if is_shared else getattr(buffer, name)
        for number, array in enumerate(observations.values() if is_dict else [observations]):
            file_name = f"{name}.{number}.npy" if is_dict else f"{name}.npy"
            np.save(folder / file_name, np.asarray(array)[rows], allow_pickle=False)
    for name in ("actions", "rewards", "dones", "timeouts"):
        np.save(folder / f"{name}.npy", np.asarray(getattr(buffer, name))[order], allow_pickle=False)
    header = {
        "keys": list(buffer.observations) if is_dict else None,
        "capacity": int(buffer.buffer_size * buffer.n_envs),
        "num_envs": int(buffer.n_envs),
    }
    (folder / "header.json").write_text(json.dumps(header), encoding="utf-8")


if __name__ == "__main__":
    sys.path.append(str(Path.cwd()))  # The buffer's class may be defined in a module of the working directory.
    extract_arrays(Path(sys.argv[1]), Path(sys.argv[2]))

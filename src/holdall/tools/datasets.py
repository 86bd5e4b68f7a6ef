"""Move experience in and out: Minari datasets, and pickled replay buffers of Stable-Baselines3.

An exported episode holds transitions whose observations follow each other; where they do not, a new episode begins.
Numbers and images are stored without loss. A pickle can run code, so `python -m holdall.tools.datasets FILE DIR` reads
it in a process of its own and writes only arrays; `memory_from_arrays` reads these.
"""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError
from holdall.replay import ReplayMemory
from holdall.schema import Structure, Tree, stored_space

_FLUSH_BYTES = 64 * 2**20
_STEPS_AT_ONCE = 256

OnProgress = Callable[[int, int], None]
"""Gets how many transitions are done, and how many there are."""
_FIELDS = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "ids")


def export_minari(memory: ReplayMemory, dataset_id: str, on_progress: OnProgress = lambda _done, _all: None) -> int:
    """Write all transitions of a memory, lane by lane, as a local Minari dataset; return its episodes."""
    done = 0
    minari = _minari()
    schema = memory.schema
    settings = {
        "observation_space": _space_of(schema.observation),
        "action_space": _space_of(schema.action),
        "jpeg_encoding": False,  # it would lose bits
    }
    dataset: Any = None
    count, held, buffers = 0, 0, []
    for episode in _episodes(memory):
        buffers.append(_buffer(minari, episode))
        done += len(episode["reward"])
        on_progress(done, len(memory))
        count, held = count + 1, held + sum(array.nbytes for array in _arrays(episode))
        if held >= _FLUSH_BYTES:
            dataset, held, buffers = _write_episodes(minari, dataset, dataset_id, buffers, settings), 0, []
    if buffers:
        _write_episodes(minari, dataset, dataset_id, buffers, settings)
    if count == 0:
        raise ArgumentError("the memory holds no transitions, so there is nothing to export; add some first")
    return count


def import_minari(dataset_id: str, on_progress: OnProgress = lambda _done, _all: None) -> ReplayMemory:
    """Return a memory of one lane with all transitions of a local Minari dataset."""
    dataset = _minari().load_dataset(dataset_id)
    memory = ReplayMemory(dataset.observation_space, dataset.action_space, max(1, int(dataset.total_steps)))
    for episode in dataset.iterate_episodes():
        steps = len(episode.rewards)
        rows = {
            "obs": _map(lambda rows, n=steps: rows[:n], episode.observations),
            "next_obs": _map(lambda rows, n=steps: rows[1 : n + 1], episode.observations),
            "action": _map(lambda rows, n=steps: rows[:n], episode.actions),
            "reward": np.asarray(episode.rewards),
            "terminated": np.asarray(episode.terminations, np.bool_),
            "truncated": np.asarray(episode.truncations, np.bool_),
        }
        for start in range(0, steps, _STEPS_AT_ONCE):
            piece = {
                name: _map(lambda rows, s=start: np.asarray(rows)[s : s + _STEPS_AT_ONCE, None], value)
                for name, value in rows.items()
            }
            memory.extend(**piece)
            on_progress(len(memory), int(dataset.total_steps))
    return memory


def _episodes(memory: ReplayMemory) -> Iterator[dict[str, Any]]:
    """Yield runs of one lane's transitions that follow each other."""
    lanes = memory.num_envs
    for lane in range(lanes):
        parts: list[Any] = []
        for start in range(memory.first_id + lane, memory.next_id, lanes * _STEPS_AT_ONCE):
            ids = np.arange(start, min(start + lanes * _STEPS_AT_ONCE, memory.next_id), lanes)
            valid = memory.are_valid(ids)
            batch = memory.gather(ids[valid])
            cuts = _episode_starts(batch, ids[valid], lanes)
            for first, end in zip([0, *cuts], [*cuts, len(batch)], strict=True):
                piece = {name: _map(lambda a, f=first, e=end: a[f:e], getattr(batch, name)) for name in _FIELDS}
                if parts and not _follows(parts[-1], piece):
                    yield _joined(parts)
                    parts = []
                if end > first:
                    parts.append(piece)
        if parts:
            yield _joined(parts)


def _episode_starts(batch: Any, ids: NDArray[np.int64], lanes: int) -> list[int]:
    """Name the rows of a batch that do not go on from the row before."""
    ends = batch.terminated[:-1] | batch.truncated[:-1] | (np.diff(ids) != lanes)
    for before, after in zip(_leaves(batch.next_obs), _leaves(batch.obs), strict=True):
        old, new = (rows.reshape(len(rows), -1) for rows in (before[:-1], after[1:]))
        ends |= (np.ascontiguousarray(old).view(np.uint8) != np.ascontiguousarray(new).view(np.uint8)).any(axis=1)
    return (np.flatnonzero(ends) + 1).tolist()


def _follows(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if not len(after["reward"]) or before["terminated"][-1] or before["truncated"][-1]:
        return False
    pairs = zip(_leaves(before["next_obs"]), _leaves(after["obs"]), strict=True)
    return all(old[-1].tobytes() == new[0].tobytes() for old, new in pairs)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: _join([part[name] for part in parts]) for name in _FIELDS}


def _join(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _join([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(_join([value[i] for value in values]) for i in range(len(first)))
    return np.concatenate(values)


def _buffer(minari: Any, episode: dict[str, Any]) -> Any:
    final = _map(lambda rows: rows[-1:], episode["next_obs"])
    return minari.data_collector.EpisodeBuffer(
        observations=_join([episode["obs"], final]),
        actions=episode["action"],
        rewards=episode["reward"],
        terminations=episode["terminated"],
        truncations=episode["truncated"],
    )


def _write_episodes(minari: Any, dataset: Any, name: str, buffers: list[Any], settings: dict[str, Any]) -> Any:
    if dataset is None:
        with warnings.catch_warnings():
            # Author, link to code and environment are for datasets that are published; nobody is asked for them here.
            warnings.filterwarnings("ignore", ".* (is set to None|is None, no environment)", UserWarning, "minari")
            return minari.create_dataset_from_buffers(dataset_id=name, buffer=buffers, **settings)
    dataset.update_dataset_from_buffer(buffers)
    return dataset


def _space_of(tree: Tree) -> spaces.Space[Any]:
    def build(structure: Structure) -> spaces.Space[Any]:
        if isinstance(structure, int):
            return stored_space(tree.leaves[structure].shape, tree.leaves[structure].dtype)
        if isinstance(structure, tuple):
            return spaces.Tuple([build(child) for child in structure])
        return spaces.Dict({key: build(child) for key, child in structure.items()})

    return build(tree.structure)


def _map(change: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map(change, child) for key, child in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(change, child) for child in value)
    return change(value)


def _leaves(value: Any) -> Iterator[NDArray[Any]]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for child in value:
            yield from _leaves(child)
    else:
        yield value


def _arrays(episode: dict[str, Any]) -> Iterator[NDArray[Any]]:
    for value in episode.values():
        yield from _leaves(value)


def _minari() -> Any:
    try:
        import minari  # noqa: PLC0415  an extra
        import minari.data_collector  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError("Minari datasets need minari; run \"pip install 'holdall[minari]'\"") from error
    return minari


def memory_from_arrays(folder: Path, on_progress: OnProgress = lambda _done, _all: None) -> ReplayMemory:
    """Add all transitions to a new memory, as `holdall.sb3.ReplayBuffer` would have.

    Args:
        on_progress: Gets how many transitions are done, and how many there are.
    """
    header = json.loads((folder / "words.json").read_text(encoding="utf-8"))

    def opened(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    keys = header["keys"]
    names = ("observations", "next_observations")
    obs: Any
    following: Any
    obs, following = (
        opened(name) if keys is None else {key: opened(f"{name}.{i}") for i, key in enumerate(keys)} for name in names
    )
    actions, rewards, dones, timeouts = (opened(name) for name in ("actions", "rewards", "dones", "timeouts"))
    stored = {key: stored_space(rows.shape[2:], rows.dtype) for key, rows in (obs if keys else {"": obs}).items()}
    memory = ReplayMemory(
        spaces.Dict(OrderedDict(stored)) if keys else stored[""],
        stored_space(actions.shape[2:], actions.dtype),
        header["capacity"],
        header["num_envs"],
    )
    for start in range(0, len(rewards), _STEPS_AT_ONCE):
        steps = slice(start, start + _STEPS_AT_ONCE)
        done, cut = np.asarray(dones[steps], np.bool_), np.asarray(timeouts[steps], np.bool_)
        memory.extend(
            {key: np.asarray(rows[steps]) for key, rows in obs.items()} if keys else np.asarray(obs[steps]),
            np.asarray(actions[steps]),
            np.asarray(rewards[steps]),
            {key: np.asarray(rows[steps]) for key, rows in following.items()} if keys else np.asarray(following[steps]),
            done ^ cut,
            cut,
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
    is_dict = isinstance(buffer.observations, dict)
    for name in ("observations", "next_observations"):
        found = getattr(buffer, name)
        if not is_dict and name == "next_observations" and buffer.optimize_memory_usage:
            rows = np.asarray(buffer.observations)[(order + 1) % buffer.buffer_size]
            np.save(folder / f"{name}.npy", rows, allow_pickle=False)
            continue
        for number, part in enumerate(found.values() if is_dict else [found]):
            label = f"{name}.{number}.npy" if is_dict else f"{name}.npy"
            np.save(folder / label, np.asarray(part)[order], allow_pickle=False)
    for name in ("actions", "rewards", "dones", "timeouts"):
        np.save(folder / f"{name}.npy", np.asarray(getattr(buffer, name))[order], allow_pickle=False)
    header = {
        "keys": list(buffer.observations) if is_dict else None,
        "capacity": int(buffer.buffer_size * buffer.n_envs),
        "num_envs": int(buffer.n_envs),
    }
    (folder / "words.json").write_text(json.dumps(header), encoding="utf-8")


if __name__ == "__main__":
    extract_arrays(Path(sys.argv[1]), Path(sys.argv[2]))

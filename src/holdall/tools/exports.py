"""Files that other programs read: the transitions of a memory as .npz, or as a replay buffer of Stable-Baselines3."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError
from holdall.memory import ReplayMemory
from holdall.schema import Tree
from holdall.tools.datasets import space_of

_ROWS = 1024
_OUTCOMES = ("reward", "terminated", "truncated")

OnProgress = Callable[[int, int], None]
"""Gets how many transitions are done, and how many there are."""


def export_npz(memory: ReplayMemory, file: Path, on_progress: OnProgress) -> int:
    """Write every transition, oldest first, to arrays by field. Return the number of transitions.

    The arrays are `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, `extras/NAME` and `ids`. A field
    that is a Dict or a Tuple has one array per leaf: `obs/camera`, `obs/0`. One field at a time is in memory.
    """
    ids = _list_ids(memory)
    names = [*_OUTCOMES, *_leaf_names(memory)]
    with zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED, allowZip64=True) as archive:
        for number, name in enumerate(names):
            _write_array(archive, name, _collect(memory, ids, name))
            on_progress((number + 1) * len(ids) // len(names), len(ids))
        _write_array(archive, "ids", ids)
    return len(ids)


def export_sb3(memory: ReplayMemory, file: Path, on_progress: OnProgress) -> int:
    """Write a pickled buffer for `model.load_replay_buffer` of Stable-Baselines3. Return the number of transitions.

    The buffer is one of Stable-Baselines3's own, so its arrays are raw: all of it is in RAM at once. Ticks in which an
    environment has no valid transition are left out.
    """
    try:
        from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer  # noqa: PLC0415  an extra
        from stable_baselines3.common.save_util import save_to_pkl  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "Exporting a .pkl file needs Stable-Baselines3. Run: pip install 'holdall[sb3]'"
        ) from error
    lanes = memory.num_envs
    observation_space = space_of(memory.schema.observation)
    if isinstance(observation_space, spaces.Tuple) or memory.schema.reward_shape:
        raise ArgumentError(
            "Stable-Baselines3 has no buffer for Tuple observations or rewards with a shape. Export .npz."
        )
    ids = np.arange(memory.first_id, memory.next_id).reshape(-1, lanes)
    ids = ids[memory.are_valid(ids.reshape(-1)).reshape(-1, lanes).all(axis=1)]
    kind: Any = DictReplayBuffer if isinstance(observation_space, spaces.Dict) else ReplayBuffer
    size = max(1, len(ids)) * lanes
    buffer = kind(size, observation_space, space_of(memory.schema.action), device="cpu", n_envs=lanes)
    for done, tick in enumerate(ids):
        batch = memory.gather(tick)
        ends = batch.terminated | batch.truncated
        infos = [
            {"TimeLimit.truncated": bool(cut and not end)}
            for cut, end in zip(batch.truncated, batch.terminated, strict=True)
        ]
        buffer.add(batch.obs, batch.next_obs, batch.action, batch.reward, ends, infos)
        if done % _ROWS == 0:
            on_progress(done * lanes, ids.size)
    save_to_pkl(file, buffer)
    on_progress(ids.size, ids.size)
    return int(ids.size)


def _list_ids(memory: ReplayMemory) -> NDArray[np.int64]:
    ids = np.arange(memory.first_id, memory.next_id)
    return ids[memory.are_valid(ids)] if len(ids) else ids


def _leaf_names(memory: ReplayMemory) -> list[str]:
    schema = memory.schema
    trees = (
        ("obs", schema.observation),
        ("action", schema.action),
        ("next_obs", schema.observation),
        ("extras", schema.extras),
    )
    return [name for field, tree in trees for name in _name_leaves(field, tree)]


def _name_leaves(field: str, tree: Tree) -> list[str]:
    """Return the names of the leaves of a field, in the order of `tree.leaves`."""
    marks = tree.build([np.array(number) for number in range(len(tree.leaves))])
    by_number = {number: name for name, number in _flatten(field, marks)}
    return [by_number[number] for number in range(len(tree.leaves))]


def _flatten(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _flatten(f"{name}/{key}", child)
    elif isinstance(value, tuple):
        for number, child in enumerate(value):
            yield from _flatten(f"{name}/{number}", child)
    else:
        yield name, int(value)


def _collect(memory: ReplayMemory, ids: NDArray[np.int64], name: str) -> NDArray[Any]:
    """Return one leaf of all transitions."""
    field, *path = name.split("/")
    pieces = []
    for start in range(0, max(1, len(ids)), _ROWS):
        value = getattr(memory.gather(ids[start : start + _ROWS]), field)
        for key in path:
            value = value[int(key)] if isinstance(value, tuple) else value[key]
        pieces.append(value)
    return np.concatenate(pieces)


def _write_array(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)

"""Files that other programs read: the transitions of a memory as .npz, or as a replay buffer of Stable-Baselines3."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError
from holdall.memory import ReplayMemory
from holdall.schema import Schema, Tree
from holdall.tools.datasets import space_of

_ROWS = 1024
_OUTCOMES = ("reward", "terminated", "truncated")

OnProgress = Callable[[int, int], None]
"""Called with the number of transitions that are done, and the number of all transitions."""


def export_npz(memory: ReplayMemory, file: Path, on_progress: OnProgress) -> int:
    """Write every transition, oldest first, to arrays by field. Return the number of transitions.

    The arrays are `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, `extras/NAME` and `ids`. A field
    that is a Dict or a Tuple has one array per leaf: `obs/camera`, `obs/0`. One field at a time is in memory.
    """
    ids = _list_ids(memory)
    members = list(_list_members(memory.schema))
    with contextlib.ExitStack() as undo:
        archive = undo.enter_context(zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED, allowZip64=True))
        undo.callback(file.unlink)  # Removes an incomplete file.
        for number, member in enumerate(members, 1):
            _write_array(archive, member.name, _collect(memory, ids, member))
            on_progress(number * len(ids) // len(members), len(ids))
        _write_array(archive, "ids", ids)
        undo.pop_all()
        archive.close()
    return len(ids)


def export_sb3(memory: ReplayMemory, file: Path, on_progress: OnProgress) -> int:
    """Write a pickled buffer for `model.load_replay_buffer` of Stable-Baselines3. Return the number of transitions.

    The buffer is one of Stable-Baselines3's own, so its arrays are uncompressed and all in RAM at once. Ticks
    in which an environment has no valid transition are left out.
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
    with contextlib.ExitStack() as undo:
        undo.callback(file.unlink, missing_ok=True)  # Removes an incomplete file.
        save_to_pkl(file, buffer)
        undo.pop_all()
    on_progress(ids.size, ids.size)
    return int(ids.size)


def _list_ids(memory: ReplayMemory) -> NDArray[np.int64]:
    ids = np.arange(memory.first_id, memory.next_id)
    return ids[memory.are_valid(ids)] if len(ids) else ids


class _ArrayMember(NamedTuple):
    """One array of the file."""

    name: str
    field: str  # Attribute of a batch.
    tree: Tree | None  # Structure of the field. None: the field is one array.
    leaf: int  # Number of the array among the leaves of the field.


def _list_members(schema: Schema) -> Iterator[_ArrayMember]:
    for name in _OUTCOMES:
        yield _ArrayMember(name, name, None, 0)
    trees = (
        ("obs", schema.observation),
        ("action", schema.action),
        ("next_obs", schema.observation),
        ("extras", schema.extras),
    )
    for field, tree in trees:
        marks = tree.build([np.array(number) for number in range(len(tree.leaves))])
        for name, number in sorted(_name_leaves(field, marks), key=itemgetter(1)):
            yield _ArrayMember(name, field, tree, number)


def _name_leaves(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of every leaf below `value`. The value of a leaf is its number."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _name_leaves(f"{name}/{key}", child)
    elif isinstance(value, tuple):
        for number, child in enumerate(value):
            yield from _name_leaves(f"{name}/{number}", child)
    else:
        yield name, int(value)


def _collect(memory: ReplayMemory, ids: NDArray[np.int64], member: _ArrayMember) -> NDArray[Any]:
    """Return the array `member` for all transitions."""
    pieces = []
    for start in range(0, max(1, len(ids)), _ROWS):
        wanted = ids[start : start + _ROWS]
        value = getattr(memory.gather(wanted), member.field)
        if member.tree is not None:
            value = member.tree.flatten(value, (len(wanted),), member.field)[member.leaf]
        pieces.append(value)
    return np.concatenate(pieces)


def _write_array(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)

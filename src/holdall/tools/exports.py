"""Exports of a memory to files of other programs: an .npz file, or a replay buffer of Stable-Baselines3."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.errors import ArgumentError, MissingPackageError
from holdall.memory import ReplayMemory
from holdall.schema import Schema, Tree
from holdall.tools.datasets import OnProgress, build_space

_ROWS_AT_ONCE = 1024
"""Transitions that are read at once, and transitions between two reports of progress."""
_OUTCOMES = ("reward", "terminated", "truncated")


def export_npz(memory: ReplayMemory, file: Path, on_progress: OnProgress) -> int:
    """Write every transition, oldest first, with one array per field. Return the number of transitions.

    The arrays are `obs`, `action`, `reward`, `next_obs`, `terminated`, `truncated`, `extras/NAME` and `ids`. A field
    that is a Dict or a Tuple has one array per leaf: `obs/camera`, `obs/0`. Only one array at a time is in memory.
    """
    ids = _list_ids(memory)
    members = list(_list_members(memory.schema))
    with contextlib.ExitStack() as undo:
        archive = undo.enter_context(zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED, allowZip64=True))
        undo.callback(file.unlink)  # Removes an incomplete file.
        for number, member in enumerate(members, 1):
            _write_array(archive, member.name, _gather_array(memory, ids, member))
            on_progress(number * len(ids) // len(members), len(ids))
        _write_array(archive, "ids", ids)
        archive.close()  # Writes the directory of the archive, which can fail, too.
        undo.pop_all()
    return len(ids)


def export_sb3(memory: ReplayMemory, file: Path, on_progress: OnProgress) -> int:
    """Write a pickled buffer for `model.load_replay_buffer` of Stable-Baselines3. Return the number of transitions.

    The buffer is one of Stable-Baselines3's own, so its arrays are uncompressed and all in RAM at once. It has one row
    per tick, so ticks with a missing transition are left out.
    """
    try:
        from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer  # noqa: PLC0415  an extra
        from stable_baselines3.common.save_util import save_to_pkl  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackageError(
            "Exporting a .pkl file needs Stable-Baselines3. Run: pip install 'holdall[sb3]'"
        ) from error
    lanes = memory.num_envs
    observation_space = build_space(memory.schema.observation)
    if isinstance(observation_space, spaces.Tuple) or memory.schema.reward_shape:
        raise ArgumentError(
            "Stable-Baselines3 has no buffer for Tuple observations or rewards with a shape. Export .npz."
        )
    ids = np.arange(memory.first_id, memory.next_id).reshape(-1, lanes)
    ids = ids[memory.are_valid(ids.reshape(-1)).reshape(-1, lanes).all(axis=1)]
    kind: Any = DictReplayBuffer if isinstance(observation_space, spaces.Dict) else ReplayBuffer
    size = max(1, len(ids)) * lanes
    buffer = kind(size, observation_space, build_space(memory.schema.action), device="cpu", n_envs=lanes)
    for done, tick in enumerate(ids):
        batch = memory.gather(tick)
        ends = batch.terminated | batch.truncated
        infos = [
            {"TimeLimit.truncated": bool(is_truncated and not is_terminated)}
            for is_truncated, is_terminated in zip(batch.truncated, batch.terminated, strict=True)
        ]
        buffer.add(batch.obs, batch.next_obs, batch.action, batch.reward, ends, infos)
        if done % _ROWS_AT_ONCE == 0:
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
    tree: Tree | None  # Structure of the field. None: the field is a single array.
    leaf: int  # Index of the array among the leaves of the field.


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
        leaf_indices = tree.build([np.array(index) for index in range(len(tree.leaves))])
        for name, index in sorted(_name_leaves(field, leaf_indices), key=itemgetter(1)):
            yield _ArrayMember(name, field, tree, index)


def _name_leaves(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield the name and the index of every leaf. `value` is a field that has the index of each leaf in its place."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _name_leaves(f"{name}/{key}", child)
    elif isinstance(value, tuple):
        for number, child in enumerate(value):
            yield from _name_leaves(f"{name}/{number}", child)
    else:
        yield name, int(value)


def _gather_array(memory: ReplayMemory, ids: NDArray[np.int64], member: _ArrayMember) -> NDArray[Any]:
    """Return the array `member` for all transitions."""
    pieces = []
    for start in range(0, max(1, len(ids)), _ROWS_AT_ONCE):
        part = ids[start : start + _ROWS_AT_ONCE]
        value = getattr(memory.gather(part), member.field)
        if member.tree is not None:
            value = member.tree.flatten(value, (len(part),), member.field)[member.leaf]
        pieces.append(value)
    return np.concatenate(pieces)


def _write_array(archive: zipfile.ZipFile, name: str, array: NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)

"""Buffers among the live objects: buffers of libraries, owners of large arrays, deques and lists."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import FrameType, ModuleType
from typing import Any

from .arrays import (
    MAX_DEPTH,
    MAX_SAMPLED_ITEMS,
    count_bytes,
    count_new_bytes,
    describe_array,
    find_address,
    find_root,
    has_arrays,
    walk_arrays,
)
from .heap import MIN_ARRAY_BYTES, LiveHeap
from .objects import get_attributes, get_count, get_package, name_class_of, read_settings
from .snapshot import FoundArray, FoundBuffer

_CAPACITY_NAMES = (
    "capacity",
    "buffer_size",
    "max_size",
    "maxlen",
    "max_len",
    "memory_size",
    "mem_size",
    "replay_size",
    "max_mem",
    "max_length",
    "size",
)
"""Attributes that may have the capacity of a deque or list in the same object, in order of preference."""
_MIN_LIST_ITEMS = 100
"""Lists, and deques without `maxlen`, are not taken for buffers if they have fewer items."""


def find_buffers(objects: LiveHeap) -> Iterator[FoundBuffer]:
    """Describe every buffer: buffers of libraries, then owners of large arrays, then deques and lists."""
    inner = {id(part) for buffer in objects.buffers for part in _get_parts(buffer)}
    described = [
        _describe_buffer(buffer, objects)
        for buffer in objects.buffers
        if id(buffer) not in inner and get_package(type(buffer)) != "holdall"
    ]
    completed = _complete_empty_buffers([found for found in described if found is not None])
    yield from (found for found in completed if found.nbytes)
    for optimizer in objects.optimizers:
        _claim_parameters(optimizer, objects)
    yield from _find_owners(objects)
    yield from _find_sequences(objects)


def _get_parts(buffer: Any) -> Iterable[Any]:
    """Return the buffers inside a buffer. Tianshou's managers consist of several."""
    parts = get_attributes(buffer).get("buffers", ())
    return parts if isinstance(parts, (list, tuple)) else list(getattr(parts, "flat", ()))


def _describe_buffer(buffer: Any, objects: LiveHeap) -> FoundBuffer | None:
    """Describe a buffer of a library from its arrays."""
    attributes = get_attributes(buffer)
    arrays = []
    addresses = set()
    for path, array in walk_arrays(dict(attributes), "", -2):
        root = find_root(array)
        if find_address(root) in addresses or "_space" in path:
            continue
        addresses.add(find_address(root))
        objects.claim(root)
        arrays.append(describe_array(path.replace("_tensordict.", "").lstrip("."), root))
    n_envs = get_count(attributes, ("n_envs", "buffer_num")) or 1
    rows = get_count(attributes, ("buffer_size", "maxsize", "max_size"))
    storage = attributes.get("_storage")
    if rows is None and storage is not None:
        rows = get_count(get_attributes(storage), ("max_size",))
    if get_package(type(buffer)) == "tianshou":
        n_envs = 1
    nbytes = sum(array.nbytes for array in arrays) + _count_info_bytes(attributes)
    listed = get_attributes(storage).get("_storage") if storage is not None else None
    if isinstance(listed, list):
        return _describe_sequence(listed, objects, f"{objects.find_name(buffer)}.storage", name_class_of(buffer), rows)
    position = get_count(attributes, ("pos", "_size")) or 0
    filled = rows if attributes.get("full") and rows else position
    kind = "rollout" if "Rollout" in type(buffer).__name__ else "replay"
    return FoundBuffer(
        owner=objects.find_name(buffer),
        class_name=name_class_of(buffer),
        kind=kind,
        nbytes=nbytes,
        rows=rows,
        n_envs=n_envs,
        nbytes_now=nbytes,
        items_now=int(filled),
        arrays=tuple(arrays),
        settings=read_settings(attributes),
    )


def _complete_empty_buffers(buffers: list[FoundBuffer]) -> Iterator[FoundBuffer]:
    """Describe Tianshou's empty buffers by the arrays of the fullest buffer.

    Tianshou allocates arrays when experience is first added, and its trainers fill the buffer for tests first. The
    buffer for training is then still empty, but it will get experience with the same shapes and dtypes.
    """
    filled = max((one for one in buffers if _get_batch_arrays(one)), key=lambda one: one.items_now, default=None)
    for buffer in buffers:
        rows = buffer.rows
        is_empty = buffer.class_name.startswith("tianshou.") and not _get_batch_arrays(buffer)
        if not is_empty or rows is None or filled is None:
            yield buffer
            continue
        arrays = [
            replace(
                array, shape=(rows, *array.shape[1:]), nbytes=array.nbytes // array.shape[0] * rows, resident_bytes=0
            )
            for array in _get_batch_arrays(filled)
        ]
        yield replace(
            buffer,
            arrays=(*buffer.arrays, *arrays),
            nbytes=buffer.nbytes + sum(array.nbytes for array in arrays),
            is_exact=False,
        )


def _get_batch_arrays(buffer: FoundBuffer) -> list[FoundArray]:
    """Return the arrays of the batch in which Tianshou's buffers keep experience, one entry for each row."""
    return [one for one in buffer.arrays if one.name.startswith("_meta.") and one.shape[:1] == (buffer.rows,)]


def _count_info_bytes(attributes: Mapping[str, Any]) -> int:
    """Return the bytes of the dicts that `HerReplayBuffer` keeps in its array of objects, one per transition."""
    infos: Any = attributes.get("infos")
    if str(getattr(infos, "dtype", "")) != "object" or not infos.size:
        return 0
    return int(infos.size) * sys.getsizeof(infos.flat[0])


def _find_owners(objects: LiveHeap) -> Iterator[FoundBuffer]:
    """Group the remaining large arrays by the object that owns them: buffers of the user's own classes."""
    groups: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}
    for array, owners in list(objects.find_unclaimed_arrays()):
        owner, name = objects.name_array(array, owners)
        if owner is None or _is_network(owner, array):
            continue
        groups.setdefault(id(owner), (owner, []))[1].append((name, array))
    for owner, named in groups.values():
        for _, array in named:
            objects.claim(array)
        if isinstance(owner, (FrameType, ModuleType)):
            for name, array in named:
                yield _describe_arrays(name, "", [(name, array)], {})
            continue
        attributes = get_attributes(owner)
        small = [
            (path, find_root(array))
            for path, array in walk_arrays(dict(attributes), "", MAX_DEPTH - 2)
            if 1024 <= count_bytes(find_root(array)) < MIN_ARRAY_BYTES
        ]
        rows = {int(array.shape[0]) for _, array in named if array.shape}
        same_rows = [(name, array) for name, array in small if array.shape and int(array.shape[0]) in rows]
        for _, array in same_rows:
            objects.claim(array)
        yield _describe_arrays(objects.find_name(owner), name_class_of(owner), [*named, *same_rows], attributes)


def _describe_arrays(
    owner: str, class_name: str, named: list[tuple[str, Any]], attributes: Mapping[str, Any]
) -> FoundBuffer:
    arrays = tuple(describe_array(name, array) for name, array in named)
    largest = max(arrays, key=lambda array: array.nbytes)
    nbytes = sum(array.nbytes for array in arrays)
    rows = largest.shape[0] if largest.shape else None
    return FoundBuffer(
        owner=owner,
        class_name=class_name,
        kind="arrays",
        nbytes=nbytes,
        rows=rows,
        n_envs=1,
        nbytes_now=nbytes,
        items_now=0,
        arrays=arrays,
        settings=read_settings(attributes),
    )


def _is_network(owner: Any, array: Any) -> bool:
    """Return whether an array is a parameter, a gradient or a buffer of a torch module."""
    if getattr(array, "requires_grad", False):
        return True
    return any(base.__name__ in {"Module", "Optimizer"} for base in type(owner).__mro__)


def _find_sequences(objects: LiveHeap) -> Iterator[FoundBuffer]:
    """Describe deques and lists of arrays that are large, or will be large when they are full."""
    seen: set[int] = set()
    for sequence, owner in objects.sequences:
        if id(sequence) in seen:
            continue
        seen.add(id(sequence))
        maxlen = sequence.maxlen if isinstance(sequence, deque) else None
        if maxlen is None and len(sequence) < _MIN_LIST_ITEMS:
            continue
        if not has_arrays(_get_first_item(sequence)):
            continue
        holder = owner
        if isinstance(owner, dict):
            holder = objects.find_holder_of_attributes(owner) or owner
        name = objects.name_attribute(holder, sequence)
        rows = maxlen
        if rows is None and not isinstance(holder, (dict, FrameType, ModuleType)):
            rows = get_count(get_attributes(holder), _CAPACITY_NAMES)
        found = _describe_sequence(sequence, objects, name, type(sequence).__name__, rows)
        if found is not None and max(found.nbytes, found.nbytes_now) >= MIN_ARRAY_BYTES // 16:
            yield found


def _get_first_item(sequence: Any) -> Any:
    with contextlib.suppress(Exception):
        return next((item for item in list(sequence)[:MAX_SAMPLED_ITEMS] if item is not None), None)
    return None


def _describe_sequence(
    sequence: Any, objects: LiveHeap, owner: str, class_name: str, rows: int | None
) -> FoundBuffer | None:
    """Describe a deque or a list from a sample of its newest items. Arrays that items share are counted once."""
    items = [item for item in list(sequence) if item is not None]
    if not items:
        return None
    if rows is not None and rows < len(items):
        rows = None
    if rows is None and len(items) < len(sequence):
        rows = len(sequence)
    bytes_per_item = count_new_bytes(items[-MAX_SAMPLED_ITEMS:])
    filled_bytes = int(bytes_per_item * len(items))
    return FoundBuffer(
        owner=owner,
        class_name=class_name,
        kind="deque" if isinstance(sequence, deque) else "list",
        nbytes=filled_bytes if rows is None else int(bytes_per_item * rows),
        rows=rows,
        n_envs=1,
        nbytes_now=filled_bytes,
        items_now=len(items),
        is_exact=False,
        settings={"bytes_per_item": bytes_per_item},
    )


def _claim_parameters(optimizer: Any, objects: LiveHeap) -> None:
    with contextlib.suppress(Exception):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                objects.claim(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                if hasattr(value, "untyped_storage"):
                    objects.claim(value)

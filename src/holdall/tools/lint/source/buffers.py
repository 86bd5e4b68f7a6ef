"""The buffers that a program makes itself, or takes from a library other than Stable-Baselines3's models.

In:  what the interpreter recorded: arrays, containers and what is appended to them, buffers of libraries.
Out: one PlainBuffer for each: what it keeps, how many times, and the bytes of all of it once it is full.
Arrays that one object allocates are one buffer. Of a container the bytes are those of the arrays that it keeps; an
array that two transitions share counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from holdall.errors import HoldallError
from holdall.schema import Leaf
from holdall.tools.lint.run import NO_ACTION, UNKNOWN, NotKnownError, PlainBuffer, SpaceInfo, StoredField, known, whole
from holdall.tools.lint.source.arrays import dtype_of, leaf_arrays, shape_of, space_sample
from holdall.tools.lint.source.containers import MANY
from holdall.tools.lint.source.frameworks import KEEPING, held_env
from holdall.tools.lint.source.values import (
    ArrayValue,
    CallArguments,
    InstanceValue,
    ListValue,
    TableValue,
    candidates_of,
    known_items,
    likely,
)
from holdall.tools.plan import spec

_NAMED_BUFFER = re.compile(r"buffer|memory|replay|experience|rollout|transition|storage|dataset", re.IGNORECASE)
_NEXT = re.compile(r"next|new|obs2|s2|_prime")
_LEAST_STATE = 512  # bytes, from which on an array is taken for the observation
_OBJECT_BYTES = 112  # of the object of an array, beside its elements


def plain_buffers(interpreter: Any) -> list[PlainBuffer]:
    """Return every buffer that is no part of a model."""
    seen: dict[tuple[Any, ...], PlainBuffer] = {}
    for one in (*_libraries(interpreter), *_allocated(interpreter), *_containers(interpreter)):
        seen.setdefault((one.place, one.title, one.nbytes), one)
    return list(seen.values())


def _events(interpreter: Any, what: str) -> list[Any]:
    return [made for made in interpreter.made if made.what == what]


def _buffer(
    interpreter: Any, made: Any, title: str, rows: int | None, fields: Iterable[StoredField], *,
    nbytes: int | None = None, is_buffer: bool = True, **more: Any,
) -> PlainBuffer:  # fmt: skip
    """Describe a buffer that is made where an event happened; without its bytes, it is `rows` times its fields."""
    kept = tuple(fields)
    total = (rows or 0) * sum(one.nbytes for one in kept) if nbytes is None else nbytes
    place, condition = interpreter.place(made.node), " and ".join(made.path)
    return PlainBuffer(title, rows, total, kept, place, condition, is_buffer=is_buffer, **more)


# ------------------------------------------------------------ arrays


def _allocated(interpreter: Any) -> Iterator[PlainBuffer]:
    groups: dict[Any, list[Any]] = {}
    for made in _events(interpreter, "array"):
        groups.setdefault(_owner(made), []).append(made)
    for owner, group in groups.items():
        unique = _alternatives(interpreter, {_origin(one): one for one in group})
        largest = max(unique, key=lambda one: one.value.nbytes).value.shape
        rows = whole(largest[0]) if largest else None
        kept = [one for one in unique if rows is None or whole((one.value.shape or (None,))[0]) == rows]
        fields = [field for one in kept for field in _fields(interpreter, one, rows)]
        total = sum(one.value.nbytes * max(one.detail.get("times") or 1, 1) for one in kept)
        title = owner.made_of.node.name if isinstance(owner, InstanceValue) and hasattr(owner.made_of, "node") else ""
        title = title or fields[0].name or "array"
        yield _buffer(
            interpreter, kept[0], title, rows, fields, nbytes=total,
            is_on_gpu=any(one.value.device.startswith("cuda") for one in kept),
            is_buffer=bool(_NAMED_BUFFER.search(title)) or any(_NEXT.search(one.name) for one in fields),
        )  # fmt: skip


def _owner(made: Any) -> Any:
    """Return the object that an array belongs to: a buffer, also where a function makes the array for it."""
    maker = made.detail["maker"]
    return maker if isinstance(maker, InstanceValue) and _NAMED_BUFFER.search(maker.kind) else made.owner


def _origin(made: Any) -> tuple[Any, Any]:
    """Return what made an array: a line, in one call of the function that it stands in."""
    return (next(iter(made.value.origins), id(made)), made.detail["call"])


def _name(interpreter: Any, origin: tuple[Any, Any]) -> str:
    return str(interpreter.names.get(origin) or interpreter.names.get(origin[0], ""))


def _alternatives(interpreter: Any, made: dict[Any, Any]) -> list[Any]:
    """Of arrays that one name is given in turn, or in branches, return one: the default, otherwise the largest."""
    ordered = sorted(made.items(), key=lambda one: (len(one[1].path), -one[1].value.nbytes))
    kept: dict[Any, Any] = {}
    for origin, one in ordered:
        kept.setdefault(_name(interpreter, origin) or origin, one)
    return [one for one in made.values() if one in kept.values()]


def _fields(interpreter: Any, made: Any, rows: int | None) -> list[StoredField]:
    shape = tuple(whole(one) or 0 for one in made.value.shape or ())
    shape, dtype = shape[1:] if rows else shape, made.value.dtype
    if not dtype.names:
        return [StoredField(_name(interpreter, _origin(made)), shape, dtype)]
    parts = [(name, dtype[name]) for name in dtype.names]  # a record for each transition
    return [StoredField(name, (*shape, *part.shape), part.base) for name, part in parts]


def _stored(array: ArrayValue, first: int = 0) -> StoredField:
    """Return what a buffer keeps of an array, from one of its axes on."""
    axes = (array.shape or ())[first:]
    return StoredField("", tuple(whole(axis) or 0 for axis in axes), array.dtype or np.dtype(np.float32))


# ------------------------------------------------------------ deques and lists


def _containers(interpreter: Any) -> Iterator[PlainBuffer]:
    appended: dict[int, list[Any]] = {}
    for made in _events(interpreter, "appended"):
        appended.setdefault(id(made.value), []).append(made)
    beside: dict[tuple[int, int], list[list[Any]]] = {}  # containers of one object and length: a field each
    for group in appended.values():
        container: ListValue = group[0].value
        owner = interpreter.owner_of(container)
        limit = whole(likely(container.maxlen))
        if limit is None and container.maxlen is None:
            limit = container.length if container.is_fixed else interpreter.capacity_of(owner)
        if limit is not None and limit >= MANY:
            is_plain = owner is None and not container.is_deque  # lists of the program, side by side
            beside.setdefault((0 if is_plain else id(owner or container), limit), []).append(group)
    for (_, limit), groups in beside.items():
        items = sorted(map(_fullest, groups), key=lambda one: -_size(one.detail["item"]))
        parts = [part for one in items for part in _parts_once(one.detail["item"])]
        arrays = _distinct(_alike([array for part in parts for array in leaf_arrays(part)]))
        sizes = [(one, one.kept) for one in arrays if one.nbytes and one.shape]  # a number is no array of its own
        if not sizes:
            continue
        is_whole = sizes[0][1] >= _LEAST_STATE or not any(_has_unknown(one.detail["item"]) for one in items)
        per_item = sum(size // one.shared_frames + _OBJECT_BYTES for one, size in sizes)
        group = next(group for group in groups if items[0] in group)
        made = group[0].value.node  # of several that one line adds to, each stands where it is made
        is_one_of = sum(other[0].node is group[0].node for other in appended.values()) > 1
        event = replace(group[0], node=made) if is_one_of and interpreter.was_reached(made) else group[0]
        yield _buffer(
            interpreter, event, group[0].value.name or "deque", limit, [_stored(one) for one, _ in sizes],
            nbytes=limit * per_item, is_container=True,
            is_exact=is_whole and all(one.shape is not None for one in arrays),
        )  # fmt: skip


def _parts_once(item: Any) -> Iterator[Any]:
    """Yield the parts of a transition; of objects that a loop hands from step to step, the one that holds most."""
    parts = known_items(item) or [item]
    seen: set[int] = set()
    for part in sorted(parts, key=lambda one: -_size(one)):
        made_at = {id(one.node) for one, _ in candidates_of(part) if isinstance(one, InstanceValue)}
        if not made_at & seen:
            yield part
        seen |= made_at


def _has_unknown(item: Any) -> bool:
    """Whether a part of what is appended is not known: it may be the observation."""
    parts = known_items(item) or (item.values() if isinstance(item, TableValue) else ())
    return item is UNKNOWN or any(part is UNKNOWN for part in parts)


def _fullest(group: list[Any]) -> Any:
    """Return what appended most; of several alike the last: by then a loop hands arrays from step to step."""
    return max(reversed(group), key=lambda one: _size(one.detail["item"]))


def _size(item: Any) -> int:
    return sum(array.nbytes or 0 for array in leaf_arrays(item))


def _alike(arrays: list[ArrayValue]) -> list[ArrayValue]:
    """Give an array of which an axis is not known the shape of one beside it that has the known axes: both are seen."""
    largest = max(arrays, key=lambda one: one.nbytes or 0, default=None)
    if largest is None or (largest.nbytes or 0) < _LEAST_STATE:
        return arrays
    known = [whole(axis) for axis in largest.shape or ()]

    def like(one: ArrayValue) -> bool:
        axes = [whole(axis) for axis in one.shape or ()]
        return one.nbytes is None and one.dtype == largest.dtype and [a for a in axes if a is not None] == known

    return [replace(one, shape=largest.shape) if like(one) else one for one in arrays]


def _distinct(arrays: list[ArrayValue]) -> list[ArrayValue]:
    """Leave out arrays whose memory is that of another one: the next step's observation is this one's next."""
    kept: list[ArrayValue] = []
    for array in sorted(arrays, key=lambda one: -(one.nbytes or 0)):
        if not any(array.origins & other.origins for other in kept):
            kept.append(array)
    return kept


# ------------------------------------------------------------ libraries


def _libraries(interpreter: Any) -> Iterator[PlainBuffer]:
    for made in _events(interpreter, "buffer"):
        package, _, last = made.detail.get("dotted", made.value.kind).rpartition(".")
        package = package.partition(".")[0]
        build = _BUILDERS.get(package, _keeping if package in KEEPING else _sb3)
        with suppress(NotKnownError, HoldallError):
            yield build(interpreter, made, last)


def _sb3(interpreter: Any, made: Any, last: str) -> PlainBuffer:
    given, is_rollout = made.arguments, "Rollout" in last
    size, count = given.number(0, "buffer_size"), given.count(6 if is_rollout else 4, "n_envs", 1)
    seen, acted = (given.likely(at, name) for at, name in ((1, "observation_space"), (2, "action_space")))
    if not isinstance(seen, SpaceInfo):
        raise NotKnownError
    action = acted.leaves[0] if isinstance(acted, SpaceInfo) else NO_ACTION
    options = {"optimize_memory_usage": given.get(5, "optimize_memory_usage", False),
               "handle_timeout_termination": given.get(6, "handle_timeout_termination", True)}  # fmt: skip
    if is_rollout:
        layout = spec.rollout_buffer(seen.leaves, action, size, count, buffer_class=last)
    else:
        options = options if all(isinstance(one, bool) for one in options.values()) else {}
        name = "DictReplayBuffer" if seen.is_dict and last == "ReplayBuffer" else last
        layout = spec.replay_buffer(seen.leaves, action, size, count, buffer_class=name, **options)
    fields = [StoredField(one.name, one.shape[2:], one.dtype) for one in layout.arrays]
    is_cleanrl = made.detail.get("dotted", made.value.kind).startswith("cleanrl")
    return _buffer(
        interpreter, made, last, layout.transitions, fields, nbytes=layout.nbytes,
        library="cleanrl" if is_cleanrl else "sb3", is_exact=isinstance(acted, SpaceInfo),
    )  # fmt: skip


def _torchrl(interpreter: Any, made: Any, last: str) -> PlainBuffer:
    storage, held = made.arguments.likely(None, "storage"), made.value.attributes
    if not isinstance(storage, InstanceValue):
        raise NotKnownError
    size = known(likely(storage.arguments.get("max_size", storage.arguments.get("0", UNKNOWN))))
    env = held_env(interpreter.torchrl_env)
    if env is not None and env.observation is not None:
        fields = _both(env.observation.leaves, "observation")
    else:
        first = 1 if held.get("is_batch") is True else 0  # without the axis of the transitions
        fields = [_stored(one, first) for one in leaf_arrays(held.get("added", UNKNOWN)) if one.nbytes]
    if not fields:
        raise NotKnownError
    return _buffer(
        interpreter, made, last, size, fields, library="torchrl", is_exact=False,
        is_on_disk="Memmap" in storage.kind, stack=env.stack if env else 1,
    )  # fmt: skip


def _both(leaves: Iterable[Leaf], name: str) -> list[StoredField]:
    """Return the observations of a transition, and the next ones."""
    return [
        StoredField(prefix + (one.name or name), one.shape, one.dtype) for prefix in ("", "next.") for one in leaves
    ]


def _tianshou(interpreter: Any, made: Any, last: str) -> PlainBuffer:
    given, env = made.arguments, held_env(made.value)
    size = given.number(0, "total_size" if "Vector" in last else "size")
    if env is None or env.observation is None:
        raise NotKnownError
    last_only = given.get(None, "save_only_last_obs", False) is True
    leaves = [replace(one, shape=one.shape[1:] if last_only else one.shape) for one in env.observation.leaves]
    fields = _both(leaves, "frame" if last_only else "obs")
    if given.get(None, "ignore_obs_next", False) is True:
        fields = fields[: len(leaves)]
    acted = env.action.leaves[0] if env.action is not None else Leaf("", (), np.dtype(np.int64))
    fields += (
        StoredField("act", acted.shape, acted.dtype), StoredField("rew", (), np.dtype(np.float64)),
        StoredField("flags", (3,), np.dtype(np.bool_)),
    )  # fmt: skip
    stack = 1 if last_only else env.stack
    return _buffer(interpreter, made, last, size, fields, library="tianshou", is_exact=False, stack=stack)


def _keeping(interpreter: Any, made: Any, last: str) -> PlainBuffer:
    """Size a buffer that keeps the observations of the environment that the program made."""
    at, name, times = KEEPING[made.value.kind.partition(".")[0]]
    size, env = made.arguments.number(at, name), interpreter.last_environment
    if env is None or env.observation is None:
        raise NotKnownError
    sample = space_sample(env.observation, made.node, env.stack if env.is_lazy else 1)
    processor = likely(made.value.attributes.get("processor"))
    if isinstance(processor, InstanceValue):
        method = interpreter.member(processor, "process_observation")
        sample = likely(interpreter.call(method, CallArguments([sample]), made.node)) or sample
    arrays = [one for one in leaf_arrays(sample) if one.nbytes]
    nbytes = size * times * sum((one.nbytes or 0) // one.shared_frames for one in arrays)
    return _of_library(interpreter, made, last, size, [*map(_stored, arrays)] * times, nbytes)


def _of_library(
    interpreter: Any, made: Any, last: str, size: int, fields: list[StoredField], nbytes: int | None = None
) -> PlainBuffer:
    if not fields:
        raise NotKnownError
    return _buffer(interpreter, made, last, size, fields, nbytes=nbytes, is_exact=False)


def _cpprb(interpreter: Any, made: Any, last: str) -> PlainBuffer:
    size, table = made.arguments.number(0, "size"), made.arguments.likely(1, "env_dict")
    given = (made.arguments.get(None, option, None) for option in ("next_of", "stack_compress"))
    shared, packed = (known_items(one) or [one] for one in given)
    fields = []
    for name, entry in table.items() if isinstance(table, TableValue) else ():
        is_shared = str(name).startswith("next_") and str(name).removeprefix("next_") in (
            known_items(shared) or [shared]
        )
        if isinstance(entry, TableValue) and not is_shared:
            with suppress(NotKnownError):
                one = _declared(str(name), entry.get("shape", 1), entry.get("dtype", "float32"))
                fields.append(replace(one, shape=one.shape[:-1]) if name in packed else one)
    return _of_library(interpreter, made, last, size, fields)


def _dopamine(interpreter: Any, made: Any, last: str) -> PlainBuffer:
    given = made.arguments
    dtype = given.get(None, "observation_dtype", "uint8")
    field = _declared("observation", given.get(0, "observation_shape"), dtype)
    return _of_library(interpreter, made, last, given.number(2, "replay_capacity"), [field])


def _declared(name: str, shape: Any, dtype: Any) -> StoredField:
    axes, kind = shape_of(shape), dtype_of(dtype)
    if not axes or kind is None:
        raise NotKnownError
    return StoredField(name, tuple(map(known, axes)), kind)


_BUILDERS = {"torchrl": _torchrl, "tianshou": _tianshou, "cpprb": _cpprb, "dopamine": _dopamine}

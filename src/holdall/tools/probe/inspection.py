"""Finds what a command has built among its live objects: models, buffers, memories, arrays, environments, threads.

`inspect(context)` returns fields of a `Snapshot`. Nothing is changed, and no method of the command's objects is called
except properties of arrays, spaces and holdall's memories.

This module runs in the command's process. It imports only the standard library, and recognises classes of libraries by
the names in their method resolution order.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import platform
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType, FunctionType, ModuleType
from typing import Any

from .snapshot import (
    FailedAllocation,
    FoundArray,
    FoundBuffer,
    FoundCallback,
    FoundEnvironment,
    FoundMemory,
    FoundModel,
    FoundOptimizer,
    FoundThread,
    Plain,
)

MIN_ARRAY_BYTES = 16 * 2**20
_MAX_SAMPLED_ITEMS = 64
_MAX_DEPTH = 6
_MAX_COUNTED_OBJECTS = 200_000
"""Objects that are visited to count the bytes of sampled items, so that the walk takes less than a second."""
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
"""Attributes that hold the capacity of an object whose list grows, in order of preference."""
_LIBRARIES = (
    "numpy",
    "torch",
    "gymnasium",
    "gym",
    "stable_baselines3",
    "sb3_contrib",
    "torchrl",
    "tianshou",
    "jax",
    "flax",
    "holdall",
)
_NOT_OWNERS = (FunctionType, ModuleType, type, FrameType)


def inspect(context: Mapping[str, Any], hidden: Sequence[tuple[Any, ...]] = ()) -> dict[str, Any]:
    """Return what was built, as fields of a `Snapshot`.

    Args:
        context: Objects of the event: `model`, `total_timesteps`, `callback`, `buffer`, `error`.
        hidden: Copies that the probe keeps. Their arrays are not the command's.
    """
    return _describe(LiveHeap(context, hidden=hidden), context)


def inspect_model(model: Any, total_timesteps: int | None, callback: Any) -> dict[str, Any]:
    """Return what belongs to one model, as fields of a `Snapshot`, without a look at other objects."""
    buffer = _get_model_buffer(model)
    context = {
        "model": model,
        "total_timesteps": total_timesteps,
        "callback": callback,
        "buffer": buffer,
        "memory": getattr(buffer, "memory", None),
    }
    return _describe(LiveHeap(context, has_heap=False), context)


def _get_model_buffer(model: Any) -> Any:
    attributes = _get_attributes(model)
    buffer = attributes.get("replay_buffer")
    return attributes.get("rollout_buffer") if buffer is None else buffer


def _describe(objects: LiveHeap, context: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        "models": lambda: [_describe_model(model, objects, context) for model in objects.models],
        "callbacks": lambda: _find_callbacks(objects, context.get("callback")),
        "memories": lambda: _find_memories(objects),
        "buffers": lambda: _find_buffers(objects),
        "arrays": objects.take_rest,
        "environments": lambda: _find_environments(objects),
        "optimizers": lambda: [_describe_optimizer(optimizer) for optimizer in objects.optimizers],
        "threads": _find_threads,
    }
    found: dict[str, Any] = {
        "versions": _read_versions(),
        "allocation": _read_allocation(context.get("error")),
    }
    notes = []
    for name, find in parts.items():
        try:
            found[name] = tuple(find())
        except Exception as error:
            notes.append(f"The {name} could not be read: {error!r}.")
    return found | {"notes": tuple(notes)}


def _find_threads() -> Iterator[FoundThread]:
    for thread in threading.enumerate():
        if thread.name != "holdall-probe":
            yield FoundThread(thread.name, thread.daemon)


class LiveHeap:
    """The live objects of this process, sorted by kind, with the names under which they were found."""

    def __init__(
        self, context: Mapping[str, Any], *, has_heap: bool = True, hidden: Sequence[tuple[Any, ...]] = ()
    ) -> None:
        """Sort the objects of `context`, and with `has_heap` all objects of the process except those in `hidden`."""
        self.models: list[Any] = []
        self.buffers: list[Any] = []
        self.memories: list[Any] = []
        self.environments: list[Any] = []
        self.callbacks: list[Any] = []
        self.optimizers: list[Any] = []
        self.sequences: list[tuple[Any, Any]] = []
        """Deques and long lists, with the object that refers to them."""
        self._names: dict[int, str] = {}
        self._arrays: dict[int, tuple[Any, list[Any]]] = {}
        """Large arrays by the address of their data, with the objects that refer to them."""
        self._taken: set[int] = set()
        self._hidden = {id(part) for value in hidden for part in (value, *value)} | {id(hidden)}
        self._frames = list(_walk_frames(context.get("error")))
        for value in context.values():
            self._sort(value)
        if has_heap:
            self._walk()
        self._name_variables()

    # ---------------------------------------------------------------- finding

    def _walk(self) -> None:
        """Sort every object that the garbage collector knows, and collect large arrays with their owners."""
        own = {id(vars(self)), id(self._names), id(self._arrays), id(self._frames), *self._hidden}
        kinds: dict[type, str] = {}
        seen: set[int] = set()
        for value in gc.get_objects():
            if id(value) in own:
                continue
            cls = type(value)
            kind = kinds.get(cls)
            if kind is None:
                kind = _classify(cls)
                kinds[cls] = kind
            if kind and id(value) not in seen:
                seen.add(id(value))
                self._keep(kind, value)
            if issubclass(cls, _NOT_OWNERS):
                continue
            for part in gc.get_referents(value):
                part_class = type(part)
                part_kind = kinds.get(part_class)
                if part_kind is None:
                    part_kind = _classify(part_class)
                    kinds[part_class] = part_kind
                if part_kind == "array":
                    self._keep_array(part, value)
                elif part_kind == "sequence" and len(part) >= 1 and id(part) not in own:
                    self.sequences.append((part, value))
        for frame in self._frames:
            for part in frame.f_locals.values():
                if _classify(type(part)) == "array":
                    self._keep_array(part, frame)
                elif isinstance(part, (list, deque)) and len(part) >= 1:
                    self.sequences.append((part, frame))

    def _sort(self, value: Any) -> None:
        kind = _classify(type(value))
        if kind:
            self._keep(kind, value)

    def _keep(self, kind: str, value: Any) -> None:
        target = {
            "model": self.models,
            "buffer": self.buffers,
            "memory": self.memories,
            "environment": self.environments,
            "callback": self.callbacks,
            "optimizer": self.optimizers,
        }.get(kind)
        if target is not None and not any(one is value for one in target):
            target.append(value)

    def _keep_array(self, array: Any, owner: Any) -> None:
        root = _find_root(array)
        if _count_bytes(root) < MIN_ARRAY_BYTES:
            return
        _, owners = self._arrays.setdefault(_find_address(root), (root, []))
        owners.append(owner)

    def _name_variables(self) -> None:
        """Name objects after the variables and attributes that refer to them: locals, globals, then attributes."""
        for module_name, module in list(sys.modules.items()):
            if not _is_users(module_name, getattr(module, "__file__", None)):
                continue
            prefix = "" if module_name == "__main__" else f"{module_name}."
            for name, value in list(vars(module).items()):
                self._names.setdefault(id(value), f"{prefix}{name}")
        for frame in reversed(self._frames):
            if _is_users(frame.f_globals.get("__name__", ""), frame.f_code.co_filename):
                self._name_locals(frame)
        for owner in [*self.models, *self.environments, *self.buffers]:
            for name, value in list(_get_attributes(owner).items()):
                if _classify(type(value)) in {"buffer", "memory", "environment"}:
                    self._names.setdefault(id(value), f"{self.name_of(owner)}.{name}")
        for frame in reversed(self._frames):
            self._name_locals(frame)

    def _name_locals(self, frame: FrameType) -> None:
        for name, value in list(frame.f_locals.items()):
            if name != "self":
                self._names.setdefault(id(value), name)

    def name_of(self, value: Any) -> str:
        """Return the variable or attribute that refers to `value`, or the name of its class."""
        return self._names.get(id(value)) or type(value).__name__

    def name_attribute(self, holder: Any, wanted: Any) -> str:
        """Return the name of a value that `holder` refers to: a variable of a frame or a module, or an attribute."""
        prefix = ""
        if isinstance(holder, FrameType):
            values: Mapping[str, Any] = holder.f_locals
        elif isinstance(holder, ModuleType):
            values = vars(holder)
        elif isinstance(holder, dict):
            values = holder
        else:
            values = _get_attributes(holder)
            prefix = f"{self.name_of(holder)}."
        names = [str(name) for name, value in list(values.items()) if value is wanted]
        return f"{prefix}{names[0] if names else type(wanted).__name__}"

    def claim(self, array: Any) -> None:
        """Record that `array` belongs to a buffer or a network, so that it is not reported a second time."""
        self._taken.add(_find_address(_find_root(array)))

    def large_arrays(self) -> Iterator[tuple[Any, list[Any]]]:
        """Yield the large arrays that no buffer has claimed, each with the objects that refer to it."""
        for address, (array, owners) in self._arrays.items():
            if address not in self._taken:
                yield array, owners

    def take_rest(self) -> Iterator[FoundArray]:
        """Describe the large arrays that belong to no buffer."""
        for array, owners in self.large_arrays():
            yield describe_array(self.name_array(array, owners)[1], array)

    def name_array(self, array: Any, owners: list[Any]) -> tuple[Any, str]:
        """Return the object that owns an array, and the attribute or variable under which it keeps it."""
        address = _find_address(array)
        for owner in owners:
            if isinstance(owner, FrameType):
                return owner, _find_key(owner.f_locals, address)
            if not isinstance(owner, (dict, list, tuple, set)):
                return owner, _find_key(_get_attributes(owner), address)
        for owner in owners:
            if isinstance(owner, dict):
                holder, name = self._find_holder(owner)
                key = _find_key(owner, address)
                return holder, f"{name}.{key}" if name else key
        return None, "array"

    def _find_holder(self, container: Any) -> tuple[Any, str]:
        """Return the object whose attributes are `container`, or that has `container` as an attribute."""
        for referrer in gc.get_referrers(container):
            if isinstance(referrer, ModuleType):
                return referrer, ""
            attributes = _get_attributes(referrer)
            if attributes is container:
                return referrer, ""
            if isinstance(referrer, dict):
                names = [str(name) for name, value in list(referrer.items()) if value is container]
                if names:
                    return self.find_holder_of_attributes(referrer), names[0]
            names = [name for name, value in list(attributes.items()) if value is container]
            if names:
                return referrer, names[0]
        return None, ""

    def find_holder_of_attributes(self, attributes: dict[str, Any]) -> Any:
        """Return the object whose attributes are the dict `attributes`; None if there is none."""
        for referrer in gc.get_referrers(attributes):
            if not isinstance(referrer, dict) and _get_attributes(referrer) is attributes:
                return referrer
        return None


def _classify(cls: type) -> str:
    """Return the kind of the instances of a class; empty for all that are not of interest."""
    if issubclass(cls, (deque, list)):
        return "sequence"
    for base in cls.__mro__:
        kind = _KINDS.get((_get_package(base), base.__name__))
        if kind:
            return kind
    return ""


def _get_package(cls: type) -> str:
    """Return the top-level package of a class."""
    module = getattr(cls, "__module__", "")
    return module.partition(".")[0] if isinstance(module, str) else ""


_KINDS = {
    ("numpy", "ndarray"): "array",
    ("torch", "Tensor"): "array",
    ("jaxlib", "ArrayImpl"): "array",
    ("stable_baselines3", "BaseAlgorithm"): "model",
    ("stable_baselines3", "BaseBuffer"): "buffer",
    ("stable_baselines3", "BaseCallback"): "callback",
    ("stable_baselines3", "VecEnv"): "environment",
    ("cleanrl_utils", "BaseBuffer"): "buffer",
    ("cleanrl_utils", "ReplayBuffer"): "buffer",
    ("tianshou", "ReplayBuffer"): "buffer",
    ("torchrl", "ReplayBuffer"): "buffer",
    ("holdall", "ReplayMemory"): "memory",
    ("holdall", "RolloutMemory"): "memory",
    ("gymnasium", "Env"): "environment",
    ("gymnasium", "VectorEnv"): "environment",
    ("gym", "Env"): "environment",
    ("torch", "Optimizer"): "optimizer",
}
"""Kinds by the package and the name of a base class."""


def _walk_frames(error: BaseException | None) -> Iterator[FrameType]:
    """Yield the frames of all threads and of an error's traceback, without those of the probe."""
    trace = None if error is None else error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
    for innermost in list(sys._current_frames().values()):
        frame: FrameType | None = innermost
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith(("holdall_probe", "holdall.tools.probe")):
                yield frame
            frame = frame.f_back


def _is_users(module_name: str, file: str | None) -> bool:
    """Return whether a module is the user's own, not an installed or standard one."""
    if module_name == "__main__":
        return True
    if not file or "site-packages" in file or file.startswith(("<", sys.base_prefix, sys.prefix)):
        return False
    return module_name.partition(".")[0] not in {"holdall", "holdall_probe"}


def _get_attributes(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an instance, without calling code of its class."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        found = {}
    names = [name for base in type(value).__mro__ for name in _get_slots(base)]
    if not names:
        return found if isinstance(found, dict) else dict(found)
    slots = {}
    for name in names:
        with contextlib.suppress(AttributeError):
            slots[name] = object.__getattribute__(value, name)
    return {**found, **slots}


def _get_slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _find_key(values: Mapping[str, Any], address: int) -> str:
    """Return the name under which a mapping keeps the array at `address`, directly or inside a dict or a list."""
    for name, value in list(values.items()):
        for path, array in _walk_arrays(value, str(name), 0):
            if _find_address(_find_root(array)) == address:
                return path
    return "array"


# ---------------------------------------------------------------- arrays


def _find_root(array: Any) -> Any:
    """Return the array that owns the data of a view."""
    while isinstance(getattr(array, "base", None), type(array)) or type(getattr(array, "base", None)).__name__ in {
        "ndarray",
        "memmap",
    }:
        array = array.base
    return array


def _find_address(array: Any) -> int:
    """Return an identity of the data of an array."""
    with contextlib.suppress(Exception):
        if hasattr(array, "untyped_storage"):
            return int(array.untyped_storage().data_ptr()) or id(array)
        if hasattr(array, "__array_interface__"):
            return int(array.__array_interface__["data"][0])
    return id(array)


def _count_bytes(array: Any) -> int:
    """Return the bytes of an array, or of the storage that a tensor is a view of."""
    with contextlib.suppress(Exception):
        if hasattr(array, "untyped_storage"):
            return int(array.untyped_storage().nbytes())
        return int(array.nbytes)
    return 0


def describe_array(name: str, array: Any) -> FoundArray:
    """Describe an array of NumPy, torch or JAX."""
    device = "cpu"
    with contextlib.suppress(Exception):
        device = str(getattr(array.device, "type", None) or getattr(array.device, "platform", None) or array.device)
    is_on_disk = type(array).__name__ in {"memmap", "MemoryMappedTensor"}
    shape = tuple(int(side) for side in array.shape)
    dtype = str(array.dtype).removeprefix("torch.")
    nbytes = _count_bytes(array)
    resident = _count_resident(_find_address(array), nbytes) if device == "cpu" else 0
    return FoundArray(name, shape, dtype, nbytes, device, is_on_disk, resident)


def _count_resident(address: int, nbytes: int) -> int:
    """Return the bytes of a range of this process that are in RAM; all of them where the system does not tell."""
    page = mmap.PAGESIZE
    first = address // page
    count = (address + nbytes + page - 1) // page - first
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:  # noqa: PTH123  A Path cannot be unbuffered.
            file.seek(first * 8)
            entries = file.read(count * 8)
    except OSError:
        return nbytes
    # The highest bit of the last byte of an entry says that the page is present.
    present = sum(byte >> 7 for byte in entries[7::8])
    return min(present * page, nbytes)


def _walk_arrays(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield the arrays in a value, its items and its attributes, with their names."""
    kind = _classify(type(value))
    if kind == "array":
        yield name, value
        return
    if depth >= _MAX_DEPTH or kind:
        return
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, tuple):
        items = list(enumerate(value))
    elif _get_package(type(value)) in {"tensordict", "torchrl", "tianshou"}:
        items = list(_get_attributes(value).items())
    else:
        return
    for key, item in items:
        yield from _walk_arrays(item, f"{name}.{key}" if name else str(key), depth + 1)


# ---------------------------------------------------------------- buffers


def _find_buffers(objects: LiveHeap) -> Iterator[FoundBuffer]:
    """Describe every buffer: those of libraries, then owners of large arrays, then deques and lists."""
    inner = {id(part) for buffer in objects.buffers for part in _get_parts(buffer)}
    described = [
        _describe_buffer(buffer, objects)
        for buffer in objects.buffers
        if id(buffer) not in inner and _get_package(type(buffer)) != "holdall"
    ]
    completed = _complete_empty_buffers([found for found in described if found is not None])
    yield from (found for found in completed if found.nbytes)
    for optimizer in objects.optimizers:
        _claim_parameters(optimizer, objects)
    yield from _find_owners(objects)
    yield from _find_sequences(objects)


def _get_parts(buffer: Any) -> Iterable[Any]:
    """Return the buffers that a buffer consists of, as Tianshou's managers do."""
    parts = _get_attributes(buffer).get("buffers", ())
    return parts if isinstance(parts, (list, tuple)) else list(getattr(parts, "flat", ()))


def _describe_buffer(buffer: Any, objects: LiveHeap) -> FoundBuffer | None:
    """Describe a buffer of a library from its arrays."""
    attributes = _get_attributes(buffer)
    arrays = []
    addresses = set()
    for path, array in _walk_arrays(dict(attributes), "", -2):
        root = _find_root(array)
        if _find_address(root) in addresses or "_space" in path:
            continue
        addresses.add(_find_address(root))
        objects.claim(root)
        arrays.append(describe_array(path.replace("_tensordict.", "").lstrip("."), root))
    n_envs = _get_count(attributes, ("n_envs", "buffer_num")) or 1
    rows = _get_count(attributes, ("buffer_size", "maxsize", "max_size"))
    storage = attributes.get("_storage")
    if rows is None and storage is not None:
        rows = _get_count(_get_attributes(storage), ("max_size",))
    if _get_package(type(buffer)) == "tianshou":
        n_envs = 1
    nbytes = sum(array.nbytes for array in arrays) + _count_info_bytes(attributes)
    listed = _get_attributes(storage).get("_storage") if storage is not None else None
    if isinstance(listed, list):
        return _describe_sequence(listed, objects, f"{objects.name_of(buffer)}.storage", _name_class(buffer), rows)
    position = _get_count(attributes, ("pos", "_size")) or 0
    filled = rows if attributes.get("full") and rows else position
    kind = "rollout" if "Rollout" in type(buffer).__name__ else "replay"
    return FoundBuffer(
        owner=objects.name_of(buffer),
        class_name=_name_class(buffer),
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
    """Give Tianshou's buffers that have received nothing the arrays of one that has.

    Tianshou allocates arrays when experience is first added, and its trainers fill the buffer of the tests first. Both
    buffers get the experience of the same environment.
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
    for array, owners in list(objects.large_arrays()):
        owner, name = objects.name_array(array, owners)
        if owner is None or _is_network(owner, array):
            continue
        groups.setdefault(id(owner), (owner, []))[1].append((name, array))
    for owner, named in groups.values():
        for _, array in named:
            objects.claim(array)
        is_variable = isinstance(owner, (FrameType, ModuleType))
        if is_variable:
            for name, array in named:
                yield _describe_arrays(name, "", [(name, array)], {})
            continue
        attributes = _get_attributes(owner)
        small = [
            (path, _find_root(array))
            for path, array in _walk_arrays(dict(attributes), "", _MAX_DEPTH - 2)
            if 1024 <= _count_bytes(_find_root(array)) < MIN_ARRAY_BYTES
        ]
        rows = {int(array.shape[0]) for _, array in named if array.shape}
        same_rows = [(name, array) for name, array in small if array.shape and int(array.shape[0]) in rows]
        for _, array in same_rows:
            objects.claim(array)
        yield _describe_arrays(objects.name_of(owner), _name_class(owner), [*named, *same_rows], attributes)


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
    """Describe deques and lists whose items contain arrays and that are, or will be, large."""
    seen: set[int] = set()
    for sequence, owner in objects.sequences:
        if id(sequence) in seen:
            continue
        seen.add(id(sequence))
        maxlen = sequence.maxlen if isinstance(sequence, deque) else None
        if maxlen is None and len(sequence) < 100:
            continue
        if not _has_arrays(_first_item(sequence)):
            continue
        holder = owner
        if isinstance(owner, dict):
            holder = objects.find_holder_of_attributes(owner) or owner
        name = objects.name_attribute(holder, sequence)
        rows = maxlen
        if rows is None and not isinstance(holder, (dict, FrameType, ModuleType)):
            rows = _get_count(_get_attributes(holder), _CAPACITY_NAMES)
        found = _describe_sequence(sequence, objects, name, type(sequence).__name__, rows)
        if found is not None and max(found.nbytes, found.nbytes_now) >= MIN_ARRAY_BYTES // 16:
            yield found


def _first_item(sequence: Any) -> Any:
    with contextlib.suppress(Exception):
        return next((item for item in list(sequence)[:_MAX_SAMPLED_ITEMS] if item is not None), None)
    return None


def _describe_sequence(
    sequence: Any, objects: LiveHeap, owner: str, class_name: str, rows: int | None
) -> FoundBuffer | None:
    """Describe a deque or a list by the bytes of some consecutive items. Shared arrays are counted once."""
    items = [item for item in list(sequence) if item is not None]
    if not items:
        return None
    if rows is not None and rows < len(items):
        rows = None
    if rows is None and len(items) < len(sequence):
        rows = len(sequence)
    sampled = items[-_MAX_SAMPLED_ITEMS:]
    each = _count_new_bytes(sampled)
    filled = int(each * len(items))
    return FoundBuffer(
        owner=owner,
        class_name=class_name,
        kind="deque" if isinstance(sequence, deque) else "list",
        nbytes=filled if rows is None else int(each * rows),
        rows=rows,
        n_envs=1,
        nbytes_now=filled,
        items_now=len(items),
        is_exact=False,
        settings={"bytes_per_item": each},
    )


def _count_new_bytes(items: list[Any]) -> float:
    """Return the mean bytes that an item adds to the items before it."""
    seen: set[int] = set()
    _count_deep(items[0], seen)
    if len(items) == 1:
        return float(_count_deep(items[0], set()))
    return sum(_count_deep(item, seen) for item in items[1:]) / (len(items) - 1)


def _count_deep(value: Any, seen: set[int], depth: int = 0) -> int:
    """Return the bytes of a value and everything that it contains, without what was seen before."""
    if _classify(type(value)) == "array":
        root = _find_root(value)
        is_new = _find_address(root) not in seen
        seen.add(_find_address(root))
        is_known = id(value) in seen
        seen.add(id(value))
        header = 0 if is_known else sys.getsizeof(value) - (value.nbytes if value is root else 0)
        return (_count_bytes(root) if is_new else 0) + max(header, 0)
    if value is None or isinstance(value, (bool, *_NOT_OWNERS)) or id(value) in seen:
        return 0
    if depth > _MAX_DEPTH or len(seen) > _MAX_COUNTED_OBJECTS:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, Mapping):
        parts: list[Any] = list(value.values())
    elif isinstance(value, (tuple, list, deque)):
        parts = list(value)
    else:
        attributes = _get_attributes(value)
        parts = list(attributes.values())
        size += sys.getsizeof(attributes) if attributes else 0
    return size + sum(_count_deep(part, seen, depth + 1) for part in parts)


def _has_arrays(item: Any, depth: int = 0) -> bool:
    """Return whether an item of a sequence contains an array."""
    kind = _classify(type(item))
    if kind == "array":
        return True
    if kind not in {"", "sequence"} or depth > 3 or isinstance(item, (str, bytes, int, float, *_NOT_OWNERS)):
        return False
    if isinstance(item, Mapping):
        parts: list[Any] = list(item.values())[:8]
    elif isinstance(item, (tuple, list, deque)):
        parts = list(item)[:8]
    else:
        parts = list(_get_attributes(item).values())[:8]
    return any(_has_arrays(part, depth + 1) for part in parts)


# ---------------------------------------------------------------- holdall's memories


def _find_memories(objects: LiveHeap) -> Iterator[FoundMemory]:
    """Describe holdall's memories, each with the buffer that contains it."""
    owners: dict[int, Any] = {}
    for value in gc.get_objects():
        if _get_package(type(value)) == "holdall" and _classify(type(value)) != "memory":
            memory = _get_attributes(value).get("memory")
            if memory is not None:
                owners[id(memory)] = value
    for memory in objects.memories:
        owner = owners.get(id(memory))
        settings = _get_attributes(memory).get("_settings", {})
        try:
            report = memory.report()
        except Exception:  # A closed memory has no report.
            continue
        spill_dir = settings.get("spill_dir")
        yield FoundMemory(
            owner=objects.name_of(memory if owner is None else owner),
            class_name=_name_class(memory if owner is None else owner),
            capacity=int(getattr(memory, "capacity", 0) or memory.num_steps * memory.num_envs),
            n_envs=int(memory.num_envs),
            budget=settings.get("budget"),
            prefer=str(settings.get("prefer", "")),
            spill_dir=None if spill_dir is None else str(spill_dir),
            store_device=settings.get("store_device"),
            transitions=int(report.transitions),
            held_bytes=int(report.total_bytes),
            disk_bytes=int(report.disk_bytes),
            plain_bytes=int(report.plain_bytes),
        )


# ---------------------------------------------------------------- models, callbacks, environments


def _describe_model(model: Any, objects: LiveHeap, context: Mapping[str, Any]) -> FoundModel:
    """Describe a model of Stable-Baselines3."""
    attributes = _get_attributes(model)
    policy: Any = attributes.get("policy")
    parameter_bytes = 0
    with contextlib.suppress(Exception):
        for parameter in policy.parameters():
            parameter_bytes += _count_bytes(parameter)
            objects.claim(parameter)
    buffer = _get_model_buffer(model)
    env = attributes.get("env")
    total_timesteps = context.get("total_timesteps")
    is_stopped_here = context.get("model") is model
    settings = read_settings(attributes)
    settings["policy_class"] = _name_class_itself(attributes.get("policy_class"))
    for name in ("replay_buffer_class", "rollout_buffer_class"):
        if isinstance(attributes.get(name), type):
            settings[name] = _name_class_itself(attributes[name])
    return FoundModel(
        class_name=_name_class(model),
        policy_class=_name_class_itself(attributes.get("policy_class")),
        settings=settings,
        n_envs=int(attributes.get("n_envs") or 1),
        device=str(getattr(attributes.get("device"), "type", attributes.get("device"))),
        observation_space=describe_space(attributes.get("observation_space")),
        action_space=describe_space(attributes.get("action_space")),
        total_timesteps=int(total_timesteps) if is_stopped_here and total_timesteps is not None else None,
        parameter_bytes=parameter_bytes,
        buffer_owner="" if buffer is None else objects.name_of(buffer),
        base_class=_find_library_class(type(model)),
        environment=None if env is None else _describe_environment(env),
    )


def _find_library_class(cls: type) -> str:
    """Return the first class of Stable-Baselines3 or sb3-contrib in the method resolution order."""
    names = (_name_class_itself(base) for base in cls.__mro__)
    return next((name for name in names if name.startswith(("stable_baselines3.", "sb3_contrib."))), "")


def _find_callbacks(objects: LiveHeap, passed: Any) -> Iterator[FoundCallback]:
    """Describe every callback that exists, and whether `learn` was given it."""
    trained = {id(env) for model in objects.models for env in _walk_environments(_get_attributes(model).get("env"))}
    reached: dict[int, Any] = {}
    waiting = list(passed) if isinstance(passed, (list, tuple)) else [passed]
    while waiting:
        callback = waiting.pop()
        if callback is None or id(callback) in reached:
            continue
        reached[id(callback)] = callback
        attributes = _get_attributes(callback)
        waiting += attributes.get("callbacks", None) or []
        waiting += [attributes.get(name) for name in ("callback", "callback_after_eval", "callback_on_new_best")]
    others = [callback for callback in objects.callbacks if id(callback) not in reached]
    for callback in (*reached.values(), *others):
        attributes = _get_attributes(callback)
        shares_env = any(id(env) in trained for env in _walk_environments(attributes.get("eval_env")))
        yield FoundCallback(_name_class(callback), read_settings(attributes), id(callback) in reached, shares_env)


def _walk_environments(env: Any) -> Iterator[Any]:
    """Yield an environment and all environments inside it."""
    waiting = [env]
    while waiting:
        part = waiting.pop()
        if part is not None:
            yield part
            waiting += _get_inner_environments(part)


def _find_environments(objects: LiveHeap) -> Iterator[FoundEnvironment]:
    """Describe the outermost environments: those that no other environment contains."""
    inner: set[int] = set()
    for env in objects.environments:
        for part in _get_inner_environments(env):
            inner.add(id(part))
    for env in objects.environments:
        if id(env) not in inner:
            yield _describe_environment(env)


def _get_inner_environments(env: Any) -> list[Any]:
    attributes = _get_attributes(env)
    parts = [attributes.get(name) for name in ("env", "venv")]
    envs = attributes.get("envs")
    parts += list(envs) if isinstance(envs, (list, tuple)) else []
    return [part for part in parts if part is not None]


def _describe_environment(env: Any) -> FoundEnvironment:
    names: list[str] = []
    settings: Plain = {}
    start_method = ""
    env_id = ""
    n_envs = 1
    observation_space = None
    action_space = None
    part = env
    while part is not None and len(names) < 64:
        attributes = _get_attributes(part)
        names.append(_name_class(part))
        settings = read_settings(attributes) | settings
        stacked = attributes.get("stacked_obs")
        if stacked is not None and "n_stack" not in settings:
            settings["n_stack"] = getattr(stacked, "n_stack", None) or getattr(stacked, "stack_size", None)
        n_envs = max(n_envs, _get_count(attributes, ("num_envs",)) or 1)
        processes = attributes.get("processes")
        if isinstance(processes, list) and processes:
            start_method = getattr(processes[0], "_start_method", None) or "fork"
        spec = attributes.get("spec") or attributes.get("_spec")
        env_id = env_id or str(getattr(spec, "id", "") or "")
        observation_space = observation_space or _get_space(attributes, "observation_space")
        action_space = action_space or _get_space(attributes, "action_space")
        part = next(iter(_get_inner_environments(part)), None)
    return FoundEnvironment(
        tuple(names),
        env_id,
        n_envs,
        describe_space(observation_space),
        describe_space(action_space),
        settings,
        start_method,
        0 if start_method else _count_environment_bytes(env),
    )


def _count_environment_bytes(env: Any) -> int:
    """Return the bytes of the Python objects and arrays that one environment of `env` adds."""
    lanes = [env]
    for part in _walk_environments(env):
        envs = _get_attributes(part).get("envs")
        if isinstance(envs, (list, tuple)) and envs:
            lanes = list(envs)
    # Wrappers hide the environment several attributes deep, so the walk starts above the usual depth.
    seen: set[int] = set()
    sizes = [_count_deep(lane, seen, -_MAX_DEPTH) for lane in lanes[:_MAX_SAMPLED_ITEMS]]
    return sizes[0] if len(sizes) == 1 else sum(sizes[1:]) // (len(sizes) - 1)


def _get_space(attributes: Mapping[str, Any], name: str) -> Any:
    return attributes.get(f"single_{name}") or attributes.get(name) or attributes.get(f"_{name}")


def describe_space(space: Any) -> Plain | None:
    """Describe a space of gymnasium as plain data; None if it is no known space."""
    kind = type(space).__name__.lower()
    if space is None:
        return None
    with contextlib.suppress(Exception):
        if kind == "box":
            low = float(space.low.min()) if space.low.size else 0.0
            high = float(space.high.max()) if space.high.size else 0.0
            return {
                "kind": "box",
                "shape": [int(side) for side in space.shape],
                "dtype": str(space.dtype),
                "low": low if abs(low) < float("inf") else None,
                "high": high if abs(high) < float("inf") else None,
            }
        if kind == "discrete":
            return {"kind": kind, "counts": [int(space.n)], "dtype": str(space.dtype)}
        if kind == "multidiscrete":
            return {"kind": kind, "counts": [int(n) for n in space.nvec.ravel()], "dtype": str(space.dtype)}
        if kind == "multibinary":
            return {"kind": kind, "counts": [int(side) for side in space.shape]}
        if kind == "dict":
            children = {str(name): describe_space(child) for name, child in space.spaces.items()}
            return {"kind": "dict", "spaces": children}
        if kind == "tuple":
            return {"kind": "tuple", "spaces": [describe_space(child) for child in space.spaces]}
    return None


def _describe_optimizer(optimizer: Any) -> FoundOptimizer:
    parameter_bytes = 0
    state_bytes = 0
    with contextlib.suppress(Exception):
        for group in optimizer.param_groups:
            parameter_bytes += sum(_count_bytes(parameter) for parameter in group["params"])
        for state in optimizer.state.values():
            state_bytes += sum(_count_bytes(value) for value in state.values() if hasattr(value, "untyped_storage"))
    return FoundOptimizer(_name_class(optimizer), parameter_bytes, state_bytes)


def _claim_parameters(optimizer: Any, objects: LiveHeap) -> None:
    with contextlib.suppress(Exception):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                objects.claim(parameter)
        for state in optimizer.state.values():
            for value in state.values():
                if hasattr(value, "untyped_storage"):
                    objects.claim(value)


# ---------------------------------------------------------------- plain values


def read_settings(attributes: Mapping[str, Any]) -> Plain:
    """Return the attributes that are plain values. Schedules of Stable-Baselines3 count as their first value."""
    settings: Plain = {}
    for name, value in list(attributes.items()):
        if str(name).startswith("_") and name not in _PRIVATE_SETTINGS:
            continue
        plain = _make_plain(value)
        if plain is not _NOT_PLAIN:
            settings[str(name)] = plain
    return settings


_NOT_PLAIN = object()
_PRIVATE_SETTINGS = ("_max_episode_steps", "_batch_size")
"""Settings of gymnasium's TimeLimit and TorchRL's buffers that have no public attribute."""


def _make_plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if depth > 3:
        return _NOT_PLAIN
    kind = _get_package(type(value))
    if kind == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item() if value.dtype.kind in "iufb" else _NOT_PLAIN
    if isinstance(value, type):
        return _name_class_itself(value)
    if type(value).__name__ in {"FloatSchedule", "ConstantSchedule", "LinearSchedule"} or kind == "enum":
        with contextlib.suppress(Exception):
            return float(value(1.0))
    if type(value).__name__ == "TrainFreq":
        return [int(value.frequency), str(value.unit.value)]
    if isinstance(value, dict) and len(value) <= 64:
        parts = {str(name): _make_plain(part, depth + 1) for name, part in value.items()}
        return {name: part for name, part in parts.items() if part is not _NOT_PLAIN}
    if isinstance(value, (list, tuple)) and len(value) <= 64:
        items = [_make_plain(part, depth + 1) for part in value]
        return _NOT_PLAIN if _NOT_PLAIN in items else items
    return _NOT_PLAIN


def _get_count(attributes: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the first attribute of `names` that is a positive whole number."""
    for name in names:
        value = attributes.get(name, attributes.get(f"_{name}"))
        if hasattr(value, "item") and getattr(value, "shape", None) == ():
            value = value.item()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and value == int(value):
            return int(value)
    return None


def _name_class(value: Any) -> str:
    return _name_class_itself(type(value))


def _name_class_itself(cls: Any) -> str:
    if not isinstance(cls, type):
        return "" if cls is None else str(cls)
    return f"{cls.__module__}.{cls.__qualname__}"


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            versions[name] = version
    return versions


# ---------------------------------------------------------------- failed allocations

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_TORCH_CPU = re.compile(r"tried to allocate (\d+) bytes")
_TORCH_CUDA = re.compile(r"Tried to allocate ([\d.]+) (\w+)")


def _read_allocation(error: BaseException | None) -> FailedAllocation | None:
    """Return the allocation that an error is about; None if the error is about something else."""
    while error is not None:
        found = _read_one_allocation(error)
        if found is not None:
            return found
        error = error.__cause__ or error.__context__
    return None


def _read_one_allocation(error: BaseException) -> FailedAllocation | None:
    if isinstance(error, MemoryError) and hasattr(error, "shape") and hasattr(error, "dtype"):
        shape = tuple(int(side) for side in error.shape)
        dtype = error.dtype
        nbytes = int(dtype.itemsize)
        for side in shape:
            nbytes *= side
        return FailedAllocation(nbytes, shape, str(dtype), "numpy", is_exact=True)
    text = str(error)
    if "allocate" not in text:
        return None
    exact = _TORCH_CPU.search(text)
    if exact:
        return FailedAllocation(int(exact[1]), (), "", "torch", is_exact=True)
    rounded = _TORCH_CUDA.search(text)
    if rounded:
        nbytes = int(float(rounded[1]) * _UNITS.get(rounded[2], 1))
        return FailedAllocation(nbytes, (), "", "torch", is_exact=False)
    return None

"""How TensorDicts lie in a memory: which key is an observation, which a column, and the way back.

In:  TensorDicts of one structure, as TorchRL's collectors and environments give them.
Out: arguments of `ReplayMemory.extend`, and TensorDicts made of the memory's batches.
Invariant: every key, shape, dtype and bit comes back; what an observation shares with the next one is compared there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_map

from holdall.batch import Batch
from holdall.errors import ArgumentError, CheckpointError
from holdall.replay import ReplayMemory
from holdall.space_leaves import stored_space

Key = tuple[str, ...]
Array = NDArray[Any]
Ids = NDArray[np.int64]

_PAIRED_BYTES = 8
"""Pairs of a key and its next up to this size cost less as two columns than as a shared observation."""
_COLUMN_BYTES = 256
"""Longer rows without a next one are stored as observations, which are compressed."""
_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _NAMES}
"""Stored as they are; all others as bytes."""
_OUTCOMES = {("next", "reward"): "reward", ("next", "terminated"): "terminated", ("next", "truncated"): "truncated"}
"""Keys that are rewards and flags of the memory, in the order of `ReplayMemory.outcomes`."""
_PLACES = {"obs": "obs", "next": "next_obs", "alone": "obs", "column": "extras"}
"""Fields of a batch that hold one array a name, by kind; other kinds are called as their fields are."""


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of a TensorDict, and its place in the memory."""

    key: Key
    kind: str  # obs, next, alone, column, action, reward, terminated, truncated, or empty
    name: str  # of its space
    shape: tuple[int, ...]  # of one transition
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one transition."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def space(self) -> spaces.Box:
        """The space of what is stored."""
        if self.dtype in _DTYPES:
            return stored_space(self.shape, _DTYPES[self.dtype])
        return stored_space((*self.shape, self.dtype.itemsize), np.dtype(np.uint8))

    def array(self, tensor: torch.Tensor, leading: tuple[int, int]) -> Array:
        """Return a tensor as an array of steps and lanes."""
        host = tensor.detach().cpu().contiguous()
        if self.dtype not in _DTYPES:
            host = host.unsqueeze(-1).view(torch.uint8)
        array: Array = host.numpy()
        scalar = self.kind in _OUTCOMES.values()
        return array.reshape(leading if scalar else (*leading, *self.space.shape))

    def tensor(self, rows: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
        """Return what a batch holds of the field, with other leading axes."""
        if self.dtype not in _DTYPES:
            rows = rows.view(self.dtype)
        return rows.reshape((*leading, *self.shape))


@dataclass(frozen=True, slots=True)
class NestedPart:
    """A nested TensorDict: its key, and the batch dimensions that it has beyond those of the whole."""

    key: Key
    tail: tuple[int, ...]


@dataclass(frozen=True)
class Fields:
    """All tensors of a TensorDict, in the order in which they came."""

    tensors: tuple[TensorField, ...]
    nested: tuple[NestedPart, ...]

    @classmethod
    def of(cls, data: TensorDictBase) -> Fields:
        """Read the structure of a batch of transitions."""
        leaves, nested = _leaves(data), _nested(data)
        found = {
            key: TensorField(key, "column", _name(key, leaves), tuple(tensor.shape[data.batch_dims :]), tensor.dtype)
            for key, tensor in leaves.items()
        }
        return cls(tuple(_placed(field, found) for field in found.values()), tuple(nested))

    @property
    def nbytes(self) -> int:
        """Bytes of one transition."""
        return sum(field.nbytes for field in self.tensors)

    def memory(self, capacity: int, lanes: int, **settings: Any) -> ReplayMemory:
        """Make a memory for such TensorDicts."""
        by_kind: dict[str, dict[str, spaces.Space[Any]]] = {kind: {} for kind in ("obs", "action", "column")}
        for field in self.tensors:
            kind = "obs" if field.kind == "alone" else field.kind
            if kind in by_kind:
                by_kind[kind][field.name] = field.space
        action = by_kind["action"].get("action", spaces.Dict({}))
        return ReplayMemory(spaces.Dict(by_kind["obs"]), action, capacity, lanes, extras=by_kind["column"], **settings)

    def arguments(self, data: TensorDictBase, leading: tuple[int, int]) -> dict[str, Any]:
        """Return TensorDicts as arguments of `extend`, of so many steps and lanes; refuse another structure."""
        given, flags = self._require(data), ("reward", "terminated", "truncated")
        arguments: dict[str, Any] = {name: {} for name in ("obs", "next_obs", "extras", "action")}
        arguments |= {name: np.zeros(leading, np.bool_) for name in flags}
        for field in self.tensors:
            if field.kind == "empty":
                continue
            array = field.array(given[field.key], leading)
            if field.kind not in _PLACES:
                arguments[field.kind] = array
                continue
            arguments[_PLACES[field.kind]][field.name] = array
            if field.kind == "alone":  # what follows is a good guess of what it shares with it, and is never read
                arguments["next_obs"][field.name] = np.concatenate([array[1:], array[-1:]])
        return arguments

    def read(self, memory: ReplayMemory, number: int, ids: Ids) -> torch.Tensor:
        """Return one tensor of transitions, on the host, of ids of any shape; small ones are read alone."""
        field = self.tensors[number]
        if field.kind == "column":
            rows = memory.extra(field.name, ids)
        elif field.kind in _OUTCOMES.values():
            rows = memory.outcomes(ids)[list(_OUTCOMES.values()).index(field.kind)]
        else:
            return list(self.tensors_of(memory.gather(ids.reshape(-1)), ids.shape))[number]
        return field.tensor(torch.from_numpy(np.asarray(rows)), ids.shape)

    def tensors_of(self, batch: Batch, leading: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Return a batch tensor by tensor."""
        for field in self.tensors:
            if field.kind == "empty":
                yield torch.empty((*leading, *field.shape), dtype=field.dtype)
                continue
            rows = getattr(batch, _PLACES.get(field.kind, field.kind))
            yield field.tensor(rows[field.name] if field.kind in _PLACES else rows, leading)

    def build(self, tensors: Iterator[torch.Tensor], leading: tuple[int, ...], device: torch.device) -> TensorDictBase:
        """Put tensors, in the order of the fields, into a TensorDict."""
        parts: dict[Key, dict[str, Any]] = {(): {}}
        for nested in self.nested:
            parts[nested.key] = {}
        for field, tensor in zip(self.tensors, tensors, strict=True):
            parts[field.key[:-1]][field.key[-1]] = tensor
        for nested in reversed(self.nested):  # the innermost first
            part = TensorDict(parts[nested.key], batch_size=[*leading, *nested.tail], device=device)
            parts[nested.key[:-1]][nested.key[-1]] = part
        return TensorDict(parts[()], batch_size=leading, device=device)

    def words(self) -> dict[str, Any]:
        """Return the same as plain words, for JSON."""
        tensors = [asdict(field) | {"dtype": str(field.dtype).removeprefix("torch.")} for field in self.tensors]
        return {"tensors": tensors, "nested": [asdict(part) for part in self.nested]}

    @classmethod
    def of_words(cls, words: Any) -> Fields:
        """Read what `words` returned, from a file that may hold anything."""
        try:
            tensors = [
                TensorField(
                    tuple(map(str, word["key"])), str(word["kind"]), str(word["name"]),
                    tuple(map(int, word["shape"])), _dtype(word["dtype"]),
                )
                for word in words["tensors"]
            ]  # fmt: skip
            nested = [
                NestedPart(tuple(map(str, word["key"])), tuple(map(int, word["tail"]))) for word in words["nested"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint does not say which TensorDicts it holds ({error!r}); load one of a HoldallStorage"
            ) from error
        return cls(tuple(tensors), tuple(nested))

    def missing(self, data: TensorDictBase) -> list[Key]:
        """Return the keys that are not in a TensorDict."""
        given = {(key,) if isinstance(key, str) else tuple(key) for key in data.keys(include_nested=True)}
        return [field.key for field in self.tensors if field.key not in given]

    def _require(self, data: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Return the tensors of a TensorDict by key, if they are those of the first one."""
        given = _leaves(data)
        known = {field.key: field for field in self.tensors}
        if given.keys() != known.keys():
            if ("index",) not in known:
                given.pop(("index",), None)  # TorchRL's buffers add it to the data that they were given
            missing, unknown = sorted(known.keys() - given.keys()), sorted(given.keys() - known.keys())
            if missing or unknown:
                raise ArgumentError(
                    f"data misses the keys {missing} and has the unknown keys {unknown}, compared with the first data; "
                    "a storage holds TensorDicts of one structure: add what is missing, and data.exclude(...) the rest"
                )
        for key, tensor in given.items():
            shape, field = tuple(tensor.shape[data.batch_dims :]), known[key]
            if shape != field.shape or tensor.dtype != field.dtype:
                raise ArgumentError(
                    f"data[{key}] has shape {shape} for each element and dtype {tensor.dtype}, the first had "
                    f"{field.shape} and {field.dtype}; nothing is cast, so bring it to these"
                )
        return given


def _leaves(data: TensorDictBase) -> dict[Key, torch.Tensor]:
    """Return all tensors by key; refuse what is none, or has no one shape."""
    leaves: dict[Key, torch.Tensor] = {}
    try:
        items = list(data.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf))
    except RuntimeError as error:
        raise ArgumentError(
            f"data holds elements of different shapes ({str(error).splitlines()[0]}); pad them to one shape"
        ) from error
    for key, value in items:
        name = (key,) if isinstance(key, str) else tuple(key)
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"data[{name}] is a {type(value).__name__}, no tensor; store numbers, or data.exclude({name}) before"
            )
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            raise ArgumentError(
                f"data[{name}] is nested, sparse or quantised; holdall stores dense tensors, so pad or convert it"
            )
        leaves[name] = value
    return leaves


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, NonTensorData | NonTensorStack) or not is_tensor_collection(kind)


def _nested(data: TensorDictBase) -> list[NestedPart]:
    """Return the nested TensorDicts, each after the one that it is in."""
    found = []
    for key, value in data.items(include_nested=True):
        if is_tensor_collection(value) and not _is_leaf(type(value)):
            name = (key,) if isinstance(key, str) else tuple(key)
            found.append(NestedPart(name, tuple(value.batch_size[data.batch_dims :])))
    return sorted(found, key=lambda part: len(part.key))


def _placed(field: TensorField, found: Mapping[Key, TensorField]) -> TensorField:
    """Say where in the memory a tensor goes."""
    key, kind, name = field.key, "column", field.name
    twin = found.get(key[1:] if key[0] == "next" else ("next", *key))
    is_paired = twin is not None and (twin.shape, twin.dtype) == (field.shape, field.dtype)
    if field.nbytes == 0:
        kind = "empty"
    elif is_paired and twin is not None and field.nbytes > _PAIRED_BYTES:
        kind, name = ("next", twin.name) if key[0] == "next" else ("obs", name)
    elif field.nbytes > _COLUMN_BYTES:
        kind = "alone"
    elif key == ("action",):
        kind = name = "action"
    elif key in _OUTCOMES and prod(field.shape) == 1 and field.dtype in _DTYPES:
        outcome = _OUTCOMES[key]
        if outcome == "reward" or field.dtype is torch.bool:
            kind = name = outcome
    return TensorField(key, kind, name, field.shape, field.dtype)


def _name(key: Key, keys: Mapping[Key, object]) -> str:
    """Name a key for people, and as no other."""
    name = ".".join(key)
    is_unique = sum(".".join(other) == name for other in keys) == 1
    return name if is_unique else json.dumps(key)


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {name!r}")
    return dtype


# ---------------------------------------------------------------- tensors that are read when they are used


class StoredKeys(Protocol):
    """All elements of a storage, key by key; cells are numbered through all of its dimensions."""

    def read_key(self, number: int, cells: Ids) -> torch.Tensor:
        """Return what a key, by its number, has stored in some cells, of any shape."""

    def write_key(self, number: int, cells: Ids, tensor: torch.Tensor) -> None:
        """Write one key of some cells."""


class StoredTensor(torch.Tensor):
    """One key of a slice of a storage: it is read when it is used, and written when it is changed in place.

    `storage[:]["next", "done"]` reads this one key of all elements. A slice of it is another one; any other index reads
    what it names; everything else reads all of it, and goes on with a tensor.
    """

    owner: StoredKeys
    number: int
    cells: Ids

    @staticmethod
    def of(
        owner: StoredKeys, number: int, cells: Ids, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> StoredTensor:  # fmt: skip
        """Stand for what a key, by its number, holds in some cells; each is of a shape."""
        whole = (*cells.shape, *shape)
        stored = torch.Tensor._make_wrapper_subclass(StoredTensor, whole, dtype=dtype, device=device)
        stored.owner, stored.number, stored.cells = owner, number, cells
        return stored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what is known of it; read it for everything else."""
        named, name = kwargs or {}, getattr(func, "__name__", "")
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if args and isinstance(args[0], StoredTensor):
            stored, rest = args[0], args[1:]
            if name == "__getitem__":
                return stored.indexed(*rest)
            if name == "__setitem__":
                return stored.assign(*rest)
            if name == "transpose" and len(rest) == 2 and max(rest) < stored.cells.ndim and min(rest) >= 0:
                return stored._of_cells(stored.cells.swapaxes(*rest))
            if name.endswith("_") and not name.endswith("__"):
                changed = stored.whole()
                func(changed, *_read_all(rest), **_read_all(named))
                stored.owner.write_key(stored.number, stored.cells, changed)
                return stored
        return func(*_read_all(args), **_read_all(named))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # this is how torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read it for what torch does by itself."""
        return func(*_read_all(args), **_read_all(kwargs or {}))

    def indexed(self, index: Any) -> torch.Tensor:
        """Return another one for slices of elements, and a tensor for all else."""
        if not self._names_cells(index):
            return self.whole()[index]
        found = self._of_cells(np.asarray(self.cells[numpy_index(index)]))
        parts = index if isinstance(index, tuple) else (index,)
        return found if all(isinstance(part, slice) for part in parts) else found.whole()

    def assign(self, index: Any, value: Any) -> None:
        """Write to what an index names."""
        cells = self.cells
        if self._names_cells(index):
            cells, index = np.asarray(cells[numpy_index(index)]), ...
        written = self.owner.read_key(self.number, cells)
        written[index] = _read_all(value)
        self.owner.write_key(self.number, cells, written)

    def whole(self) -> torch.Tensor:
        """Read all of it."""
        return self.owner.read_key(self.number, self.cells)

    def _of_cells(self, cells: Ids) -> StoredTensor:
        shape = tuple(self.shape[self.cells.ndim :])
        return StoredTensor.of(self.owner, self.number, cells, shape, self.dtype, self.device)

    def _names_cells(self, index: Any) -> bool:
        """Whether an index is one of elements alone."""
        parts = index if isinstance(index, tuple) else (index,)
        is_plain = not any(part is None or part is Ellipsis for part in parts)
        return is_plain and len(parts) <= self.cells.ndim

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch has no types here
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_T: Any = torch.Tensor
_KNOWN = {
    *(getattr(_T, name).__get__ for name in (
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_nested", "is_quantized", "is_sparse",
        "is_cuda", "is_meta", "is_leaf", "grad_fn", "itemsize", "nbytes",
    )),
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.element_size, _T.__len__, _T.is_shared,
    _T.is_floating_point, _T.is_complex, _T.__repr__, _T.__hash__, _T.requires_grad_,
}  # fmt: skip


def _read_all(value: Any) -> Any:
    """Return the same with every stored tensor in it read."""
    return tree_map(lambda part: part.whole() if isinstance(part, StoredTensor) else part, value)


def numpy_index(index: Any) -> Any:
    """Return an index of a tensor as one of an array."""
    if isinstance(index, tuple):
        return tuple(numpy_index(part) for part in index)
    if isinstance(index, torch.Tensor):
        return index.detach().cpu().numpy()
    return np.asarray(index) if isinstance(index, range | list) else index

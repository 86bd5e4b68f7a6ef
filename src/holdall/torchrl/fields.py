"""How TensorDicts are stored in a memory: which keys are observations, and which are actions, outcomes or extras.

`Fields` turns TensorDicts of one structure, as TorchRL's collectors return them, into arguments of
`ReplayMemory.extend`, and batches of the memory into TensorDicts.

Guarantee: every key, shape, dtype and bit is returned as it was given.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_map

from holdall.batch import Batch
from holdall.errors import ArgumentError
from holdall.memory import ReplayMemory
from holdall.space_leaves import stored_space

Key = tuple[str, ...]
Array = NDArray[Any]
Ids = NDArray[np.int64]

_MAX_PAIR_BYTES = 8
"""Up to this size, `key` and `("next", key)` are stored as two extras, which take less memory than an observation."""
_MAX_EXTRA_BYTES = 256
"""Up to this size, a key without a next one is stored as an extra. Larger keys are observations, to be compressed."""
_NAMES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES: dict[torch.dtype, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _NAMES}
"""NumPy's dtypes of tensors. Tensors of other dtypes are stored as bytes."""
_OUTCOMES: dict[Key, str] = {
    ("next", "reward"): "reward",
    ("next", "terminated"): "terminated",
    ("next", "truncated"): "truncated",
}
"""Keys that are stored as the rewards and flags of the memory."""
_DICT_BY_KIND = {"obs": "obs", "next": "next_obs", "alone": "obs", "column": "extras"}
"""Kinds with one array per name, and the argument of `extend` and field of a batch that has these arrays as a dict."""


@dataclass(frozen=True, slots=True)
class TensorField:
    """One tensor of a TensorDict, and how it is stored in the memory.

    Its kind is the field of the memory: "obs" for an observation, "next" for a next observation, "alone" for an
    observation without a next one, "column" for an extra, or "action", "reward", "terminated" or "truncated". A tensor
    of kind "empty" has no elements and is not stored.
    """

    key: Key
    kind: str
    name: str  # Name of the tensor in the memory's spaces.
    shape: tuple[int, ...]  # Shape of one transition.
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one transition."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def space(self) -> spaces.Box:
        """The space of the stored array."""
        if self.dtype in _DTYPES:
            return stored_space(self.shape, _DTYPES[self.dtype])
        return stored_space((*self.shape, self.dtype.itemsize), np.dtype(np.uint8))

    @property
    def can_become_extra(self) -> bool:
        """Whether the first write of this key alone turns it into an extra. Such keys are outputs of networks."""
        return self.kind == "alone" and self.dtype.is_floating_point

    def to_array(self, tensor: torch.Tensor, leading: tuple[int, ...]) -> Array:
        """Return a tensor as an array with the leading axes (steps, lanes), or with (rows,)."""
        host = tensor.detach().cpu().contiguous()
        if self.dtype not in _DTYPES:
            host = host.unsqueeze(-1).view(torch.uint8)
        array: Array = host.numpy()
        is_scalar = self.kind in _OUTCOMES.values()
        return array.reshape(leading if is_scalar else (*leading, *self.space.shape))

    def to_tensor(self, rows: torch.Tensor, leading: tuple[int, ...]) -> torch.Tensor:
        """Return the rows of a batch as a tensor of this field with the leading axes `leading`."""
        if self.dtype not in _DTYPES:
            rows = rows.view(self.dtype)
        return rows.reshape((*leading, *self.shape))


@dataclass(frozen=True, slots=True)
class NestedPart:
    """A nested TensorDict: its key, and its batch dimensions after those of the outermost TensorDict."""

    key: Key
    tail: tuple[int, ...]


@dataclass(frozen=True)
class Fields:
    """All tensors of a TensorDict, in the order of the TensorDict."""

    tensors: tuple[TensorField, ...]
    nested: tuple[NestedPart, ...]

    @classmethod
    def of(cls, data: TensorDictBase) -> Fields:
        """Read the structure of a batch of transitions."""
        leaves = _find_leaves(data)
        fields = {
            key: TensorField(
                key, "column", _name_key(key, leaves), tuple(tensor.shape[data.batch_dims :]), tensor.dtype
            )
            for key, tensor in leaves.items()
        }
        return cls(tuple(_choose_kind(field, fields) for field in fields.values()), tuple(_find_nested(data)))

    @property
    def nbytes(self) -> int:
        """Bytes of one transition."""
        return sum(field.nbytes for field in self.tensors)

    def new_memory(self, capacity: int, lanes: int, **settings: Any) -> ReplayMemory:
        """Return an empty memory for such TensorDicts."""
        by_kind: dict[str, dict[str, spaces.Space[Any]]] = {kind: {} for kind in ("obs", "action", "column")}
        for field in self.tensors:
            kind = "obs" if field.kind == "alone" else field.kind
            if kind in by_kind:
                by_kind[kind][field.name] = field.space
        action = by_kind["action"].get("action", spaces.Dict({}))
        return ReplayMemory(spaces.Dict(by_kind["obs"]), action, capacity, lanes, extras=by_kind["column"], **settings)

    def make_arguments(self, data: TensorDictBase, leading: tuple[int, int]) -> dict[str, Any]:
        """Return a TensorDict as arguments of `extend`, with the leading axes (steps, lanes).

        Raise ArgumentError if the TensorDict has another structure.
        """
        given = self._require_structure(data)
        arguments: dict[str, Any] = {name: {} for name in ("obs", "next_obs", "extras", "action")}
        arguments |= {name: np.zeros(leading, np.bool_) for name in _OUTCOMES.values()}
        for field in self.tensors:
            if field.kind == "empty":
                continue
            array = field.to_array(given[field.key], leading)
            if field.kind not in _DICT_BY_KIND:
                arguments[field.kind] = array
                continue
            arguments[_DICT_BY_KIND[field.kind]][field.name] = array
            if field.kind == "alone":
                # The memory requires a next observation, which is never read. The following row takes little memory.
                arguments["next_obs"][field.name] = np.concatenate([array[1:], array[-1:]])
        return arguments

    def read(self, memory: ReplayMemory, number: int, ids: Ids) -> torch.Tensor:
        """Return one tensor of transitions, on the host. `ids` may have any shape."""
        field = self.tensors[number]
        if field.kind == "empty":
            return torch.empty((*ids.shape, *field.shape), dtype=field.dtype)
        flat = np.ascontiguousarray(ids.reshape(-1))
        (rows,) = memory.store.view().read(flat, (_find_output(memory, field),))
        return field.to_tensor(torch.from_numpy(rows), ids.shape)

    def split(self, batch: Batch, leading: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Yield the tensors of a batch, in the order of the fields."""
        for field in self.tensors:
            if field.kind == "empty":
                yield torch.empty((*leading, *field.shape), dtype=field.dtype)
                continue
            rows = getattr(batch, _DICT_BY_KIND.get(field.kind, field.kind))
            yield field.to_tensor(rows[field.name] if field.kind in _DICT_BY_KIND else rows, leading)

    def build(self, tensors: Iterator[torch.Tensor], leading: tuple[int, ...], device: torch.device) -> TensorDictBase:
        """Return a TensorDict of `tensors`, which are in the order of the fields."""
        parts: dict[Key, dict[str, Any]] = {(): {}}
        for nested in self.nested:
            parts[nested.key] = {}
        for field, tensor in zip(self.tensors, tensors, strict=True):
            parts[field.key[:-1]][field.key[-1]] = tensor
        for nested in reversed(self.nested):  # Innermost first.
            part = TensorDict(parts[nested.key], batch_size=[*leading, *nested.tail], device=device)
            parts[nested.key[:-1]][nested.key[-1]] = part
        return TensorDict(parts[()], batch_size=leading, device=device)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        tensors = [asdict(field) | {"dtype": str(field.dtype).removeprefix("torch.")} for field in self.tensors]
        return {"tensors": tensors, "nested": [asdict(part) for part in self.nested]}

    @classmethod
    def from_json(cls, words: Any) -> Fields:
        """Return the fields that `to_json` described. `refuse_malformed` explains the errors of malformed ones."""
        tensors = [
            TensorField(
                key=tuple(map(str, word["key"])),
                kind=str(word["kind"]),
                name=str(word["name"]),
                shape=tuple(map(int, word["shape"])),
                dtype=_parse_dtype(word["dtype"]),
            )
            for word in words["tensors"]
        ]
        nested = [NestedPart(tuple(map(str, word["key"])), tuple(map(int, word["tail"]))) for word in words["nested"]]
        return cls(tuple(tensors), tuple(nested))

    def find_missing(self, data: TensorDictBase) -> list[Key]:
        """Return the keys that a TensorDict lacks."""
        given = {(key,) if isinstance(key, str) else tuple(key) for key in data.keys(include_nested=True)}
        return [field.key for field in self.tensors if field.key not in given]

    def with_extras(self, keys: Collection[Key]) -> Fields:
        """Return these fields with some keys stored as extras, which can be rewritten."""
        tensors = (replace(field, kind="column") if field.key in keys else field for field in self.tensors)
        return replace(self, tensors=tuple(tensors))

    def has_keys_of(self, other: Fields) -> bool:
        """Return whether both have the same keys, shapes and dtypes. They may be stored in different ways."""
        own, others = ([replace(field, kind="", name="") for field in fields.tensors] for fields in (self, other))
        return own == others and self.nested == other.nested

    def match_tensors(self, data: TensorDictBase) -> dict[TensorField, torch.Tensor]:
        """Return the tensors of a TensorDict that may lack keys, by field. Raise ArgumentError if one does not fit."""
        given = _find_leaves(data)
        known = {field.key: field for field in self.tensors}
        unknown = sorted(given.keys() - known.keys())
        if unknown:
            raise ArgumentError(
                f"data has the unknown keys {unknown}, compared with the first data. Write only keys that the first "
                f"data had, {sorted(known)}, or data.exclude(...) the rest."
            )
        for key, tensor in given.items():
            _require_form(known[key], tensor, data.batch_dims)
        return {known[key]: tensor for key, tensor in given.items()}

    def _require_structure(self, data: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Return the tensors of a TensorDict by key. Raise ArgumentError if the first data had another structure."""
        given = _find_leaves(data)
        known = {field.key: field for field in self.tensors}
        if given.keys() != known.keys():
            if ("index",) not in known:
                given.pop(("index",), None)  # TorchRL's buffers add this key to the data.
            missing = sorted(known.keys() - given.keys())
            unknown = sorted(given.keys() - known.keys())
            if missing or unknown:
                raise ArgumentError(
                    f"data misses the keys {missing} and has the unknown keys {unknown}, compared with the first data. "
                    "A storage has TensorDicts of one structure. Add the missing keys, and data.exclude(...) the rest."
                )
        for key, tensor in given.items():
            _require_form(known[key], tensor, data.batch_dims)
        return given


def _require_form(field: TensorField, tensor: torch.Tensor, batch_dims: int) -> None:
    """Raise ArgumentError unless a tensor has the shape and dtype of a field, after `batch_dims` dimensions."""
    shape = tuple(tensor.shape[batch_dims:])
    if shape != field.shape or tensor.dtype != field.dtype:
        raise ArgumentError(
            f"data[{field.key}] has shape {shape} for each element and dtype {tensor.dtype}, but the first data had "
            f"{field.shape} and {field.dtype}. Nothing is cast: pass tensors of that shape and dtype."
        )


def _find_output(memory: ReplayMemory, field: TensorField) -> int:
    """Return the number of the memory's output with the rows of a field."""
    columns = memory.store.columns
    if field.kind == "column":
        return int(columns.extra_outputs[(memory.schema.extras.keys or ()).index(field.name)])
    if field.kind in {"obs", "alone", "next"}:
        outputs = columns.next_obs_outputs if field.kind == "next" else columns.obs_outputs
        return int(outputs[(memory.schema.observation.keys or ()).index(field.name)])
    if field.kind == "action":
        return int(columns.action_outputs[0])
    return int(getattr(columns, f"{field.kind}_output"))


def _find_leaves(data: TensorDictBase) -> dict[Key, torch.Tensor]:
    """Return all tensors by key. Raise ArgumentError if a value is not a dense tensor."""
    leaves: dict[Key, torch.Tensor] = {}
    try:
        items = list(data.items(include_nested=True, leaves_only=True, is_leaf=_is_leaf))
    except RuntimeError as error:
        raise ArgumentError(
            f"data has elements of different shapes ({str(error).splitlines()[0]}). Pad them to one shape."
        ) from error
    for key, value in items:
        name = (key,) if isinstance(key, str) else tuple(key)
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"data[{name}] is a {type(value).__name__}, not a tensor. Store numbers, or data.exclude({name}) first."
            )
        if value.is_nested or value.layout is not torch.strided or value.is_quantized:
            raise ArgumentError(
                f"data[{name}] is nested, sparse or quantised. holdall stores dense tensors: pad or convert it."
            )
        leaves[name] = value
    return leaves


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, NonTensorData | NonTensorStack) or not is_tensor_collection(kind)


def _find_nested(data: TensorDictBase) -> list[NestedPart]:
    """Return the nested TensorDicts, outer ones first."""
    parts = []
    for key, value in data.items(include_nested=True):
        if is_tensor_collection(value) and not _is_leaf(type(value)):
            name = (key,) if isinstance(key, str) else tuple(key)
            parts.append(NestedPart(name, tuple(value.batch_size[data.batch_dims :])))
    return sorted(parts, key=lambda part: len(part.key))


def _choose_kind(field: TensorField, fields: Mapping[Key, TensorField]) -> TensorField:
    """Return a field with the kind and the name with which it is stored in the memory."""
    key = field.key
    twin = fields.get(key[1:] if key[0] == "next" else ("next", *key))
    is_paired = twin is not None and (twin.shape, twin.dtype) == (field.shape, field.dtype)
    if field.nbytes == 0:
        return replace(field, kind="empty")
    if twin is not None and is_paired and field.nbytes > _MAX_PAIR_BYTES:
        return replace(field, kind="next", name=twin.name) if key[0] == "next" else replace(field, kind="obs")
    if field.nbytes > _MAX_EXTRA_BYTES:
        return replace(field, kind="alone")
    if key == ("action",):
        return replace(field, kind="action", name="action")
    if key in _OUTCOMES and prod(field.shape) == 1 and field.dtype in _DTYPES:
        outcome = _OUTCOMES[key]
        if outcome == "reward" or field.dtype is torch.bool:
            return replace(field, kind=outcome, name=outcome)
    return field


def _name_key(key: Key, keys: Mapping[Key, object]) -> str:
    """Return a readable name for a key. No other key gets the same name."""
    name = ".".join(key)
    is_unique = sum(".".join(other) == name for other in keys) == 1
    return name if is_unique else json.dumps(key)


def _parse_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype {name!r}")
    return dtype


# ---------------------------------------------------------------- tensors that are read when they are used


class StoredKeys(Protocol):
    """All elements of a storage, key by key. A cell is the flat index of a transition over all dimensions."""

    def read_key(self, number: int, cells: Ids) -> torch.Tensor:
        """Return key number `number` of `cells`, which may have any shape."""

    def write_key(self, number: int, cells: Ids, tensor: torch.Tensor) -> None:
        """Write key number `number` of `cells`."""


class StoredTensor(torch.Tensor):
    """One key of a slice of a storage. The data is read when it is used, and written when it is changed in place.

    `storage[:]["next", "done"]` reads this one key of all elements. A slice of a StoredTensor is another StoredTensor.
    Any other index reads the elements that it selects, and all other operations read the whole tensor.
    """

    owner: StoredKeys
    number: int
    cells: Ids

    @staticmethod
    def of(
        owner: StoredKeys, number: int, cells: Ids, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> StoredTensor:
        """Return a stored tensor of key number `number` in `cells`. Each cell has `shape`."""
        whole = (*cells.shape, *shape)
        stored = torch.Tensor._make_wrapper_subclass(StoredTensor, whole, dtype=dtype, device=device)
        stored.owner = owner
        stored.number = number
        stored.cells = cells
        return stored

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return properties such as shape and dtype without reading. Read the tensor for all other operations."""
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _OPERATIONS_WITHOUT_DATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **named)
        if args and isinstance(args[0], StoredTensor):
            stored = args[0]
            rest = args[1:]
            if name == "__getitem__":
                return stored.select_cells(*rest)
            if name == "__setitem__":
                return stored.assign(*rest)
            if name == "transpose" and len(rest) == 2 and max(rest) < stored.cells.ndim and min(rest) >= 0:
                return stored._with_cells(stored.cells.swapaxes(*rest))
            if name.endswith("_") and not name.endswith("__"):
                changed = stored.read()
                func(changed, *_read_all(rest), **_read_all(named))
                stored.owner.write_key(stored.number, stored.cells, changed)
                return stored
        if args and isinstance(args[0], list | tuple) and name.endswith("_") and not name.endswith("__"):
            return _change_all(func, args[0], args[1:], named)
        return func(*_read_all(args), **_read_all(named))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # this is how torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read the tensor for operations that torch calls internally."""
        return func(*_read_all(args), **_read_all(kwargs or {}))

    def select_cells(self, index: Any) -> torch.Tensor:
        """Return a StoredTensor for slices of elements, and a plain tensor for any other index."""
        if not self._selects_cells(index):
            return self.read()[index]
        selected = self._with_cells(np.asarray(self.cells[numpy_index(index)]))
        parts = index if isinstance(index, tuple) else (index,)
        return selected if all(isinstance(part, slice) for part in parts) else selected.read()

    def assign(self, index: Any, value: Any) -> None:
        """Write to the elements that an index selects."""
        cells = self.cells
        if self._selects_cells(index):
            cells = np.asarray(cells[numpy_index(index)])
            index = ...
        written = self.owner.read_key(self.number, cells)
        written[index] = _read_all(value)
        self.owner.write_key(self.number, cells, written)

    def read(self) -> torch.Tensor:
        """Return the whole tensor."""
        return self.owner.read_key(self.number, self.cells)

    def _with_cells(self, cells: Ids) -> StoredTensor:
        shape = tuple(self.shape[self.cells.ndim :])
        return StoredTensor.of(self.owner, self.number, cells, shape, self.dtype, self.device)

    def _selects_cells(self, index: Any) -> bool:
        """Return whether an index selects whole elements."""
        parts = index if isinstance(index, tuple) else (index,)
        is_plain = not any(part is None or part is Ellipsis for part in parts)
        return is_plain and len(parts) <= self.cells.ndim

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch has no types here
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_TENSOR: Any = torch.Tensor
_ATTRIBUTES_WITHOUT_DATA = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "requires_grad",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_cuda",
    "is_meta",
    "is_leaf",
    "grad_fn",
    "itemsize",
    "nbytes",
)
_METHODS_WITHOUT_DATA = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "__len__",
    "is_shared",
    "is_floating_point",
    "is_complex",
    "__repr__",
    "__hash__",
    "requires_grad_",
)
_OPERATIONS_WITHOUT_DATA = {
    *(getattr(_TENSOR, name).__get__ for name in _ATTRIBUTES_WITHOUT_DATA),
    *(getattr(_TENSOR, name) for name in _METHODS_WITHOUT_DATA),
}
"""Operations that do not read the data."""


def _read_all(value: Any) -> Any:
    """Return a nested value with every StoredTensor replaced by a plain tensor."""
    return tree_map(lambda part: part.read() if isinstance(part, StoredTensor) else part, value)


def _change_all(func: Any, tensors: Any, rest: Any, named: Any) -> Any:
    """Call a function that changes several tensors in place, such as `torch._foreach_copy_`, and write the changes."""
    changed = [_read_all(tensor) for tensor in tensors]
    result = func(changed, *_read_all(rest), **_read_all(named))
    for stored, values in zip(tensors, changed, strict=True):
        if isinstance(stored, StoredTensor):
            stored.owner.write_key(stored.number, stored.cells, values)
    return result


def numpy_index(index: Any) -> Any:
    """Return an index of a tensor as the equal index of a NumPy array."""
    if isinstance(index, tuple):
        return tuple(numpy_index(part) for part in index)
    if isinstance(index, torch.Tensor):
        return index.detach().cpu().numpy()
    return np.asarray(index) if isinstance(index, range | list) else index

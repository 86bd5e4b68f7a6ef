"""TorchRL's replay buffers over a memory: `HoldallStorage` replaces LazyTensorStorage.

TorchRL writes to any position of a storage, but a memory can only append. positions.py maps positions to transitions:
writing to a position appends transitions and records their ids. Before the memory evicts a transition that a position
still refers to, the transition is appended again. Writing only some keys of a position rewrites these keys in place if
they are extras of the memory. fields.py decides how the keys of a TensorDict are stored in the memory.

A position is an index of the first dimension of a storage. With several batch dimensions, a position has several
transitions. A cell is the flat index of one transition over all these dimensions.

Guarantee: reading a position returns, bit for bit, what was last written there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from math import prod
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np

from holdall.errors import ArgumentError, CheckpointError, MissingPackageError

try:
    import torch
    from tensordict import TensorDict, TensorDictBase, is_tensor_collection, is_tensorclass
    from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase
    from torchrl.data.replay_buffers.storages import TensorStorage
except ImportError as error:
    raise MissingPackageError("holdall.torchrl needs torchrl; run \"pip install 'holdall[torchrl]'\"") from error

from holdall.checks import refuse_malformed, require_count, to_whole
from holdall.memory import ReplayMemory
from holdall.store.tuning import Tuning
from holdall.torchrl.fields import Fields, Ids, Key, StoredTensor, TensorField, numpy_index
from holdall.torchrl.positions import PositionMap

__all__ = ["HoldallStorage", "StoredTensor"]

_SPARE_DIVISOR = 16
"""The memory has room for this fraction of the positions in addition, so that rows are rarely appended again."""
_MIN_SPARE_ELEMENTS = 16
_MAX_COPIED_BYTES = 1 << 25
"""Maximum number of bytes that are copied from the memory at once, to be appended again."""
_FORMAT = 1
_ONLY_KEY = "tensor"
"""Key of data that is a single tensor instead of a TensorDict."""
_LAYOUT_FILE = "torchrl/layout.json"
_POSITIONS_FILE = "torchrl/positions"


class HoldallCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]  # TorchRL has no types
    """Saves a storage as a checkpoint of its memory. Only new data is written, compressed."""

    def dumps(self, storage: HoldallStorage, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, and wait until it is complete."""
        storage.save_to(path)

    def loads(self, storage: HoldallStorage, path: str | os.PathLike[str]) -> None:
        """Load the newest checkpoint."""
        storage.load_from(path)


class HoldallStorage(TensorStorage):  # type: ignore[misc]  # TorchRL has no types
    """A storage for TorchRL's replay buffers, in a fraction of the memory of LazyTensorStorage.

    TensorDicts of one structure are returned with the same keys, shapes, dtypes and bits. Data of `key` and
    `("next", key)` that is equal is stored once, and frame stacks are stored frame by frame. Slices, such as
    `storage[:]`, are read key by key when they are used.

    A write of some keys, such as `storage[index] = TensorDict({"stoch": ..., "deter": ...}, [n])`, rewrites them in
    place. The first such write of a large key copies all elements once, because the key was compressed until then.

    Args:
        max_size: Number of elements, over all `ndim` dimensions. 1e6 is a million.
        device: Device of sampled TensorDicts. "auto": the device of the first data.
        ndim: Number of leading dimensions that count as elements: with 2, data is (time, environments).
        budget: RAM that may be used: "auto", None (everything is compressed), or a limit in bytes with a `spill_dir`;
            see `holdall.ReplayMemory`.
        prefer: How much slower sampling compressed data may be; see `holdall.ReplayMemory`.
        spill_dir: Directory for the oldest compressed elements that exceed the budget.

    Examples:
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> from holdall.torchrl import HoldallStorage
        >>> buffer = TensorDictReplayBuffer(storage=HoldallStorage(10_000), batch_size=32)
    """

    _default_checkpointer = HoldallCheckpointer
    supports_conditional_update = True
    max_size: int
    device: Any
    _len: int

    def __init__(
        self,
        max_size: float,
        *,
        device: torch.device | str = "cpu",
        ndim: int = 1,
        budget: str | int | None = "auto",
        prefer: str = "balanced",
        spill_dir: str | os.PathLike[str] | None = None,
        _tuning: Tuning | None = None,
    ) -> None:
        max_size = require_count("max_size", to_whole(max_size), 1)
        require_count("ndim", ndim, 1)
        if budget not in {"auto", None} and spill_dir is None:
            raise ArgumentError(
                f"budget ({budget!r}) is a limit. Without a disk tier the oldest elements would be dropped before "
                "max_size is reached, which TorchRL's samplers cannot know. Pass a spill_dir, or use 'auto' or None."
            )
        self._fields: Fields | None = None
        self._memory: ReplayMemory | None = None
        self._map = PositionMap((0,))
        self._settings: dict[str, Any] = {
            "budget": budget,
            "prefer": prefer,
            "spill_dir": spill_dir,
            "_tuning": _tuning,
        }
        self._collection: Any = None  # The tensorclass of the data, or torch.Tensor. None for a TensorDict.
        self._folder: Path | None = None  # Files of the last `state_dict` or `load_state_dict`.
        super().__init__(None, max_size, device=device, ndim=ndim)

    # ---------------------------------------------------------------- members that TorchRL's base class uses

    @property
    def _storage(self) -> Any:
        """All elements, as a TensorDict whose keys are read when they are used."""
        return None if self._fields is None else self._make_lazy(self._map.cells)

    @_storage.setter
    def _storage(self, value: Any) -> None:
        if value is not None:
            raise ArgumentError("A HoldallStorage cannot be replaced by a TensorDict. Use set or extend.")

    @property
    def checkpointer(self) -> Any:
        """The object that `dumps` and `loads` call."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        if value is not None and not isinstance(value, HoldallCheckpointer):
            raise ArgumentError(
                f"checkpointer is a {type(value).__name__}, which writes every element uncompressed. Leave it out: a "
                "HoldallStorage has its own, which writes compressed data."
            )
        self._checkpointer = value or HoldallCheckpointer()

    @property
    def memory(self) -> ReplayMemory:
        """The memory that stores the elements, for `report()` and the like. It is made with the first data."""
        if self._memory is None:
            raise ArgumentError("The storage is empty, so it has no memory yet. Add data first.")
        return self._memory

    def _init(self, data: TensorDictBase) -> None:
        """Make the memory for elements like `data`."""
        self._begin(data.unsqueeze(0))

    def _begin(self, data: TensorDictBase) -> None:
        """Make the memory for elements like those of `data`, whose first dimension counts elements."""
        if data.batch_dims < self.ndim:
            raise ArgumentError(
                f"data has batch_size {list(data.batch_size)}, but the storage counts elements over ndim={self.ndim} "
                f"dimensions. Pass data with as many batch dimensions, or make the storage with ndim={data.batch_dims}."
            )
        fields = Fields.of(data)
        element_shape = tuple(data.batch_size[1:])
        if self.device == "auto":
            self.device = data.device or torch.device("cpu")
        counted = prod(element_shape[: self.ndim - 1])
        size = -(self.max_size // -counted)
        spare = max(size // _SPARE_DIVISOR, _MIN_SPARE_ELEMENTS)
        rows = prod(element_shape)
        lanes = rows if self.ndim > 1 else 1
        self._memory = fields.new_memory((size + spare) * rows, lanes, device=str(self.device), **self._settings)
        self._fields = fields
        self._map = PositionMap((size, *element_shape))
        self.max_size = size * counted
        if is_tensorclass(data):
            self._collection = type(data)
        self.initialized = True

    # ---------------------------------------------------------------- writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write elements at an integer, a sequence of integers, a slice, or a tuple of these for several dimensions."""
        data = self._wrap_in_tensordict(data, self.ndim - _is_integer(cursor))
        if _is_integer(cursor):
            data = data.unsqueeze(0)
            cursor = [int(cursor)]
        if not self.initialized:
            self._begin(data)
        if not set_cursor and self._rewrite_some(cursor, data):
            self._bump_mutation_revision()
            return
        positions, data = self._normalize(*self._find_elements(cursor, data))
        self._write(positions, data)
        if set_cursor:
            self._set_last_cursor(cursor)
            self._len = min(self._len + len(positions) * prod(self._map.shape[1 : self.ndim]), self.max_size)
        self._bump_mutation_revision()

    def _wrap_in_tensordict(self, data: Any, batch_dims: int) -> TensorDictBase:
        """Return data as a TensorDict. A tensor becomes its only key, and a list is stacked."""
        if isinstance(data, list) and data and all(map(is_tensor_collection, data)):
            data = torch.stack(data)
        if self._collection is None and not self.initialized:
            self._collection = torch.Tensor if isinstance(data, torch.Tensor) else None
        if isinstance(data, torch.Tensor):
            data = TensorDict({_ONLY_KEY: data}, batch_size=data.shape[:batch_dims])
        if not is_tensor_collection(data):
            raise ArgumentError(
                f"data is a {type(data).__name__}. HoldallStorage stores tensors and TensorDicts: pass "
                "TensorDict({...}, batch_size=[...])."
            )
        return data

    def _find_elements(self, cursor: Any, data: TensorDictBase) -> tuple[Ids, TensorDictBase]:
        """Return the positions of whole elements that an index selects, and their data."""
        index = numpy_index(cursor)
        if isinstance(index, np.ndarray) and index.ndim == 1 and index.dtype.kind in "iu":
            return index.astype(np.int64), data
        if isinstance(index, slice):
            return np.arange(self._map.shape[0])[index], data
        cells = np.asarray(self._map.cells[index])
        return self._complete_elements(cells.reshape(-1), data.expand(cells.shape).reshape(-1))

    def _complete_elements(self, cells: Ids, data: TensorDictBase) -> tuple[Ids, TensorDictBase]:
        """Return the positions of the elements that contain `cells`, and these elements with `data` in the cells."""
        rows = self._map.rows
        if rows == 1:
            return cells, data.reshape(len(cells), *self._map.shape[1:])
        positions, which = np.unique(cells // rows, return_inverse=True)
        whole = self._gather(self._map.find_ids(positions))
        flat = whole.reshape(-1)
        flat[torch.from_numpy(which.reshape(-1) * rows + cells % rows)] = data
        return positions, flat.reshape(whole.shape)

    def _rewrite_some(self, cursor: Any, data: TensorDictBase) -> bool:
        """Rewrite some keys in place. Return False, and write nothing, if that is not possible."""
        fields = self._known_fields
        index = numpy_index(cursor)
        if not fields.find_missing(data) or not self._map.is_written(index):
            return False  # A write to an element that was not written yet needs all keys.
        tensors = fields.match_tensors(data.expand(self._map.find_ids(index).shape))
        if not self._make_rewritable(tensors):
            return False
        self._rewrite(self._map.find_ids(index).reshape(-1), tensors)  # `_make_rewritable` may have changed the ids.
        return True

    def _make_rewritable(self, fields: Collection[TensorField]) -> bool:
        """Return whether keys can be rewritten in place, which only extras can. Turn keys into extras if possible."""
        if not all(field.kind in {"column", "empty"} or field.can_become_extra for field in fields):
            return False
        keys = [field.key for field in fields if field.can_become_extra]
        if keys:
            self._make_extras(keys)
        return True

    def _rewrite(self, ids: Ids, tensors: Mapping[TensorField, torch.Tensor]) -> None:
        """Rewrite keys of transitions. The keys are extras."""
        leading = (len(ids),)
        arrays = {field.name: field.to_array(tensor, leading) for field, tensor in tensors.items() if field.nbytes > 0}
        if arrays:
            self.memory.update(ids, **arrays)

    def write_key(self, number: int, cells: Ids, tensor: torch.Tensor) -> None:
        """Write one key of some cells. For `StoredTensor`."""
        fields = self._known_fields
        flat = cells.reshape(-1)
        values = tensor.reshape(len(flat), *tensor.shape[cells.ndim :])
        field = fields.tensors[number]
        if self._make_rewritable([field]):
            self._rewrite(self._map.find_ids_of_cells(flat), {field: values})
            self._bump_mutation_revision()
            return
        at_once = max(_MAX_COPIED_BYTES // max(fields.nbytes, 1), 1)
        for first in range(0, len(flat), at_once):
            some = flat[first : first + at_once]
            data = self._gather(self._map.find_ids_of_cells(some))
            data.set(field.key, values[first : first + at_once])
            self._write(*self._normalize(*self._complete_elements(some, data)))
        self._bump_mutation_revision()

    def read_key(self, number: int, cells: Ids) -> torch.Tensor:
        """Read one key of some cells. For `StoredTensor`."""
        ids = self._map.find_ids_of_cells(cells)
        return self._known_fields.read(self.memory, number, ids).to(self.device)

    def _normalize(self, positions: Ids, data: TensorDictBase) -> tuple[Ids, TensorDictBase]:
        """Return every position once, as a number of at least 0, and its last data. Raise if data does not fit."""
        size, *element_shape = self._map.shape
        wanted = (len(positions), *element_shape)
        if len(positions) and not -size <= positions.min() <= positions.max() < size:
            raise IndexError(f"cursor has {positions.min()} to {positions.max()}, but there are {size} positions")
        positions = np.where(positions < 0, positions + size, positions)
        if tuple(data.batch_size[: len(wanted)]) != wanted:
            try:
                data = data.expand(wanted)
            except RuntimeError as error:
                raise ArgumentError(
                    f"data has batch_size {list(data.batch_size)}, expected {list(wanted)}: {len(positions)} positions "
                    "of elements like the first. Pass data of that batch_size."
                ) from error
        if len(positions) > 1 and not (np.diff(positions) == 1).all():
            _, last = np.unique(positions[::-1], return_index=True)
            if len(last) < len(positions):
                kept = np.sort(len(positions) - 1 - last)
                positions = positions[kept]
                data = data[torch.from_numpy(kept)]
        return positions, data

    def _write(self, positions: Ids, data: TensorDictBase) -> None:
        """Append elements to the memory, and record their ids.

        If that fails, each position keeps its element or has the new one.
        """
        memory = self.memory
        missing = self._known_fields.find_missing(data)
        if missing and self._map.is_written(positions):  # Missing keys keep their values.
            data = self._gather(self._map.find_ids(positions)).select(*missing).update(data)
        rows = self._map.rows
        at_once = self._spare_elements
        if len(positions) > at_once:
            # The oldest elements are replaced first. Otherwise most of them would be appended again before.
            order = self._map.order_by_age(positions)
            if not np.array_equal(order, np.arange(len(order))):
                positions = positions[order]
                data = data[torch.from_numpy(order)]
        given = self._make_arguments(data)
        for first in range(0, len(positions), at_once):
            some = positions[first : first + at_once]
            self._make_room(len(some))
            steps = slice(first * rows // memory.num_envs, (first + len(some)) * rows // memory.num_envs)
            self._append(some, _select_steps(given, steps))

    @property
    def _spare_elements(self) -> int:
        """Number of elements for which the memory has room in addition to those of all positions."""
        return self.memory.capacity // self._map.rows - self._map.shape[0]

    def _make_arguments(self, data: TensorDictBase) -> dict[str, Any]:
        """Return whole elements as arguments of `ReplayMemory.extend`."""
        lanes = self.memory.num_envs
        return self._known_fields.make_arguments(data, (len(data) * self._map.rows // lanes, lanes))

    def _make_room(self, elements: int) -> None:
        """Make room for `elements` more positions. Transitions in use that these would evict are appended again."""
        memory = self.memory
        rows = self._map.rows
        max_elements = max(_MAX_COPIED_BYTES // max(self._known_fields.nbytes * rows, 1), 1)
        while self._map.has_id_before(memory.next_id + elements * rows - memory.capacity):
            oldest = self._map.list_by_age(min(max_elements, self._spare_elements) * rows)
            self._append(oldest, self._make_arguments(self._gather(self._map.find_ids(oldest))))

    def _append(self, positions: Ids, given: dict[str, Any]) -> None:
        """Append steps to the memory, and record their ids at `positions`."""
        first_id = self.memory.next_id
        try:
            self.memory.extend(**given)
        finally:
            # An interrupt may end `extend` after some of the steps.
            appended = (self.memory.next_id - first_id) // self._map.rows
            self._map.record(positions[:appended], first_id)

    def _make_extras(self, keys: list[Key]) -> None:
        """Replace the memory by one that stores `keys` as extras. Copy all elements to it."""
        fields = self._known_fields
        before = self.memory
        changed = fields.with_extras(keys)
        memory = changed.new_memory(before.capacity, before.num_envs, device=str(self.device), **self._settings)
        positions = PositionMap(self._map.shape)
        rows = positions.rows
        at_once = max(_MAX_COPIED_BYTES // max(fields.nbytes * rows, 1), 1)
        written = self._map.list_by_age()
        try:
            for first in range(0, len(written), at_once):
                some = written[first : first + at_once]
                leading = (len(some) * rows // before.num_envs, before.num_envs)
                given = changed.make_arguments(self._gather(self._map.find_ids(some)), leading)
                first_id = memory.next_id
                memory.extend(**given)
                positions.record(some, first_id)
        except BaseException:
            memory.close()
            raise
        self._memory = memory
        self._fields = changed
        self._map = positions
        before.close()

    # ---------------------------------------------------------------- reading

    def get(self, index: Any) -> Any:
        """Return the elements at an integer, a sequence, a mask or a tuple. Read slices and keys when they are used."""
        if self._fields is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        held = None if self._is_full else self._len_along_dim0
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, str) for part in parts):
            return self._make_lazy(self._map.cells[:held])[index]
        if any(isinstance(part, slice) for part in parts):
            return self._make_lazy(self._map.cells[:held][numpy_index(index)])
        return self._to_class(self._gather(self._map.find_ids(numpy_index(index), held)))

    def _gather(self, ids: Ids) -> TensorDictBase:
        """Return the elements that consist of the transitions `ids`."""
        fields = self._known_fields
        batch = self.memory.gather(ids.reshape(-1))
        return fields.build(fields.split(batch, ids.shape), ids.shape, self.device)

    def _make_lazy(self, cells: Ids) -> Any:
        """Return a TensorDict of `cells` whose tensors are read when they are used."""
        stored = (
            StoredTensor.of(self, number, cells, field.shape, field.dtype, self.device)
            for number, field in enumerate(self._known_fields.tensors)
        )
        return self._to_class(self._known_fields.build(stored, cells.shape, self.device))

    @property
    def _known_fields(self) -> Fields:
        if self._fields is None:
            raise ArgumentError("The storage is empty. Add data first.")
        return self._fields

    def _to_class(self, data: TensorDictBase) -> Any:
        """Return data in the class of the data that was written: a tensor, a tensorclass or a TensorDict."""
        if self._collection is torch.Tensor:
            return data.get(_ONLY_KEY)
        return data if self._collection is None else self._collection.from_tensordict(data)

    def _empty(self) -> None:
        """Forget all elements, and free their memory."""
        super()._empty()
        if self._fields is not None:
            before = self.memory
            self._memory = self._fields.new_memory(
                before.capacity, before.num_envs, device=str(self.device), **self._settings
            )
            self._map = PositionMap(self._map.shape)
            before.close()

    # ---------------------------------------------------------------- checkpoints

    def save_to(self, path: str | os.PathLike[str]) -> None:
        """Save all elements to a directory, or to a prefix of an object store. Write only new data."""
        if self._fields is None:
            raise RuntimeError("Cannot save a non-initialized storage.")
        cursor = self._last_cursor_index
        layout = {
            "format": _FORMAT,
            "fields": self._fields.to_json(),
            "shape": self._map.shape,
            "ndim": self.ndim,
            "len": self._len,
            "last_cursor": None if cursor is None else int(cursor),
            "is_tensor": self._collection is torch.Tensor,
        }
        attach = {_LAYOUT_FILE: json.dumps(layout).encode(), _POSITIONS_FILE: self._map.pack()}
        self.memory.save(path, attach=attach, keep=1).result()

    def load_from(self, path: str | os.PathLike[str]) -> None:
        """Restore a saved storage. Compressed elements stay in the files, and are read when they are sampled."""
        device = torch.device("cpu") if self.device == "auto" else self.device
        memory = ReplayMemory.load(path, device=str(device), **self._settings)
        try:
            with refuse_malformed(f"The storage that was saved in {path}"):
                fields, positions, layout = self._read_layout(memory, path)
                length = int(layout["len"])
                is_tensor = bool(layout["is_tensor"])
                last_cursor = layout["last_cursor"]
        except BaseException:
            memory.close()
            raise
        before = self._memory
        self._memory = memory
        self._fields = fields
        self._map = positions
        self.device = device
        self._len = length
        self.initialized = True
        if is_tensor:
            self._collection = torch.Tensor
        self.max_size = prod(positions.shape[: self.ndim])
        self._set_last_cursor(last_cursor)
        self._bump_mutation_revision()
        if before is not None:
            before.close()

    def _read_layout(self, memory: ReplayMemory, path: Any) -> tuple[Fields, PositionMap, dict[str, Any]]:
        """Return what was saved with a memory: fields, map and layout. Raise if they do not fit this storage."""
        if _LAYOUT_FILE not in memory.attached:
            raise CheckpointError(
                f"{path} is a checkpoint of a memory, but not of a HoldallStorage. Load it with ReplayMemory.load."
            )
        layout = json.loads(memory.attached[_LAYOUT_FILE])
        if layout.get("format") != _FORMAT:
            raise CheckpointError(
                f"{path} has format {layout.get('format')}, but this version reads {_FORMAT}. Update holdall."
            )
        fields = Fields.from_json(layout["fields"])
        shape = tuple(map(int, layout["shape"]))
        size = -(self.max_size // -prod(shape[1 : self.ndim]))
        if (
            layout["ndim"] != self.ndim
            or shape[0] != size
            or (self._fields is not None and not self._fields.has_keys_of(fields))
        ):
            raise ArgumentError(
                f"{path} has {shape[0]} positions of ndim={layout['ndim']}, but this storage has {size} of "
                f"ndim={self.ndim}, or other keys. Make an empty one with max_size={prod(shape[: layout['ndim']])} and "
                f"ndim={layout['ndim']}."
            )
        positions = PositionMap.unpack(memory.attached[_POSITIONS_FILE], shape)
        if not positions.has_only_ids_within(memory.first_id, memory.next_id):
            raise CheckpointError(f"{path} refers to elements that it does not contain. Load another checkpoint.")
        return fields, positions, layout

    def state_dict(self) -> dict[str, Any]:
        """Return the files of a checkpoint as tensors of bytes, for `torch.save`. `dumps` writes the files to disk."""
        files = {}
        if self.initialized:
            if self._folder is None:
                self._folder = self._new_folder()
            folder = self._folder
            self.save_to(folder)
            paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
            files = {
                str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
                for path in paths
            }
        return {"holdall": _FORMAT, "_storage": files, "initialized": self.initialized, "_len": self._len}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Its files are stored in a temporary directory."""
        if not state_dict["initialized"]:
            self._empty()
            return
        content = state_dict["_storage"]
        if "holdall" not in state_dict:  # The state of one of TorchRL's own storages.
            if not isinstance(content, torch.Tensor):
                content = TensorDict().load_state_dict(content, strict=False)
            self._empty()
            count = -(int(state_dict["_len"]) // -prod(content.shape[1 : self.ndim]))
            self.set(range(count), content[:count], set_cursor=False)
            self._len = int(state_dict["_len"])
            return
        root = self._new_folder()
        for name, file in content.items():
            path = (root / name).resolve()
            if root not in path.parents:
                raise CheckpointError(f"state_dict has a file {name!r} outside of its directory. Do not load it.")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.cpu().numpy().tobytes())
        self.load_from(root)
        self._folder = root

    def _new_folder(self) -> Path:
        """Make a directory that is removed with the storage."""
        folder = Path(tempfile.mkdtemp(prefix="holdall_torchrl_")).resolve()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            raise RuntimeError(
                "A HoldallStorage cannot be shared between processes. Keep the buffer in one process, to which "
                "collectors send their data, or use holdall.ray."
            )
        state: dict[str, Any] = super().__getstate__()
        return state | {"_folder": None}

    def close(self) -> None:
        """Close the memory. Sampled data stays valid."""
        if self._memory is not None:
            self._memory.close()


def _is_integer(cursor: Any) -> bool:
    if isinstance(cursor, torch.Tensor | np.ndarray):
        return cursor.ndim == 0 and not str(cursor.dtype).endswith("bool")
    return isinstance(cursor, int | np.integer)


def _select_steps(value: Any, steps: slice) -> Any:
    """Return a range of steps of all arrays in a nested dict."""
    if isinstance(value, dict):
        return {key: _select_steps(part, steps) for key, part in value.items()}
    return value[steps]

"""TorchRL's replay buffers over a memory: `HoldallStorage` takes the place of LazyTensorStorage.

fields.py says which key of a TensorDict lies where in the memory; here TorchRL's positions are mapped to transitions of
a memory that only ever adds them.
In:  TensorDicts at positions, as TorchRL's writers set them.  Out: TensorDicts at any index, as its samplers ask for.
Invariant: a position gives, bit for bit, what was last written there. Writing adds transitions to the memory and notes
their ids; what is still wanted when it is about to leave the memory is added again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
import zlib
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

from holdall.replay import ReplayMemory
from holdall.schema import require_count, whole
from holdall.torchrl.fields import Fields, Ids, StoredTensor, numpy_index

__all__ = ["HoldallStorage", "StoredTensor"]

_SPARE_SHARE = 16
"""A memory holds this share of the positions more, so that rows written in any order rarely have to be added again."""
_FEWEST_SPARE = 16
_CARRIED_BYTES = 1 << 25
"""Rows that are added again at once."""
_FORMAT = 1
_ONLY_KEY = "tensor"
"""Of data that is no TensorDict, but one tensor."""
_LAYOUT, _POSITIONS = "torchrl/layout.json", "torchrl/positions"


class HoldallCheckpointer(StorageCheckpointerBase):  # type: ignore[misc]  # TorchRL has no types
    """Saves a storage as a checkpoint of its memory: what is new since the last one, compressed as it lies there."""

    def dumps(self, storage: HoldallStorage, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, and wait until it is safe."""
        storage.save_to(path)

    def loads(self, storage: HoldallStorage, path: str | os.PathLike[str]) -> None:
        """Load the newest checkpoint."""
        storage.load_from(path)


class HoldallStorage(TensorStorage):  # type: ignore[misc]  # TorchRL has no types
    """A storage for TorchRL's replay buffers, in a fraction of the memory of LazyTensorStorage.

    TensorDicts of one structure come back with the same keys, shapes, dtypes and bits. Keys that are there twice, as
    `key` and `("next", key)`, share what they have in common; frame stacks are stored frame by frame. Slices, such as
    `storage[:]`, are read key by key when they are used.

    Args:
        max_size: Elements that are held; with `ndim` dimensions, over all of them. 1e6 is a million.
        device: Where sampled TensorDicts are; "auto": where the first data is.
        ndim: Leading dimensions that count as elements: with 2, data is (time, environments).
        budget: RAM that may be used: "auto", None (everything is compressed), or a limit in bytes with a `spill_dir`;
            see `holdall.ReplayMemory`.
        prefer: How much longer sampling may take when data is compressed; the same.
        spill_dir: Where the oldest compressed elements go that the budget does not hold.
    """

    _default_checkpointer = HoldallCheckpointer
    supports_conditional_update = False
    max_size: int
    device: Any
    _len: int

    def __init__(
        self, max_size: float, *, device: torch.device | str = "cpu", ndim: int = 1,
        budget: str | int | None = "auto", prefer: str = "balanced", spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        max_size = require_count("max_size", whole(max_size), 1)
        require_count("ndim", ndim, 1)
        if budget not in {"auto", None} and spill_dir is None:
            raise ArgumentError(
                f"budget ({budget!r}) is a limit, and without a disk tier the oldest elements would be dropped before "
                "max_size is reached, which TorchRL's samplers cannot know; name a spill_dir, or use 'auto' or None"
            )
        self._fields: Fields | None = None
        self._memory: ReplayMemory | None = None
        self._ids: Ids = np.zeros(0, np.int64)  # per position: the id of its transition, and 1; 0: nothing yet
        self._settings: dict[str, Any] = {"budget": budget, "prefer": prefer, "spill_dir": spill_dir}
        self._collection: Any = None  # the tensorclass of the data, if it is one
        self._oldest = 0  # no position has a lower id
        self._folder: Path | None = None  # files of a state that was returned or loaded
        super().__init__(None, max_size, device=device, ndim=ndim)

    # ---------------------------------------------------------------- what TorchRL's base class asks for

    @property
    def _storage(self) -> Any:
        """All elements, as a TensorDict that is read when it is used."""
        return None if self._fields is None else self._lazy(self._cells)

    @_storage.setter
    def _storage(self, value: Any) -> None:
        if value is not None:
            raise ArgumentError("a HoldallStorage is filled by set or extend, not with a TensorDict as a whole")

    @property
    def checkpointer(self) -> Any:
        """What `dumps` and `loads` call."""
        return self._checkpointer

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        if value is not None and not isinstance(value, HoldallCheckpointer):
            raise ArgumentError(
                f"checkpointer is a {type(value).__name__}, which writes every element raw; leave it out: a "
                "HoldallStorage is saved compressed, as it lies in memory"
            )
        self._checkpointer = value or HoldallCheckpointer()

    @property
    def memory(self) -> ReplayMemory:
        """The memory that holds the elements, for `report()` and the like; there is one after the first data."""
        if self._memory is None:
            raise ArgumentError("the storage holds nothing yet, so it has no memory; add data first")
        return self._memory

    @property
    def _rows(self) -> int:
        """Transitions that one element consists of."""
        return prod(self._ids.shape[1:])

    def _init(self, data: TensorDictBase) -> None:
        """Make the memory for elements like this one."""
        self._begin(data.unsqueeze(0))

    def _begin(self, data: TensorDictBase) -> None:
        """Make the memory for data like this, whose first dimension counts elements."""
        if data.batch_dims < self.ndim:
            raise ArgumentError(
                f"data has batch_size {list(data.batch_size)}, but the storage counts elements over ndim={self.ndim} "
                f"dimensions; give the data as many batch dimensions, or make the storage with ndim={data.batch_dims}"
            )
        fields, rest = Fields.of(data), tuple(data.batch_size[1:])
        if self.device == "auto":
            self.device = data.device or torch.device("cpu")
        counted = prod(rest[: self.ndim - 1])
        size = -(self.max_size // -counted)
        spare = max(size // _SPARE_SHARE, _FEWEST_SPARE)
        lanes = prod(rest) if self.ndim > 1 else 1
        memory = fields.memory((size + spare) * prod(rest), lanes, device=str(self.device), **self._settings)
        self._fields, self._memory, self._oldest = fields, memory, 0
        self._ids, self.max_size = np.zeros((size, *rest), np.int64), size * counted
        self._collection = type(data) if is_tensorclass(data) else self._collection
        self.initialized = True

    # ---------------------------------------------------------------- writing

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write elements at positions: an integer, a sequence of them, a slice, or with `ndim` dimensions a tuple."""
        data = self._in_tensordict(data, self.ndim - _is_integer(cursor))
        if _is_integer(cursor):
            data, cursor = data.unsqueeze(0), [int(cursor)]
        if not self.initialized:
            self._begin(data)
        positions, data = self._checked(*self._elements(cursor, data))
        self._write(positions, data)
        if set_cursor:
            self._set_last_cursor(cursor)
            self._len = min(self._len + len(positions) * prod(self._ids.shape[1 : self.ndim]), self.max_size)
        self._bump_mutation_revision()

    def _in_tensordict(self, data: Any, batch_dims: int) -> TensorDictBase:
        """Return data as a TensorDict: one tensor becomes its only key, a list is stacked."""
        if isinstance(data, list) and data and all(map(is_tensor_collection, data)):
            data = torch.stack(data)
        if self._collection is None and not self.initialized:
            self._collection = torch.Tensor if isinstance(data, torch.Tensor) else None
        if isinstance(data, torch.Tensor):
            data = TensorDict({_ONLY_KEY: data}, batch_size=data.shape[:batch_dims])
        if not is_tensor_collection(data):
            raise ArgumentError(
                f"data is a {type(data).__name__}; HoldallStorage holds tensors and TensorDicts, so pass "
                "TensorDict({...}, batch_size=[...])"
            )
        return data

    def _elements(self, cursor: Any, data: TensorDictBase) -> tuple[Ids, TensorDictBase]:
        """Return the positions of whole elements that an index names, and their data."""
        index = numpy_index(cursor)
        if isinstance(index, np.ndarray) and index.ndim == 1 and index.dtype.kind in "iu":
            return index.astype(np.int64), data
        if isinstance(index, slice):
            return np.arange(len(self._ids))[index], data
        cells = np.asarray(self._cells[index])
        return self._whole_elements(cells.reshape(-1), data.expand(cells.shape).reshape(-1))

    def _whole_elements(self, cells: Ids, data: TensorDictBase) -> tuple[Ids, TensorDictBase]:
        """Return the elements that some cells belong to, and their data: new in these cells, as it is in all others."""
        if self._rows == 1:
            return cells, data.reshape(len(cells), *self._ids.shape[1:])
        positions, which = np.unique(cells // self._rows, return_inverse=True)
        whole = self._gathered(self._ids[positions])
        flat = whole.reshape(-1)
        flat[torch.from_numpy(which.reshape(-1) * self._rows + cells % self._rows)] = data
        return positions, flat.reshape(whole.shape)

    @property
    def _cells(self) -> Ids:
        return np.arange(self._ids.size).reshape(self._ids.shape)

    def write_key(self, number: int, cells: Ids, tensor: torch.Tensor) -> None:
        """Write one key of some cells; for `StoredTensor`."""
        fields, flat = self._known_fields, cells.reshape(-1)
        values = tensor.reshape(len(flat), *tensor.shape[cells.ndim :])
        at_once = max(_CARRIED_BYTES // max(fields.nbytes, 1), 1)
        for first in range(0, len(flat), at_once):
            some = flat[first : first + at_once]
            data = self._gathered(self._ids.reshape(-1)[some])
            data.set(fields.tensors[number].key, values[first : first + at_once])
            self._write(*self._checked(*self._whole_elements(some, data)))
        self._bump_mutation_revision()

    def read_key(self, number: int, cells: Ids) -> torch.Tensor:
        """Read one key of some cells; for `StoredTensor`."""
        ids = self._written(self._ids.reshape(-1)[cells])
        return self._known_fields.read(self.memory, number, ids).to(self.device)

    def _checked(self, positions: Ids, data: TensorDictBase) -> tuple[Ids, TensorDictBase]:
        """Return positions from 0 on, each once and with the data that came last for it."""
        size, wanted = len(self._ids), (len(positions), *self._ids.shape[1:])
        if len(positions) and not -size <= positions.min() <= positions.max() < size:
            raise IndexError(f"cursor holds {positions.min()} to {positions.max()}, but there are {size} positions")
        positions = np.where(positions < 0, positions + size, positions)
        if tuple(data.batch_size[: len(wanted)]) != wanted:
            try:
                data = data.expand(wanted)
            except RuntimeError as error:
                raise ArgumentError(
                    f"data has batch_size {list(data.batch_size)}, expected {list(wanted)}: {len(positions)} positions "
                    f"of elements like the first; pass data of that batch_size"
                ) from error
        if len(positions) > 1 and not (np.diff(positions) == 1).all():
            _, last = np.unique(positions[::-1], return_index=True)
            if len(last) < len(positions):
                kept = np.sort(len(positions) - 1 - last)
                positions, data = positions[kept], data[torch.from_numpy(kept)]
        return positions, data

    def _write(self, positions: Ids, data: TensorDictBase) -> None:
        """Add elements to the memory, and note their ids."""
        memory, rows, lanes = self.memory, self._rows, self.memory.num_envs
        missing = self._known_fields.missing(data)
        if missing and self._ids[positions].all():  # keys that are not given stay as they are
            data = self._gathered(self._ids[positions]).select(*missing).update(data)
        given = self._known_fields.arguments(data, (len(positions) * rows // lanes, lanes))
        self._ids[positions] = 0
        at_once = memory.capacity // rows - len(self._ids)
        for first in range(0, len(positions), at_once):
            some = positions[first : first + at_once]
            self._make_room(len(some))
            self._append(some, _cut(given, slice(first * rows // lanes, (first + len(some)) * rows // lanes)))

    def _make_room(self, elements: int) -> None:
        """Add again what so many more elements would push out of the memory although a position names it."""
        memory, rows = self.memory, self._rows
        heads = self._ids.reshape(len(self._ids), -1)[:, 0]
        while memory.next_id + elements * rows - memory.capacity > self._oldest:
            live = heads.nonzero()[0]
            self._oldest = int(heads[live].min()) - 1 if len(live) else memory.next_id
            if memory.next_id + elements * rows - memory.capacity <= self._oldest:
                return
            window = max(_CARRIED_BYTES // max(self._known_fields.nbytes * rows, 1), 1) * rows
            carried = live[heads[live] - 1 < self._oldest + window]
            carried = carried[np.argsort(heads[carried])]
            whole, lanes = self._gathered(self._ids[carried]), memory.num_envs
            given = self._known_fields.arguments(whole, (len(carried) * rows // lanes, lanes))
            self._append(carried, given)

    def _append(self, positions: Ids, given: dict[str, Any]) -> None:
        first = self.memory.next_id + 1
        self.memory.extend(**given)
        self._ids[positions] = np.arange(first, self.memory.next_id + 1).reshape(-1, *self._ids.shape[1:])

    # ---------------------------------------------------------------- reading

    def get(self, index: Any) -> Any:
        """Return elements: an integer, a sequence, a mask, a tuple of these; a slice, or a key, is read when used."""
        if self._fields is None:
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        held = slice(None) if self._is_full else slice(self._len_along_dim0)
        parts = index if isinstance(index, tuple) else (index,)
        if any(isinstance(part, str) for part in parts):
            return self._lazy(self._cells[held])[index]
        if any(isinstance(part, slice) for part in parts):
            return self._lazy(self._cells[held][numpy_index(index)])
        return self._in_class(self._gathered(np.asarray(self._ids[held][numpy_index(index)])))

    def _gathered(self, ids: Ids) -> TensorDictBase:
        fields = self._known_fields
        batch = self.memory.gather(self._written(ids).reshape(-1))
        return fields.build(fields.tensors_of(batch, ids.shape), ids.shape, self.device)

    def _lazy(self, cells: Ids) -> Any:
        """Return a TensorDict of tensors that are read when they are used."""
        stored = (
            StoredTensor.of(self, number, cells, field.shape, field.dtype, self.device)
            for number, field in enumerate(self._known_fields.tensors)
        )
        return self._in_class(self._known_fields.build(stored, cells.shape, self.device))

    @staticmethod
    def _written(ids: Ids) -> Ids:
        """Return the ids of transitions, if something was written to all of these positions."""
        if not np.all(ids):
            raise IndexError(f"index names {int((ids == 0).sum())} positions that were not written yet; ask for others")
        return np.asarray(ids - 1)

    @property
    def _known_fields(self) -> Fields:
        if self._fields is None:
            raise ArgumentError("the storage holds nothing yet; add data first")
        return self._fields

    def _in_class(self, data: TensorDictBase) -> Any:
        if self._collection is torch.Tensor:
            return data.get(_ONLY_KEY)
        return data if self._collection is None else self._collection.from_tensordict(data)

    def _empty(self) -> None:
        """Forget all elements, and free their memory."""
        super()._empty()
        if self._fields is not None:
            before, lanes = self.memory, self.memory.num_envs
            self._memory = self._fields.memory(before.capacity, lanes, device=str(self.device), **self._settings)
            self._ids, self._oldest = np.zeros(self._ids.shape, np.int64), 0
            before.close()

    # ---------------------------------------------------------------- checkpoints

    def save_to(self, path: str | os.PathLike[str]) -> None:
        """Save all elements to a directory, or to a prefix of an object store; only what is new is written."""
        if self._fields is None:
            raise RuntimeError("Cannot save a non-initialized storage.")
        cursor = self._last_cursor_index
        layout = {
            "format": _FORMAT, "fields": self._fields.words(), "shape": self._ids.shape, "ndim": self.ndim,
            "len": self._len, "last_cursor": None if cursor is None else int(cursor),
            "is_tensor": self._collection is torch.Tensor,
        }  # fmt: skip
        steps = np.diff(self._ids.reshape(-1), prepend=0)
        positions = zlib.compress(steps.astype("<i8").tobytes(), level=1)
        attach = {_LAYOUT: json.dumps(layout).encode(), _POSITIONS: positions}
        self.memory.save(path, attach=attach, keep=1).result()

    def load_from(self, path: str | os.PathLike[str]) -> None:
        """Become what was saved; compressed elements stay in the files, and are read when they are asked for."""
        device = torch.device("cpu") if self.device == "auto" else self.device
        memory = ReplayMemory.load(path, device=str(device), **self._settings)
        try:
            fields, ids, layout = self._loaded(memory, path)
        except BaseException:
            memory.close()
            raise
        before, self._memory = self._memory, memory
        self._fields, self._ids, self._oldest, self.device = fields, ids, 0, device
        self._len, self.initialized = int(layout["len"]), True
        if layout["is_tensor"]:
            self._collection = torch.Tensor
        self.max_size = prod(ids.shape[: self.ndim])
        self._set_last_cursor(layout["last_cursor"])
        self._bump_mutation_revision()
        if before is not None:
            before.close()

    def _loaded(self, memory: ReplayMemory, path: Any) -> tuple[Fields, Ids, dict[str, Any]]:
        """Return what was saved with a memory, if it fits this storage."""
        if _LAYOUT not in memory.attached:
            raise CheckpointError(f"{path} holds a memory, but not of a HoldallStorage; load it with ReplayMemory.load")
        layout = json.loads(memory.attached[_LAYOUT])
        if layout.get("format") != _FORMAT:
            raise CheckpointError(f"{path} is of format {layout.get('format')}, this is {_FORMAT}; update holdall")
        fields, shape = Fields.of_words(layout["fields"]), tuple(map(int, layout["shape"]))
        size = -(self.max_size // -prod(shape[1 : self.ndim]))
        if layout["ndim"] != self.ndim or shape[0] != size or (self._fields is not None and self._fields != fields):
            raise ArgumentError(
                f"{path} holds {shape[0]} positions of ndim={layout['ndim']}, this storage has {size} of "
                f"ndim={self.ndim}, or other keys; make it with max_size={prod(shape[: layout['ndim']])}, "
                f"ndim={layout['ndim']} and nothing in it"
            )
        steps = zlib.decompressobj().decompress(memory.attached[_POSITIONS], 8 * prod(shape) + 1)
        ids = np.cumsum(np.frombuffer(steps, "<i8")).astype(np.int64)
        lost = (ids != 0) & ((ids <= memory.first_id) | (ids > memory.next_id))
        if ids.size != prod(shape) or lost.any():
            raise CheckpointError(f"{path} names elements that it does not hold; load another checkpoint")
        return fields, ids.reshape(shape), layout

    def state_dict(self) -> dict[str, Any]:
        """Return the files of a checkpoint as tensors of bytes, for `torch.save`; `dumps` writes them directly."""
        files = {}
        if self.initialized:
            folder = self._folder = self._folder or self._new_folder()
            self.save_to(folder)
            found = sorted(path for path in folder.rglob("*") if path.is_file())
            files = {
                str(path.relative_to(folder)): torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
                for path in found if path.stat().st_size
            }  # fmt: skip
        return {"holdall": _FORMAT, "_storage": files, "initialized": self.initialized, "_len": self._len}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Become what `state_dict` returned; its files are kept in a temporary directory."""
        if not state_dict["initialized"]:
            self._empty()
            return
        content = state_dict["_storage"]
        if "holdall" not in state_dict:  # of one of TorchRL's own storages
            if not isinstance(content, torch.Tensor):
                content = TensorDict().load_state_dict(content, strict=False)
            self._empty()
            held = -(int(state_dict["_len"]) // -prod(content.shape[1 : self.ndim]))
            self.set(range(held), content[:held], set_cursor=False)
            self._len = int(state_dict["_len"])
            return
        root = self._new_folder()
        for name, file in content.items():
            path = (root / name).resolve()
            if root not in path.parents:
                raise CheckpointError(f"state_dict holds a file {name!r} outside of its directory; do not load it")
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
                "a HoldallStorage cannot be shared between processes; keep the buffer in one, and let collectors send "
                "their data to it, or use holdall.ray"
            )
        state: dict[str, Any] = super().__getstate__()
        return state | {"_folder": None}

    def close(self) -> None:
        """Free everything; what was sampled stays as it is."""
        if self._memory is not None:
            self._memory.close()


def _is_integer(cursor: Any) -> bool:
    if isinstance(cursor, torch.Tensor | np.ndarray):
        return cursor.ndim == 0 and not str(cursor.dtype).endswith("bool")
    return isinstance(cursor, int | np.integer)


def _cut(value: Any, where: slice) -> Any:
    if isinstance(value, dict):
        return {key: _cut(part, where) for key, part in value.items()}
    return value[where]

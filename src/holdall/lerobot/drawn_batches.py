"""Batches that iterators have drawn and not returned yet, and how a checkpoint stores them.

    get_iterator -> DrawnQueue.draw -> Loader reads the rows -> DrawnQueue.receive -> the consumer
    save         -> pack_queues: ids of the batches, and the rows that were evicted after the draw
    load         -> unpack_queues: the same batches, which new iterators return first

Guarantee: an iterator of a loaded buffer returns the batches that the saved iterator would have returned, also if other
code draws from torch's generator in between.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.checks import refuse_malformed

Ids = NDArray[np.int64]

_DICTS = ("state", "next_state", "complementary_info")
_TENSORS = ("action", "reward", "done", "truncated")
_IDS = "ids"


class BatchTransition(TypedDict):
    """A batch, with the keys of LeRobot's own type. All tensors are float32 and on the buffer's device."""

    state: dict[str, torch.Tensor]
    action: torch.Tensor
    reward: torch.Tensor
    next_state: dict[str, torch.Tensor]
    done: torch.Tensor
    truncated: torch.Tensor
    complementary_info: NotRequired[dict[str, torch.Tensor] | None]


@dataclass(frozen=True, eq=False)
class DrawnBatch:
    """A batch that was drawn. Its rows are read later, with the values that they had when the batch was drawn.

    Attributes:
        ids: Transition ids of the rows.
        read_rows: Returns rows of the batch, before the augmentation. The argument has the rows' numbers in the batch.
    """

    ids: Ids
    read_rows: Callable[[Ids], BatchTransition]

    def read(self) -> BatchTransition:
        """Return all rows, before the augmentation."""
        return self.read_rows(np.arange(len(self.ids)))


@dataclass(frozen=True, eq=False)
class SavedQueue:
    """The undelivered batches of an iterator at the moment of a checkpoint, oldest first."""

    batch_size: int
    batches: list[DrawnBatch]


class DrawnQueue:
    """The batches that one iterator has drawn and not returned, oldest first.

    Args:
        draw_batch: Draws a batch of the given size from torch's generator.
        augment: Augments a batch that was read.
        lock: Lock of the buffer. It is held while a batch is drawn, so that a checkpoint contains either both the batch
            and the state of the generator after the draw, or neither.
        restored: Batches of a saved iterator, which are returned first.
    """

    def __init__(
        self,
        batch_size: int,
        draw_batch: Callable[[int], DrawnBatch],
        augment: Callable[[BatchTransition], BatchTransition],
        lock: threading.Lock,
        restored: Iterable[DrawnBatch],
    ) -> None:
        self.batch_size = batch_size
        self.undelivered = deque(restored)
        self._unread = deque(self.undelivered)
        self._draw_batch = draw_batch
        self._augment = augment
        self._lock = lock

    def draw(self) -> Callable[[], tuple[DrawnBatch, BatchTransition]]:
        """Draw the next batch, and return the function that reads it."""
        with self._lock:
            if self._unread:
                drawn = self._unread.popleft()
            else:
                drawn = self._draw_batch(self.batch_size)
                self.undelivered.append(drawn)
        return lambda: (drawn, drawn.read())

    def receive(self, read: tuple[DrawnBatch, BatchTransition]) -> BatchTransition:
        """Return the augmented batch. `read` is the result of the function that `draw` returned."""
        drawn, batch = read
        with self._lock:
            # Earlier batches are still in the queue if reading them failed.
            while self.undelivered.popleft() is not drawn:
                pass
        return self._augment(batch)


# ---------------------------------------------------------------- checkpoints


def pack_queues(queues: Sequence[SavedQueue], first_id: int) -> bytes:
    """Return the undelivered batches of iterators as a .npz file.

    Args:
        first_id: First transition id that the checkpoint contains. Rows before it are stored in the file.
    """
    arrays: dict[str, NDArray[Any]] = {"batch_sizes": np.array([queue.batch_size for queue in queues], np.int64)}
    for number, queue in enumerate(queues):
        arrays[f"{number}/count"] = np.array(len(queue.batches))
        for position, drawn in enumerate(queue.batches):
            prefix = f"{number}/{position}/"
            arrays[prefix + _IDS] = drawn.ids
            evicted = (drawn.ids < first_id).nonzero()[0]
            if len(evicted):
                rows = drawn.read_rows(evicted)
                arrays.update({prefix + name: tensor.cpu().numpy() for name, tensor in _list_parts(rows)})
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # The stub takes the arrays for `allow_pickle`.
    return file.getvalue()


def unpack_queues(
    packed: bytes, read: Callable[[Ids], BatchTransition], held: range, device: torch.device
) -> list[SavedQueue]:
    """Return the batches that `pack_queues` packed. Read their rows now, before they are evicted.

    Args:
        read: Returns the rows of transition ids that are held.
        held: Transition ids that were loaded. A queue with a batch of other rows, which are missing, becomes empty.
    """
    queues: list[SavedQueue] = []
    with (
        refuse_malformed("The list of batches that were drawn ahead"),
        np.load(io.BytesIO(packed), allow_pickle=False) as arrays,
    ):
        for number, batch_size in enumerate(arrays["batch_sizes"].tolist()):
            batches: list[DrawnBatch] = []
            count = int(arrays[f"{number}/count"])
            for position in range(count):
                prefix = f"{number}/{position}/"
                stored = {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
                ids = stored.pop(_IDS)
                batch = _restore_batch(ids, stored, read, held, device)
                if batch is not None:
                    batches.append(DrawnBatch(ids, _make_row_reader(batch)))
            queues.append(SavedQueue(batch_size, batches if len(batches) == count else []))
    return queues


def _restore_batch(
    ids: Ids,
    stored: dict[str, NDArray[Any]],
    read: Callable[[Ids], BatchTransition],
    held: range,
    device: torch.device,
) -> BatchTransition | None:
    """Return a batch of rows in the memory and of `stored` rows. Return None if a row is in neither."""
    is_held = (ids >= held.start) & (ids < held.stop)
    missing = int((~is_held).sum())
    if missing != len(stored.get("reward", ())):
        return None
    if not missing:
        return read(ids)
    rows_held = torch.from_numpy(is_held.nonzero()[0]).to(device)
    rows_stored = torch.from_numpy((~is_held).nonzero()[0]).to(device)
    from_memory = dict(_list_parts(read(ids[is_held])))

    def merge(name: str) -> torch.Tensor:
        tensor = torch.from_numpy(stored[name]).to(device)
        merged = torch.empty((len(ids), *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        merged[rows_held] = from_memory[name]
        merged[rows_stored] = tensor
        return merged

    return _build_batch({name: merge(name) for name in from_memory})


def _make_row_reader(batch: BatchTransition) -> Callable[[Ids], BatchTransition]:
    def read_rows(rows: Ids) -> BatchTransition:
        return _build_batch({name: tensor[torch.from_numpy(rows)] for name, tensor in _list_parts(batch)})

    return read_rows


def _list_parts(batch: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield all tensors of a batch with names such as `reward` and `state/observation.state`."""
    for part in _TENSORS:
        yield part, batch[part]
    for part in _DICTS:
        for key, tensor in (batch[part] or {}).items():
            yield f"{part}/{key}", tensor


def _build_batch(tensors: dict[str, torch.Tensor]) -> BatchTransition:
    """Return the batch from tensors with the names of `_list_parts`."""
    parts: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _DICTS}
    for name, tensor in tensors.items():
        part, _, key = name.partition("/")
        if key:
            parts[part][key] = tensor
    return BatchTransition(
        state=parts["state"],
        action=tensors["action"],
        reward=tensors["reward"],
        next_state=parts["next_state"],
        done=tensors["done"],
        truncated=tensors["truncated"],
        complementary_info=parts["complementary_info"] or None,
    )

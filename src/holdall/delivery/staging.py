"""Staging: pinned host memory through which arrays reach a device.

A copy from ordinary memory makes the host wait. A copy from pinned memory does not, so arrays are first copied into a
pinned slot. A slot is used again when the device has read it. Large arrays are sent in pieces: while one piece crosses
the bus, the next one is filled.

Guarantee: arrays may be changed as soon as a call returns. Tensors belong to the caller.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdall.schema import Array
from holdall.store.view import align

SLOT_BYTES = 8 * 2**20
"""Bytes of a piece. Copying a piece of this size takes much longer than starting the copy."""
_MIN_SLOTS = 3
"""Slots that take turns, so that one is filled while the device reads another."""
_MIB = 2**20
_MIN_PARALLEL_BYTES = 2**20
"""Copies from this size on use the threads of torch."""

Bytes = NDArray[np.uint8]
Fill = Callable[[Bytes, int], object]
"""Fills an array with the bytes of a source. The number is the position of the first byte in the source."""


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """Return torch's counterpart of a dtype. Raise TypeError if there is none."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def describe_lack_of_memory(rows: int, device: torch.device, error: BaseException) -> str:
    """Return the message of the error for a batch that does not fit into the memory of a device."""
    return (
        f"batch_size ({rows}) needs more memory than {device} has ({error}). Use a smaller batch_size, or a lower "
        "prefetch."
    )


def is_asynchronous(device: torch.device) -> bool:
    """Return whether copies to `device` run in streams, while the host continues."""
    return device.type == "cuda"


def record_event(device: torch.device) -> Any:
    """Return an event that is complete when the current stream has finished its operations so far."""
    return torch.cuda.current_stream(device).record_event()


class Part(NamedTuple):
    """One array in a block of bytes."""

    start: int  # Position of the array in the block, in bytes.
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # In elements.
    first: int  # Position of the array in the block, in elements of `dtype`.


class Layout(NamedTuple):
    """Positions of arrays in one block of bytes. Each array begins at the next multiple of the alignment."""

    parts: tuple[Part, ...]
    nbytes: int  # Bytes of the block.


class Slot:
    """Pinned memory with one owner at a time.

    Attributes:
        memory: The bytes, as a tensor.
        array: The same bytes, as an array.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.array: Bytes = self.memory.numpy()
        self._event: Any = None  # Complete when the device has read the slot. None: the slot is free.

    def reserve(self, nbytes: int, *, is_pinned: bool) -> None:
        """Wait until the device has read the slot. Enlarge the slot to `nbytes` or more."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        if self.memory.numel() < nbytes:
            size = min(1 << (nbytes - 1).bit_length(), -(-nbytes // _MIB) * _MIB)
            self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
            self.array = self.memory.numpy()

    def keep_until(self, event: Any) -> None:
        """Make `reserve` wait for `event`, which was recorded after all copies from the slot were started."""
        self._event = event


class Staging:
    """Pinned memory for copies to one device. All methods may be called from any thread.

    Copies run on the current stream of the thread that calls. On devices without streams, the copies are complete when
    a call returns.

    The number of slots is the highest number of slots that had an owner at the same time, and at least `_MIN_SLOTS`.

    Args:
        slot_bytes: Maximum size of a piece.
    """

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self.device = device
        self._slot_bytes = slot_bytes
        self._free = deque(Slot() for _ in range(_MIN_SLOTS))  # In the order in which the slots were returned.
        self._slots = weakref.WeakSet(self._free)  # All slots, also those that have an owner.
        self._lock = threading.Lock()
        self._is_asynchronous = is_asynchronous(device)

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        with self._lock:
            return sum(slot.memory.numel() for slot in self._slots)

    def take_slot(self, nbytes: int) -> Slot:
        """Return a slot of at least `nbytes` bytes that belongs to the caller until `return_slot`.

        A slot is freed if its owner drops it without `return_slot`.
        """
        with self._lock:
            if self._free and len(self._slots) >= _MIN_SLOTS:
                slot = self._free.popleft()
            else:
                slot = Slot()
                self._slots.add(slot)
        slot.reserve(nbytes, is_pinned=self._is_asynchronous)
        return slot

    def return_slot(self, slot: Slot, event: Any) -> None:
        """Take back a slot. `event` was recorded after its copies were started. None: the copies are complete."""
        slot.keep_until(event)
        self._free.append(slot)

    @contextlib.contextmanager
    def use_slot(self, nbytes: int, stream: Any = None) -> Iterator[Slot]:
        """Return a context with a slot of at least `nbytes` bytes.

        The caller fills the slot and starts copies from it on `stream`, which is the current one by default.
        """
        slot = self.take_slot(nbytes)
        try:
            yield slot
        finally:
            event = None
            if self._is_asynchronous:
                event = record_event(self.device) if stream is None else stream.record_event()
            self.return_slot(slot, event)

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Return copies of the arrays on the device. They share one block of memory."""
        return split_block(*self.send_block(arrays))

    def send_block(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, Layout]:
        """Copy arrays to one block of bytes on the device. Return the block, and the positions of the arrays in it."""
        sources = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        layout = find_layout(arrays)
        block = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
        starts = [part.start for part in layout.parts]
        self.copy(block, starts, [_make_fill(source) for source in sources], [source.nbytes for source in sources])
        return block, layout

    def copy(self, target: torch.Tensor, starts: Sequence[int], fills: Sequence[Fill], sizes: Sequence[int]) -> None:
        """Copy sources to places in `target`, which are bytes on the device.

        Args:
            starts: Position of every source in `target`, ascending.
            fills: For every source, the function that copies its bytes into pinned memory.
            sizes: Size of every source in bytes.
        """
        for first, stop in self._split(starts, sizes):
            self._copy_piece(target, first, stop, starts, fills, sizes)

    def _split(self, starts: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the start and the end of every piece of `target`. Bytes between sources are part of pieces, too."""
        if not sizes or sum(sizes) == 0:
            return []
        end = max(start + size for start, size in zip(starts, sizes, strict=True))
        cuts = [*range(min(starts), end, self._slot_bytes), end]
        return list(pairwise(cuts))

    def _copy_piece(
        self,
        target: torch.Tensor,
        first: int,
        stop: int,
        starts: Sequence[int],
        fills: Sequence[Fill],
        sizes: Sequence[int],
    ) -> None:
        with self.use_slot(stop - first) as slot:
            for start, fill, size in zip(starts, fills, sizes, strict=True):
                low = max(first, start)
                high = min(stop, start + size)
                if low < high:
                    fill(slot.array[low - first : high - first], low - start)
            target[first:stop].copy_(slot.memory[: stop - first], non_blocking=True)


def _make_fill(source: Bytes) -> Fill:
    """Return the function that copies bytes of `source`."""

    def fill(piece: Bytes, start: int) -> None:
        part = source[start : start + piece.nbytes]
        if piece.nbytes >= _MIN_PARALLEL_BYTES and source.flags.writeable:  # torch warns of read-only arrays.
            torch.from_numpy(piece).copy_(torch.from_numpy(part))
        else:
            piece[:] = part

    return fill


def find_layout(arrays: Sequence[Array]) -> Layout:
    """Return the layout of arrays in a block."""
    return _make_layout(tuple([(array.dtype, array.shape) for array in arrays]))


@functools.lru_cache
def _make_layout(forms: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]) -> Layout:
    """Return the layout of arrays with the dtypes and shapes `forms`."""
    parts = []
    start = 0
    for dtype, shape in forms:
        parts.append(Part(start, torch_dtype(dtype), shape, _find_strides(shape), start // dtype.itemsize))
        start += align(dtype.itemsize * prod(shape))
    return Layout(tuple(parts), start)


def split_block(block: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Return the arrays of a layout as tensors that share the memory of `block`, which has the dtype uint8."""
    typed: dict[torch.dtype, torch.Tensor] = {}
    tensors = []
    for _, dtype, shape, strides, first in layout.parts:
        if dtype not in typed:
            typed[dtype] = block.view(dtype)
        # One operation instead of three: a slice, a view with another dtype, and a view with another shape.
        tensors.append(typed[dtype].as_strided(shape, strides, first))
    return tensors


def _find_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides[: len(shape)]))

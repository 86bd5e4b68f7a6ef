"""Rollouts and trajectories on a device: sent in pieces, each on its way while the next one is filled.

In:  functions that fill arrays with rows, or tensors on the host.  Out: tensors on the device.
Invariant: copies run on the caller's own stream, so nothing has to wait for them. Host memory is pinned once, in a few
slots, however large a minibatch is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.batches import BlockPool, Delivery
from holdall.delivery.device import DeviceStream, StagingRing, StagingSlot, stream_to, torch_dtype
from holdall.native import SlotSender
from holdall.schema import Array, Leaf
from holdall.storage import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

SLOT_BYTES = 8 * 2**20
"""A slot: long enough that starting a copy costs nothing beside it, short enough that filling the next one overlaps."""
_SLOTS = 4
_PIECE_ALIGNMENT_BYTES = 256
_KEPT_BYTES = 64 * 2**20
"""Host memory of minibatches that is kept between updates; allocating more is quick beside its use."""
_PIECE_BYTES = 2**18
"""What one thread copies at once."""

Gather = Callable[[NDArray[np.int64], Array], object]
"""Fills an array with the rows of a field at given places."""


class MinibatchDelivery:
    """Brings minibatches to one device; None stands for NumPy arrays."""

    def __init__(self, device: str | None, leaves: list[Leaf]) -> None:
        self.target = Delivery(device, leaves)
        self._pool = BlockPool()
        self._upload: _Upload | None = None
        if self.target.is_remote and self.target.torch_device is not None:
            torch = self.target.torch
            row_bytes = max((leaf.nbytes for leaf in leaves), default=0)
            self._upload = _Upload(torch, stream_to(torch, self.target.torch_device), max(SLOT_BYTES, row_bytes))

    def deliver(self, places: NDArray[np.int64], fields: Sequence[tuple[Leaf, Gather]]) -> list[Any]:
        """Return one array or tensor per field: its rows at `places`."""
        rows = len(places)
        if self._upload is not None:
            return self._upload.deliver(places, fields)
        sizes = [-(-rows * leaf.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for leaf, _ in fields]
        block = self._pool.take(sum(sizes))
        arrays, start = [], 0
        for (leaf, gather), size in zip(fields, sizes, strict=True):
            array = block[start : start + rows * leaf.nbytes].view(leaf.dtype).reshape(rows, *leaf.shape)
            gather(places, array)
            arrays.append(self.target.hand_over(array))
            start += size
        return arrays

    def release_large(self) -> None:
        """Free large blocks until the next update."""
        if self._pool.nbytes > _KEPT_BYTES:
            self._pool = BlockPool()

    def arrays(self) -> list[Array]:
        """Return the host arrays kept for the next minibatches; pinned slots are torch's."""
        return [*self._pool.arrays()]

    @property
    def nbytes(self) -> int:
        """Host memory kept for the next minibatches."""
        return self._pool.nbytes if self._upload is None else self._upload.ring.nbytes


class _Upload:
    """Fills tensors on a device through pinned slots."""

    def __init__(self, torch: Any, stream: DeviceStream, slot_bytes: int) -> None:
        self.ring = StagingRing(stream, StagingSlot, _SLOTS, slot_bytes)
        self._torch = torch
        self._stream = stream
        self._slot_bytes = slot_bytes
        self._slot: StagingSlot | None = None
        self._used = 0

    def deliver(self, places: NDArray[np.int64], fields: Sequence[tuple[Leaf, Gather]]) -> list[torch.Tensor]:
        """Return one tensor per field; its copies are under way on the caller's stream."""
        tensors, rows = [], len(places)
        for leaf, gather in fields:
            dtype = torch_dtype(self._torch, leaf.dtype)
            tensor = self._torch.empty((rows, *leaf.shape), dtype=dtype, device=self._stream.device)
            step = max(1, self._slot_bytes // max(leaf.nbytes, 1))
            for first in range(0, rows, step):
                end = min(first + step, rows)
                staged = self._piece((end - first) * leaf.nbytes)
                shape = (end - first, *leaf.shape)
                gather(places[first:end], staged.numpy().view(leaf.dtype).reshape(shape))
                tensor[first:end].copy_(staged.view(dtype).reshape(shape), non_blocking=True)
            tensors.append(tensor)
        self._leave_slot()  # the caller's stream may be another one next time
        return tensors

    def _piece(self, nbytes: int) -> torch.Tensor:
        """Return pinned memory; small fields share a slot."""
        if self._slot is None or self._used + nbytes > self._slot_bytes:
            self._leave_slot()
            self._slot, self._used = self.ring.next_slot(), 0
        piece = self._slot.host[self._used : self._used + nbytes]
        self._used += -(-nbytes // _PIECE_ALIGNMENT_BYTES) * _PIECE_ALIGNMENT_BYTES
        return piece

    def _leave_slot(self) -> None:
        if self._slot is not None:
            self._slot.read = self._stream.record_consumer()
        self._slot = None


class CopySpan(NamedTuple):
    """Where the bytes of one source belong in the target."""

    start: int
    nbytes: int


class CopyLoads(NamedTuple):
    """What all slots take, one after another; see `SlotSender.send`."""

    target: torch.Tensor  # bytes on the device
    pieces: NDArray[np.int64]
    loads: NDArray[np.int64]


class DeviceCopier:
    """Copies tensors of the host to fixed places on a device, through pinned slots."""

    def __init__(self, stream: DeviceStream, slot_bytes: int = SLOT_BYTES) -> None:
        self._stream = stream
        self._slot_bytes = slot_bytes
        self._ring = StagingRing(stream, StagingSlot, _SLOTS, slot_bytes)
        self._sender: SlotSender | None = None
        self._slots: torch.Tensor | None = None  # those of the sender
        self._events: list[Any] = []

    def plan(self, target: torch.Tensor, spans: Sequence[CopySpan]) -> CopyLoads:
        """Prepare copies of sources of these sizes to these places of `target`, bytes on the device."""
        first = min(span.start for span in spans)
        end = max(span.start + span.nbytes for span in spans)
        pieces: list[tuple[int, ...]] = []
        loads: list[tuple[int, ...]] = []
        for begin in range(first, end, self._slot_bytes):
            size = min(self._slot_bytes, end - begin)
            slot = len(loads) % _SLOTS * self._slot_bytes
            for source, span in enumerate(spans):
                low, high = max(span.start, begin), min(span.start + span.nbytes, begin + size)
                pieces += [
                    (source, k - span.start, min(_PIECE_BYTES, high - k), slot + k - begin, len(loads))
                    for k in range(low, high, _PIECE_BYTES)
                ]
            loads.append((len(pieces), begin, size))
        shaped = (np.array(rows, np.int64).reshape(-1, width) for rows, width in ((pieces, 5), (loads, 3)))
        return CopyLoads(target, *shaped)

    def send(self, copies: CopyLoads, sources: Sequence[torch.Tensor]) -> None:
        """Send contiguous sources; they have been read when this returns, and may be changed."""
        target, pieces, loads = copies
        sender = self._sender or self._new_sender()
        if sender is not None:
            begins = [source.data_ptr() for source in sources]
            if not sender.send(pieces, loads, begins, target.data_ptr(), self._stream.consumer()):
                return
            _wait_for(self._stream, self._events, os.getpid())  # the driver refuses: torch does all of it
        given = [source.flatten().view(target.dtype) for source in sources]
        done = 0
        for end, begin, size in loads.tolist():
            slot = self._ring.next_slot()
            for source, first, nbytes, at, _ in pieces[done:end].tolist():
                place = at % self._slot_bytes
                slot.host[place : place + nbytes].copy_(given[source][first : first + nbytes])
            target[begin : begin + size].copy_(slot.host[:size], non_blocking=True)
            slot.read, done = self._stream.record_consumer(), end

    def _new_sender(self) -> SlotSender | None:
        """Return what copies in C, if the device and the compiled loops have all that it takes."""
        stream, here = self._stream, SlotSender.send_here()
        if here is None or not (stream.query_function or stream.launches_here):
            return None
        send, _ = stream.copy_function(here)
        if not send:
            return None
        events = [stream.new_event() for _ in range(_SLOTS)]
        self._slots, self._events = stream.host_bytes(_SLOTS * self._slot_bytes), [event for event, _ in events]
        slots = (self._slots.data_ptr(), self._slot_bytes, _SLOTS)
        functions = (send, stream.record_function, stream.query_function)
        self._sender = SlotSender(slots, functions, [number for _, number in events])
        # Pinned memory must not be used for something else while a device may read it.
        weakref.finalize(self, _wait_for, stream, self._events, os.getpid())
        return self._sender


def _wait_for(stream: DeviceStream, events: list[Any], process: int) -> None:
    """Wait for events; a forked child has no part in the device."""
    for event in events if process == os.getpid() else ():
        stream.synchronize(event)

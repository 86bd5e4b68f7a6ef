"""Pinned staging: host memory from which a GPU fetches by itself, used over and over. Imports torch.

In:  a number of bytes.  Out: that much pinned memory, free to be written to.
Invariant: memory is handed out again only after the copies that were started from it are done. Only
these are waited for, never the device as a whole.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from holdall.delivery.host import ALIGNMENT_BYTES, Delivery, Staging
from holdall.schema import Array, Leaf

SLOT_BYTES = 8 * 2**20
"""A slot: long enough that starting a copy costs nothing beside it, short enough that filling the next one overlaps."""
_SLOTS = 4
_ALIGNMENT_BYTES = 256


class PinnedRing:
    """A few slots of pinned memory, filled in turn while the device still reads the ones before."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self.slot_bytes = slot_bytes
        self._device = device
        self._slots: list[torch.Tensor] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Pinned bytes held."""
        return len(self._slots) * self.slot_bytes

    def take(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` bytes, at most `slot_bytes`; the caller then starts a copy on the current stream."""
        if not self._slots or self._used + nbytes > self.slot_bytes:
            self.next_slot()
        taken = self._slots[self._turn][self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return taken

    def next_slot(self) -> None:
        """Mark the end of the copies from this slot, on the current stream, and go on to the next.

        To be called before the stream changes, too.
        """
        if self._slots and self._used == 0:
            return
        if self._slots:
            self._copied[self._turn].record(torch.cuda.current_stream(self._device))
            self._turn = (self._turn + 1) % _SLOTS
        self._used = 0
        if self._turn == len(self._slots):
            self._slots.append(torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=True))
            with torch.cuda.device(self._device):
                self._copied.append(torch.cuda.Event())  # type: ignore[no-untyped-call]  # torch leaves it so
        else:
            self._copied[self._turn].synchronize()


_ALONE_BYTES = 2**20
"""Up to this much is copied by the calling thread: waking others takes longer."""


class CopySpan(NamedTuple):
    """Where the bytes of one source belong in the target."""

    start: int
    nbytes: int


class _Part(NamedTuple):
    """A piece of a source, and where it goes in a slot."""

    source: int
    first: int
    nbytes: int
    to: torch.Tensor


class _Load(NamedTuple):
    """What one slot takes, and where it is sent."""

    slot: int
    parts: list[_Part]
    staged: torch.Tensor
    target: torch.Tensor


class CopyRoute:
    """Everything about a transfer that does not change with the numbers, worked out once."""

    def __init__(self, target: torch.Tensor, spans: Sequence[CopySpan], slots: list[torch.Tensor]) -> None:
        slot_bytes = slots[0].nbytes
        first = min(span.start for span in spans)
        end = max(span.start + span.nbytes for span in spans)
        self.loads: list[_Load] = []
        for number, begin in enumerate(range(first, max(end, first + 1), slot_bytes)):
            slot = slots[number % len(slots)]
            size = min(slot_bytes, end - begin)
            parts = []
            for source, span in enumerate(spans):
                low, high = max(span.start, begin), min(span.start + span.nbytes, begin + size)
                if low < high:
                    parts.append(_Part(source, low - span.start, high - low, slot[low - begin : high - begin]))
            self.loads.append(_Load(number % len(slots), parts, slot[:size], target[begin : begin + size]))


class DeviceCopier:
    """Pinned slots, used over and over."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self._device = device
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_SLOTS)]
        with torch.cuda.device(device):
            self._read = [torch.cuda.Event() for _ in self._slots]  # type: ignore[no-untyped-call]  # torch leaves it so

    def plan(self, target: torch.Tensor, spans: Sequence[CopySpan]) -> CopyRoute:
        """Prepare transfers of sources of these sizes to these places of `target`, bytes on the device."""
        return CopyRoute(target, spans, self._slots)

    def send(self, route: CopyRoute, sources: Sequence[torch.Tensor]) -> None:
        """Send contiguous sources; they have been read when this returns, and may be changed."""
        stream = torch.cuda.current_stream(self._device)
        for slot, parts, staged, target in route.loads:
            read = self._read[slot]
            read.synchronize()
            for source, first, nbytes, to in parts:
                if nbytes <= _ALONE_BYTES:
                    ctypes.memmove(to.data_ptr(), sources[source].data_ptr() + first, nbytes)
                else:
                    to.copy_(sources[source].flatten().view(torch.uint8)[first : first + nbytes])
            target.copy_(staged, non_blocking=True)
            read.record(stream)


Fill = Callable[[int, int, Array], None]
"""Fills an array with rows [first, end) of the minibatch."""

_KEPT_BYTES = 64 * 2**20
"""Host memory of minibatches that is kept between updates; what is larger is quickly had again beside its use."""


class MinibatchDelivery:
    """Brings minibatches to one device; None stands for NumPy arrays."""

    def __init__(self, device: str | None, leaves: list[Leaf]) -> None:
        self._delivery = Delivery(device, leaves)
        self._staging = Staging()
        self._gpu: _Gpu | None = None
        if device is not None and not device.startswith("cpu"):
            self._gpu = _Gpu(device, max((leaf.nbytes for leaf in leaves), default=0))

    def land(self, rows: int, fields: Sequence[tuple[Leaf, Fill]]) -> list[Any]:
        """Return one array or tensor of `rows` rows per field."""
        if self._gpu is not None:
            return self._gpu.land(rows, fields)
        sizes = [-(-rows * leaf.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for leaf, _ in fields]
        block = self._staging.take(sum(sizes))
        arrays, start = [], 0
        for (leaf, fill), size in zip(fields, sizes, strict=True):
            array = block[start : start + rows * leaf.nbytes].view(leaf.dtype).reshape(rows, *leaf.shape)
            fill(0, rows, array)
            arrays.append(self._delivery.hand_over(array))
            start += size
        return arrays

    def require(self, leaf: Leaf) -> None:
        """Refuse a leaf that cannot be brought to the device."""
        self._delivery.require(leaf)

    def rest(self) -> None:
        """Let go of large blocks, for the time until the next update."""
        if self._staging.nbytes > _KEPT_BYTES:
            self._staging = Staging()

    def arrays(self) -> list[Array]:
        """Return the host arrays kept for the next minibatches; pinned slots are torch's."""
        return [*self._staging.arrays()]

    @property
    def nbytes(self) -> int:
        """Host memory kept for the next minibatches."""
        return self._staging.nbytes if self._gpu is None else self._gpu.ring.nbytes


class _Gpu:
    """The way to a GPU: filled in pieces, each on its way while the next one is filled."""

    def __init__(self, device: str, row_bytes: int) -> None:
        import torch  # noqa: PLC0415  heavy, and only for those who ask for tensors

        self._torch = torch
        self._device: torch.device = torch.device(device)
        self.ring: PinnedRing = PinnedRing(self._device, max(SLOT_BYTES, row_bytes))

    def land(self, rows: int, fields: Sequence[tuple[Leaf, Fill]]) -> list[torch.Tensor]:
        """Return one tensor per field; its copies are under way on the current stream."""
        tensors = []
        for leaf, fill in fields:
            dtype = self._torch.from_numpy(np.empty(0, leaf.dtype)).dtype
            tensor = self._torch.empty((rows, *leaf.shape), dtype=dtype, device=self._device)
            step = max(1, self.ring.slot_bytes // max(leaf.nbytes, 1))
            for first in range(0, rows, step):
                end = min(first + step, rows)
                staged = self.ring.take((end - first) * leaf.nbytes)
                shape = (end - first, *leaf.shape)
                fill(first, end, staged.numpy().view(leaf.dtype).reshape(shape))
                tensor[first:end].copy_(staged.view(dtype).reshape(shape), non_blocking=True)
            tensors.append(tensor)
        self.ring.next_slot()
        return tensors

"""The conveyor: host tensors brought to their places in a device's memory, through pinned slots. Imports torch.

In:  contiguous tensors on the host, and where in a device tensor their bytes belong.  Out: copies under way on the
current stream.
Invariant: a slot is filled again only after the device has read it, which an event of its own tells; the sources have
been read when `send` returns. Each slot is on its way while the next one is filled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

SLOT_BYTES = 8 * 2**20
"""Long enough that calling torch's threads costs little beside it, short enough that the last one is soon sent."""
_SLOTS = 4
_ALONE_BYTES = 2**20
"""Up to this much is copied by the calling thread: waking others takes longer."""


class Span(NamedTuple):
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


class Route:
    """Everything about a transfer that does not change with the numbers, worked out once."""

    def __init__(self, target: torch.Tensor, spans: Sequence[Span], slots: list[torch.Tensor]) -> None:
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


class Conveyor:
    """Pinned slots, used over and over."""

    def __init__(self, device: torch.device, slot_bytes: int = SLOT_BYTES) -> None:
        self._device = device
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_SLOTS)]
        with torch.cuda.device(device):
            self._read = [torch.cuda.Event() for _ in self._slots]  # type: ignore[no-untyped-call]  # torch leaves it so

    def plan(self, target: torch.Tensor, spans: Sequence[Span]) -> Route:
        """Prepare transfers of sources of these sizes to these places of `target`, bytes on the device."""
        return Route(target, spans, self._slots)

    def send(self, route: Route, sources: Sequence[torch.Tensor]) -> None:
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

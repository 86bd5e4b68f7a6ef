"""Pinned staging: host memory from which a GPU fetches by itself, used over and over. Imports torch.

In:  a number of bytes.  Out: that much pinned memory, free to be written to.
Invariant: memory is handed out again only after the copies that were started from it are done. Only
these are waited for, never the device as a whole.
"""

from __future__ import annotations

import torch

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

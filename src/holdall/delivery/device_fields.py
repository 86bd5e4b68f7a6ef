"""Fields of a memory on a device: rows in a ring, and a pool for next observations that no tick continues.

In:  leaves, and how many rows there are to be.  Out: tensors on the device, and columns that a checkpoint reads.
Invariant: a place of a pool belongs to one row until the tick of that row leaves. Pools only grow, and only while the
device is at rest.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.delivery.device_loops import DeviceField, put_places, typed_rows
from holdall.schema import Array, Leaf, Schema

if TYPE_CHECKING:
    import torch

SLACK_TICKS = 4
"""Ticks that the device may lag behind before the host waits, if every lane ended an episode in each of them."""
_POOLED_SHARE = 64
"""A pool begins with a place for every so many rows."""
_MOST_CHUNKS = 32
_REWARD_BYTES = 4
FLAG = Leaf("", (), np.dtype(np.bool_))


class ApartPool:
    """Next observations of one field that no tick continues, and a queue of the places that are free."""

    def __init__(self, torch: Any, device: torch.device, row_bytes: int, lanes: int, cells: int) -> None:
        self._torch, self._device, self._row_bytes = torch, device, row_bytes
        self.first_chunk = self.places = _first_places(lanes, cells)
        self.chunks = [self._new_chunk(self.places)]
        self.table = torch.zeros(_MOST_CHUNKS, dtype=torch.int64, device=device)
        self.table[0] = self.chunks[0].data_ptr()
        self.apart = torch.full((cells,), -1, dtype=torch.int32, device=device)
        self._fill_queue(torch.arange(self.places, dtype=torch.int32, device=device))

    def _new_chunk(self, places: int) -> torch.Tensor:
        chunk: torch.Tensor = self._torch.empty((places, self._row_bytes), dtype=self._torch.uint8, device=self._device)
        return chunk

    def _fill_queue(self, free: torch.Tensor) -> None:
        """Let the queue hold these places, with room for all that there are."""
        torch, length = self._torch, 1 << (self.places - 1).bit_length()
        self.queue = torch.zeros(length, dtype=torch.int32, device=self._device)
        self.queue[: len(free)] = free
        self.counts = torch.tensor([0, len(free), length - 1, 0], dtype=torch.int32, device=self._device)

    def free(self) -> torch.Tensor:
        """Return the places that are free; waits for the device."""
        taken, given, mask, _ = (number & 0xFFFFFFFF for number in self.counts.tolist())
        positions = self._torch.arange((given - taken) & 0xFFFFFFFF, device=self._device) + taken
        places: torch.Tensor = self.queue[positions & mask]
        return places

    def grow(self) -> int:
        """Add as many places as there are; return how many are free. The device is at rest."""
        free, new = self.free(), self.places
        self.chunks.append(self._new_chunk(new))
        self.table[len(self.chunks) - 1] = self.chunks[-1].data_ptr()
        self.places += new
        added = self._torch.arange(new, 2 * new, dtype=self._torch.int32, device=self._device)
        self._fill_queue(self._torch.cat([free, added]))
        return len(free) + new

    def put(self, cells: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep rows for cells that have none. The device is at rest."""
        while len(free := self.free()) < len(rows):
            self.grow()
        put_places(self, free[: len(rows)].long(), rows)
        self.apart[cells] = free[: len(rows)]
        self._fill_queue(free[len(rows) :])

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.nbytes for tensor in (*self.chunks, self.table, self.queue, self.counts, self.apart))


def byte_rows(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return rows as bytes, (rows, bytes of one): torch does not index all dtypes on all devices."""
    elements = prod(rows.shape[1:])
    if rows.numel() == 0:
        return rows.new_empty((len(rows), elements * rows.itemsize), dtype=module.uint8)
    return rows.reshape(len(rows), elements).view(module.uint8)


class DeviceColumn:
    """A ring on the device, read and written like an array of the host along its first axis."""

    def __init__(self, torch: Any, ring: torch.Tensor, dtype: np.dtype[Any], bit: int = 0) -> None:
        self._torch, self._ring, self._bit = torch, ring, bit
        self.dtype = dtype
        self.shape = tuple(ring.shape)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: int | slice) -> Array:
        part = self._ring[where]
        if self._bit:
            part = (part & self._bit) != 0
        if part.device.type == "cuda":
            staged = self._torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
            part = staged.copy_(part)
        array: Array = np.array(part.numpy())
        return array.view(self.dtype)

    def __setitem__(self, where: slice, rows: Array) -> None:
        part = self._ring[where]
        given = self._torch.from_numpy(np.array(rows)).to(part.device)  # a copy: rows may be read-only
        part.copy_(self._over(part, given) if self._bit else given)

    def put(self, cells: torch.Tensor, rows: Any) -> None:
        """Write rows, an array or the bytes of a tensor, at cells: places in the ring if its first axes were one."""
        flat = self._ring.flatten(0, 1)
        given = rows if isinstance(rows, self._torch.Tensor) else self._torch.from_numpy(rows)
        given = self._over(flat[cells], given) if self._bit else given.to(flat.device)
        byte_rows(self._torch, flat)[cells] = byte_rows(self._torch, given)

    def _over(self, part: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a part with these flags: the flags of a transition share a byte."""
        return (part & (0xFF ^ self._bit)) | given.to(part.device, part.dtype) * self._bit


class DeviceRing:
    """One field on the device; observations have a pool."""

    is_shared = True

    def __init__(
        self, torch: Any, device: torch.device, leaf: Leaf, lanes: int, slots: int, *, is_pooled: bool
    ) -> None:
        self.leaf = leaf
        self._slots = slots
        self.rows: torch.Tensor = torch.empty((slots * lanes, leaf.nbytes), dtype=torch.uint8, device=device)
        self.pool = ApartPool(torch, device, leaf.nbytes, lanes, slots * lanes) if is_pooled else None
        kind = torch.from_numpy(np.empty(0, leaf.dtype)).dtype
        self.field = DeviceField(self.rows, kind, leaf.shape, self.pool)
        self.column = DeviceColumn(torch, typed_rows(self.rows, kind, (slots, lanes, *leaf.shape)), leaf.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes on the device, all of which are taken from the first tick on."""
        return int(self.rows.nbytes) + (0 if self.pool is None else self.pool.nbytes)

    def bytes_of(self, rows: int) -> int:
        """Bytes that the field takes."""
        return self.nbytes

    def describe(self, kept: int) -> str:
        """Say where the field lies, for people."""
        places = 0 if self.pool is None else self.pool.places
        return f"flat rows on {self.rows.device}; room for {places:,} next observations apart"

    def newest_next(self, next_tick: int) -> Array:
        """Copy the next observations of the newest tick, which stand where the next tick's observations will."""
        return self.column[next_tick % self._slots]

    def arrays(self) -> list[Array]:
        """Return nothing: no array of the host belongs to the field."""
        return []


def rings_bytes(schema: Schema, ticks: int) -> int:
    """Bytes that rings of so many ticks take on a device before the first tick, with rewards of four bytes."""
    cells = (ticks + 1) * schema.num_envs
    places = _first_places(schema.num_envs, cells)
    rows = sum(leaf.nbytes for leaf in schema.leaves) + _REWARD_BYTES + FLAG.nbytes
    pooled = sum(4 * cells + places * (leaf.nbytes + 8) for leaf in schema.observation.leaves)
    return cells * rows + pooled


def _first_places(lanes: int, cells: int) -> int:
    return min(max(SLACK_TICKS * lanes, cells // _POOLED_SHARE), max(cells, lanes))

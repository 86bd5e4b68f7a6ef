"""Fields of a memory on a device: rows in a ring, and a pool for observations that no tick shows or continues.

In:  leaves, and how many rows there will be.  Out: tensors on the device, and columns that a checkpoint reads.
Frame stacks and sliding windows lie in slices, each once, where the first steps of a field show one.
Invariant: a place of a pool belongs to one row until the tick of that row leaves. Pools only grow, and only while the
device is at rest.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.delivery.device import torch_dtype
from holdall.delivery.device_loops import ApartPool, DeviceField, DeviceWindow, first_places, typed_rows
from holdall.errors import ArgumentError, DamageError
from holdall.schema import Array, Leaf, Schema, on_host
from holdall.storage import LiveRows, Window, WindowScout, as_bytes
from holdall.units import format_bytes

if TYPE_CHECKING:
    import torch

_REWARD_BYTES = 4
_WINDOWED_BYTES = 256
"""Shorter observations are not searched for windows."""
_SLICE_BYTES = 64
"""Shorter slices are not kept one by one: to find them takes longer than to copy them."""
LOOKED_AT = 32
"""Pairs of observations that are searched for a window."""
_LOOKED_AT_ONCE = 4
"""A scout looks at so many lanes of a tick."""
FLAG = Leaf("", (), np.dtype(np.bool_))


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


class WindowColumn(LiveRows):
    """Observations that lie in slices, read like a ring of whole ones.

    Args:
        read: Returns the observations of ticks [first, end).
    """

    def __init__(self, leaf: Leaf, lanes: int, ring_ticks: int, read: Callable[[int, int], Array]) -> None:
        self.shape, self.dtype, self._read = (ring_ticks, lanes, *leaf.shape), leaf.dtype, read

    def rows(self, first: int, end: int) -> Array:
        """See `LiveRows`."""
        return self._read(first, end)

    def view(self, first: int, end: int) -> Array:
        """See `LiveRows`."""
        return self._read(first, end)


class DeviceRing:
    """One field on the device; observations have a pool.

    Args:
        window: How observations are cut; None if they are kept whole.
        read: Returns the observations of ticks [first, end), if they are cut.
    """

    is_shared = True

    def __init__(
        self, torch: Any, device: torch.device, leaf: Leaf, lanes: int, slots: int, *, is_pooled: bool,
        window: Window | None = None, read: Callable[[int, int], Array] | None = None,
    ) -> None:  # fmt: skip
        self.leaf, self._lanes = leaf, lanes
        self._slots = slots if window is None else slots - 1 + window.count
        cells, row_bytes = self._slots * lanes, leaf.nbytes if window is None else window.slice_bytes
        self.rows: torch.Tensor = torch.empty((cells, row_bytes), dtype=torch.uint8, device=device)
        self.pool = ApartPool(torch, device, leaf.nbytes, lanes, cells) if is_pooled else None
        self.column: DeviceColumn | WindowColumn
        self.window: DeviceWindow | None = None
        kind = torch_dtype(torch, leaf.dtype)
        if window is None or read is None:
            self.column = DeviceColumn(torch, typed_rows(self.rows, kind, (slots, lanes, *leaf.shape)), leaf.dtype)
        else:
            whole = torch.full((cells,), -1, dtype=torch.int32, device=device)
            newest = torch.zeros((2 * lanes, leaf.nbytes), dtype=torch.uint8, device=device)
            cut = (window.count, window.outer, window.run_bytes)
            self.window = DeviceWindow(*cut, self._slots, whole, newest)
            self.column = WindowColumn(leaf, lanes, slots, read)
        self.field = DeviceField(self.rows, kind, leaf.shape, self.pool, self.window)

    @property
    def most_places(self) -> int:
        """Places of the pool that one lane may take in one tick."""
        return 1 if self.window is None else 2

    @property
    def nbytes(self) -> int:
        """Bytes on the device, all of which are taken from the first tick on."""
        window = 0 if self.window is None else self.window.whole.nbytes + self.window.newest.nbytes
        return int(self.rows.nbytes) + window + (0 if self.pool is None else self.pool.nbytes)

    def bytes_of(self, rows: int) -> int:
        """Bytes that the field takes."""
        return self.nbytes

    def describe(self, first_tick: int, next_tick: int) -> str:
        """Say where the field lies, for people."""
        places = 0 if self.pool is None else self.pool.places
        how = "flat rows" if self.window is None else f"window of {self.window.slices}, each slice once,"
        return f"{how} on {self.rows.device}; room for {places:,} observations apart"

    def newest_next(self, next_tick: int) -> Array:
        """Copy the next observations of the newest tick, which stand where the next tick's observations will."""
        if isinstance(self.column, DeviceColumn):
            return self.column[next_tick % self._slots]
        newest: Array = self._newest(next_tick).cpu().numpy().view(self.leaf.dtype)
        return newest.reshape(self._lanes, *self.leaf.shape)

    def put_newest(self, next_tick: int, rows: Array) -> None:
        """Write the next observations of the newest tick."""
        if isinstance(self.column, DeviceColumn):
            slot = next_tick % self._slots
            self.column[slot : slot + 1] = rows[None]
        else:
            newest = self._newest(next_tick)
            newest.copy_(newest.new_tensor(np.array(rows).reshape(self._lanes, -1).view(np.uint8)))

    def _newest(self, next_tick: int) -> Any:
        if self.window is None:
            raise DamageError("a field without a window was asked for its newest slices; report this")
        return self.window.newest.view(2, self._lanes, -1)[next_tick % 2]

    def arrays(self) -> list[Array]:
        """Return nothing: no array of the host belongs to the field."""
        return []


Windows = Mapping[int, Window]
"""How observations are cut, by leaf; the others are kept whole."""
Pairs = Callable[[int], tuple[Array, Array]]
"""Returns some observations of a leaf, and those that follow on each."""


def windows_of(schema: Schema, steps: Any) -> Windows:
    """Look for windows in the first of some steps, tensors or arrays; waits for the device."""

    def pairs(i: int) -> tuple[Array, Array]:
        shape = schema.observation.leaves[i].shape
        some = LOOKED_AT if steps.obs[i].ndim == len(shape) + 1 else -(-LOOKED_AT // schema.num_envs)
        obs, next_obs = (
            np.asarray(on_host(side[i][:some])).reshape(-1, *shape) for side in (steps.obs, steps.next_obs)
        )
        return obs, next_obs

    return windows_in(schema, pairs)


def windows_in(schema: Schema, pairs: Pairs) -> Windows:
    """Look for windows whose slices are worth keeping one by one."""
    found = {}
    for i, leaf in enumerate(schema.observation.leaves):
        scout = WindowScout(leaf)
        if leaf.nbytes > _WINDOWED_BYTES and not scout.done:
            before, after = (as_bytes(side, len(side)) for side in pairs(i))
            order = np.resize(np.arange(len(before)), LOOKED_AT)  # few are shown again and again
            for first in range(0, len(order), _LOOKED_AT_ONCE):
                some = order[first : first + _LOOKED_AT_ONCE]
                scout.look(before[some], after[some])
        window = scout.finding
        if window is not None and window.shift == 1 and window.slice_bytes >= _SLICE_BYTES:
            found[i] = window
    return found


def require_room(
    torch: Any, device: torch.device, schema: Schema, ticks: int, limit: int | None, windows: Windows, *,
    fits: bool = True,
) -> None:  # fmt: skip
    """Refuse rings that a device, or a budget, has no room for; say what would fit.

    Args:
        fits: False if the device refused them already.
    """
    needed = rings_bytes(schema, ticks, windows)
    free = int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else needed
    room = free if limit is None else min(limit, free)
    if needed <= room and fits:
        return
    lanes = schema.num_envs
    fitting = bisect.bisect_right(range(1, ticks), room, key=lambda some: rings_bytes(schema, some, windows)) * lanes
    raise ArgumentError(
        f"capacity ({ticks * lanes}) takes {format_bytes(needed)} on {device}, where {format_bytes(room)} "
        f"{'are free' if limit is None or free < limit else 'are allowed by budget'}; capacity={fitting} fits"
    )


def rings_bytes(schema: Schema, ticks: int, windows: Windows | None = None) -> int:
    """Bytes that rings of so many ticks take on a device before the first tick, with rewards of four bytes."""
    lanes, leaves = schema.num_envs, schema.observation.leaves
    cells = (ticks + 1) * lanes
    others = sum(leaf.nbytes for leaf in schema.leaves) - sum(leaf.nbytes for leaf in leaves)
    total = cells * (others + _REWARD_BYTES + FLAG.nbytes)
    for i, leaf in enumerate(leaves):
        window = (windows or {}).get(i)
        longer = cells if window is None else (ticks + window.count) * lanes
        kept = leaf.nbytes + 4 if window is None else window.slice_bytes + 8
        total += longer * kept + first_places(lanes, longer) * (leaf.nbytes + 8)
        total += 0 if window is None else 2 * lanes * leaf.nbytes
    return total

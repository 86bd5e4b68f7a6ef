"""The loops of a store on a device in operations of torch, one field after another: for devices without a compiler.

In:  fields in rings on one device, and tensors there.  Out: rows there, the same bits as those of `CudaLoops`.
Invariant: a tick may be written again if the first time was interrupted: it then costs places of a pool, never a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from holdall.delivery.cuda_program import CudaProgramError
from holdall.delivery.device_loops import (
    INVALID,
    TERMINATED,
    TRUNCATED,
    ApartPool,
    CudaLoops,
    DeviceField,
    DeviceLoops,
    DeviceWindow,
    PackedTicks,
    RingsOnDevice,
    RowsOnDevice,
    TickOnDevice,
    typed_rows,
)

if TYPE_CHECKING:
    import torch


def loops_for(torch: Any, device: torch.device) -> DeviceLoops:
    """Return the quickest loops for a device."""
    if device.type == "cuda":
        try:
            return CudaLoops(torch, device)
        except CudaProgramError:
            pass
    return TorchLoops(torch)


class TorchLoops:
    """See `DeviceLoops`; these wait for the device."""

    is_one_step = False

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def attach(self, rings: RingsOnDevice) -> None:
        """See `DeviceLoops`."""
        self._rings = rings

    def write(self, number: int, tick: TickOnDevice, *, has_previous: bool, ticks: int = 1) -> None:
        """See `DeviceLoops`."""
        for k in range(ticks):
            self._write(number + k, _cut(tick, k, self._rings.lanes), has_previous or k > 0)

    def _write(self, number: int, tick: TickOnDevice, has_previous: bool) -> None:
        rings, torch = self._rings, self._torch
        here, after = self._slot(number), self._slot(number + 1)
        for i, (field, value) in enumerate(zip(rings.fields, tick.rows, strict=True)):
            rows = _bytes_of(torch.uint8, value, rings.lanes)
            if field.pool is not None:
                next_obs = _bytes_of(torch.uint8, tick.next_obs[i], rings.lanes)
                if field.window is not None:
                    self._write_window(field, field.window, field.pool, number, rows, next_obs, has_previous)
                else:
                    if not has_previous:
                        self._leave(field.pool, field.pool.apart, here)
                    else:
                        self._keep_differing(field.pool, self._slot(number - 1), field.rows[here], rows)
                    self._leave(field.pool, field.pool.apart, after)
                    field.rows[after] = next_obs
                taken, given, _, _ = (count & 0xFFFFFFFF for count in field.pool.counts.tolist())
                rings.free[1 + i] = (given - taken) & 0xFFFFFFFF
            if field.window is None:
                field.rows[here] = rows
        flags = tick.terminated.to(torch.uint8) * TERMINATED + tick.truncated.to(torch.uint8) * TRUNCATED
        if tick.valid is not None:
            flags += (~tick.valid).to(torch.uint8) * INVALID
        rings.flags[here] = flags
        rings.counts[0] = number + 1
        rings.counts[1].clamp_(min=number + 2 - rings.slots)
        rings.free[0] = number + 1

    def write_packed(self, number: int, packed: PackedTicks, *, has_previous: bool) -> None:
        """See `DeviceLoops`."""
        fields, count = self._rings.fields, packed.ticks * self._rings.lanes
        observed = [field for field in fields if field.pool is not None]
        widths = [*(field.row_bytes for field in (*fields, *observed)), 1, 1]
        places = zip(packed.firsts.tolist(), widths, strict=True)
        rows = [packed.memory[first : first + count * width].view(count, width) for first, width in places]
        flags = [flag[:, 0] for flag in rows[-2:]]
        tick = TickOnDevice(rows[: len(fields)], rows[len(fields) : -2], flags[0], flags[1], None)
        self.write(number, tick, has_previous=has_previous, ticks=packed.ticks)

    def restore(self, number: int, rows: Mapping[int, torch.Tensor], ticks: int, *, has_previous: bool) -> None:
        """See `DeviceLoops`."""
        lanes = self._rings.lanes
        for i, given in rows.items():
            field = self._rings.fields[i]
            for k in range(ticks):
                if field.window is not None and field.pool is not None:
                    some = given[k * lanes : (k + 1) * lanes]
                    goes_on = has_previous or k > 0
                    self._write_window(field, field.window, field.pool, number + k, some, None, goes_on)

    def _write_window(
        self, field: DeviceField, window: DeviceWindow, pool: ApartPool, number: int, rows: torch.Tensor,
        next_obs: torch.Tensor | None, has_previous: bool,
    ) -> None:  # fmt: skip
        """Write observations of a tick; those that are taken over from elsewhere have no next observations here."""
        lanes = self._rings.lanes
        here, before, after = (self._slot(number + k, window.slots) for k in (0, -1, 1))
        goes_on = self._torch.zeros(lanes, dtype=self._torch.bool, device=rows.device)
        if not has_previous:
            self._leave(pool, pool.apart, here)
        else:
            ids = (number - 1) * lanes + self._torch.arange(lanes, device=rows.device)
            last = _slices(window, self._window_rows(field, window, pool, ids))
            goes_on = (last[:, :, 1:] == _slices(window, rows)[:, :, :-1]).flatten(1).all(dim=1)
            if next_obs is not None:
                self._keep_differing(pool, before, window.newest[_half(number, lanes)], rows)
        self._leave(pool, window.whole, here)
        for kept in (pool.apart, window.whole):
            self._leave(pool, kept, after)
        since = 1 - window.whole[before].clamp(max=0)
        window.whole[here] = self._torch.where(goes_on, -since.clamp(max=window.slices - 1), -1).to(window.whole.dtype)
        breaks = (~goes_on).nonzero()[:, 0]
        self._keep(pool, window.whole, here.start + breaks, rows[breaks])
        field.rows[here] = _slices(window, rows)[:, :, -1].reshape(lanes, -1)
        if next_obs is not None:
            window.newest[_half(number + 1, lanes)] = next_obs

    def _window_rows(
        self, field: DeviceField, window: DeviceWindow, pool: ApartPool, ids: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        """Return the observations of windows, as bytes."""
        torch, lanes, cells = self._torch, self._rings.lanes, len(window.whole)
        whole = window.whole[ids % cells].long()
        since = torch.where(whole < 0, -whole, 0)
        rows = ids.new_empty((len(ids), window.outer, window.slices, window.run_bytes), dtype=torch.uint8)
        firsts = (window.whole[(ids - since * lanes) % cells]).long()
        for slice_number in range(window.slices):
            back = window.slices - 1 - slice_number
            found = field.rows[(ids - back * lanes) % cells].view(len(ids), window.outer, window.run_bytes)
            older = (back > since).nonzero()[:, 0]
            kept = _slices(window, pool.read(firsts[older]))
            found[older] = kept[torch.arange(len(older), device=ids.device), :, slice_number + since[older]]
            rows[:, :, slice_number] = found
        return rows.view(len(ids), -1)

    def _keep_differing(self, pool: ApartPool, slot: slice, standing: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep next observations apart that the following tick does not show."""
        lanes = (standing != rows).any(dim=1).nonzero()[:, 0]
        self._keep(pool, pool.apart, slot.start + lanes, standing[lanes])

    def _keep(self, pool: ApartPool, kept: torch.Tensor, cells: torch.Tensor, rows: torch.Tensor) -> None:
        taken, mask = int(pool.counts[0]), int(pool.counts[2])
        places = pool.queue[(self._torch.arange(len(cells), device=cells.device) + taken) & mask]
        pool.counts[0] += len(cells)
        pool.write(places.long(), rows)
        kept[cells] = places

    def _leave(self, pool: ApartPool, kept: torch.Tensor, slot: slice) -> None:
        places = kept[slot]
        places = places[places >= 0]
        kept[slot] = -1  # first, so that no place is given back twice
        given, mask = int(pool.counts[1]), int(pool.counts[2])
        pool.queue[(self._torch.arange(len(places), device=places.device) + given) & mask] = places
        pool.counts[1] += len(places)

    def read(self, ids: torch.Tensor, last_ids: torch.Tensor | None) -> RowsOnDevice:
        """See `DeviceLoops`."""
        rings, last = self._rings, ids if last_ids is None else last_ids
        cells = rings.slots * rings.lanes
        rows, next_obs = [], []
        for field in rings.fields:
            if field.window is not None and field.pool is not None:
                found = self._window_rows(field, field.window, field.pool, ids)
            else:
                found = field.rows[ids % cells]
            rows.append(self._seen(field, found))
            if field.pool is not None:
                next_obs.append(self._seen(field, self._next_rows(field, field.pool, last)))
        flags, ones = rings.flags[last % cells], self._torch.ones(len(ids), device=ids.device)
        return RowsOnDevice(ids, rows, next_obs, (flags & TERMINATED) != 0, (flags & TRUNCATED) != 0, ones)

    def _next_rows(self, field: DeviceField, pool: ApartPool, ids: torch.Tensor) -> torch.Tensor:
        lanes, window, following = self._rings.lanes, field.window, ids + self._rings.lanes
        if window is None:
            found = field.rows[following % len(field.rows)]
        else:
            newest = int(self._rings.counts[0])
            stands = following // lanes == newest
            found = self._window_rows(field, window, pool, self._torch.where(stands, ids, following))
            found[stands] = window.newest[_half(newest, lanes)][ids[stands] % lanes]
        places = pool.apart[ids % len(pool.apart)].long()
        kept = (places >= 0).nonzero()[:, 0]
        found[kept] = pool.read(places[kept])
        return found

    def read_at(self, count: int, ids: int, last_ids: int, owner: torch.Tensor) -> RowsOnDevice:
        """See `DeviceLoops`."""
        numbers = owner.view(self._torch.int64)
        first, last = ((at - owner.data_ptr()) // numbers.itemsize for at in (ids, last_ids))
        return self.read(numbers[first : first + count], numbers[last : last + count] if last_ids else None)

    def draw(self, count: int, seed: int) -> RowsOnDevice:
        """See `DeviceLoops`."""
        return self.read(self.draw_ids(count, seed), None)

    def draw_ids(self, count: int, seed: int) -> torch.Tensor:
        """See `DeviceLoops`."""
        rings, generator = self._rings, np.random.default_rng(seed)
        end, first = (int(tick) * rings.lanes for tick in rings.counts[:2])
        ids = self._torch.from_numpy(generator.integers(first, end, count)).to(rings.flags.device)
        while len(missed := (rings.flags[ids % len(rings.flags)] & INVALID).nonzero()[:, 0]):
            ids[missed] = self._torch.from_numpy(generator.integers(first, end, len(missed))).to(ids.device)
        drawn: torch.Tensor = ids
        return drawn

    def keep(self, batches: int) -> None:
        """See `DeviceLoops`; torch keeps what it allocated."""

    def _slot(self, tick: int, slots: int = 0) -> slice:
        first = tick % (slots or self._rings.slots) * self._rings.lanes
        return slice(first, first + self._rings.lanes)

    def _seen(self, field: DeviceField, rows: torch.Tensor) -> torch.Tensor:
        return typed_rows(rows, field.kind, (len(rows), *field.shape))


def _half(number: int, lanes: int) -> slice:
    """Where the observations that a tick should begin with stand."""
    return slice(number % 2 * lanes, (number % 2 + 1) * lanes)


def _slices(window: DeviceWindow, rows: torch.Tensor) -> torch.Tensor:
    """See rows as slices: (rows, outer, count, run bytes)."""
    return rows.view(len(rows), window.outer, window.slices, window.run_bytes)


def _cut(tick: TickOnDevice, k: int, lanes: int) -> TickOnDevice:
    """Return one of several ticks."""
    part = slice(k * lanes, (k + 1) * lanes)
    valid = None if tick.valid is None else tick.valid[part]
    rows, next_obs = ([tensor[part] for tensor in some] for some in (tick.rows, tick.next_obs))
    return TickOnDevice(rows, next_obs, tick.terminated[part], tick.truncated[part], valid)


def _bytes_of(byte: torch.dtype, value: torch.Tensor, lanes: int) -> torch.Tensor:
    return value.contiguous().view(lanes, -1).view(byte) if value.numel() else value.new_empty((lanes, 0), dtype=byte)

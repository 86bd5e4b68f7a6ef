"""Rings on a device, as checkpoints see them: columns that are read on the host, and rows that come back from there.

In:  rows that were saved, oldest first.  Out: arrays of the host, by column.
Invariant: rows that come back are laid out as if they were added here. How observations are cut is not saved: the first
rows that come back show it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device_fields import (
    FLAG,
    LOOKED_AT,
    DeviceColumn,
    DeviceRing,
    Pairs,
    WindowColumn,
    Windows,
    require_room,
    windows_in,
)
from holdall.delivery.device_loops import TERMINATED, TRUNCATED, DeviceLoops, RowsOnDevice
from holdall.errors import ArgumentError
from holdall.schema import Array, Leaf, Schema
from holdall.storage import Apart, put_rows, rows_of

if TYPE_CHECKING:
    import torch


class CheckpointedRings:
    """The part of `DeviceRings` that allocates observations, and exchanges rows with the host."""

    torch: Any
    device: torch.device
    schema: Schema
    lanes: int
    ring_ticks: int
    small: dict[int, DeviceRing]
    action: list[DeviceRing]
    extras: list[DeviceRing]
    reward: DeviceColumn | WindowColumn | None
    invalid: DeviceColumn | None
    _limit: int | None
    _flags: torch.Tensor
    _counts: torch.Tensor
    _seen_free: NDArray[np.int64]
    _loops: DeviceLoops

    def __init__(self) -> None:
        self._thawed: tuple[int, int, dict[int, Array]] = (0, 0, {})  # first tick, next tick, its observations
        self._awaited: list[tuple[int, Mapping[str, Array], Any]] = []  # rows that say too little about windows

    def gather(self, ids: torch.Tensor, last_ids: torch.Tensor | None = None) -> RowsOnDevice:
        """Read rows that are held, under ids on the device."""
        return self._loops.read(ids, last_ids)

    def to_device(self, ids: NDArray[np.int64]) -> torch.Tensor:
        """Bring ids to the device."""
        tensor: torch.Tensor = self.torch.from_numpy(np.array(ids).reshape(-1)).to(self.device)
        return tensor

    def _attach(self) -> None:
        """Show the loops where everything is, and how many places are free."""
        raise NotImplementedError

    def _rest(self) -> None:
        """Wait until the device has done everything."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    @property
    def _next_tick(self) -> int:
        raise NotImplementedError

    def _first_held(self) -> int:
        raise NotImplementedError

    def lay_out(self, windows: Windows) -> None:
        """Allocate the rings of observations; nothing was written yet."""
        require = partial(require_room, self.torch, self.device, self.schema, self.ring_ticks - 1, self._limit, windows)
        require()
        try:
            for i, leaf in enumerate(self.schema.observation.leaves):
                self.small[i] = self._ring(leaf, is_pooled=True, window=windows.get(i), read=partial(self._observed, i))
        except self.torch.OutOfMemoryError:
            self.small.clear()
            require(fits=False)

    def _ring(self, leaf: Leaf, *, is_pooled: bool = False, **cut: Any) -> DeviceRing:
        return DeviceRing(self.torch, self.device, leaf, self.lanes, self.ring_ticks, is_pooled=is_pooled, **cut)

    def _observed(self, i: int, first: int, end: int) -> Array:
        """Copy the observations of some ticks to the host."""
        found = self.gather(self.to_device(np.arange(first * self.lanes, end * self.lanes))).rows[i]
        array: Array = found.cpu().numpy().reshape(end - first, self.lanes, *found.shape[1:])
        return array

    def _grow(self, ring: DeviceRing, places: int) -> None:
        """See that a pool has so many places free. The device is at rest."""
        try:
            while ring.pool is not None and len(ring.pool.free()) < places:
                ring.pool.grow()
        except self.torch.OutOfMemoryError as error:
            raise ArgumentError(
                f"store_device ({self.device}) has no room for more observations {ring.leaf.name!r} that no other step "
                f"shows ({error}); nothing was added. Save the memory, and load it with a lower capacity"
            ) from error

    def _flag_column(self, bit: int) -> DeviceColumn:
        return DeviceColumn(self.torch, self._flags.view(self.ring_ticks, self.lanes), FLAG.dtype, bit)

    def columns(self) -> dict[str, Any]:
        """Return all rings by name."""
        columns: dict[str, Any] = {f"action.{i}": ring.column for i, ring in enumerate(self.action)}
        columns |= {f"extras.{i}": ring.column for i, ring in enumerate(self.extras)}
        if self.reward is not None:
            columns["reward.0"] = self.reward
        columns["terminated.0"], columns["truncated.0"] = self._flag_column(TERMINATED), self._flag_column(TRUNCATED)
        if self.invalid is not None:
            columns["invalid.0"] = self.invalid
        for i, leaf in enumerate(self.schema.observation.leaves):
            known, read = self.small.get(i), partial(self._observed, i)
            columns[f"obs.{i}"] = (
                WindowColumn(leaf, self.lanes, self.ring_ticks, read) if known is None else known.column
            )
        return columns

    def apart(self) -> dict[str, Apart]:
        """Return the next observations that are kept apart now, by column."""
        first, end = self._first_held(), self._next_tick
        ids = self.torch.arange(first * self.lanes, end * self.lanes, device=self.device)
        kept = {}
        for i, ring in self.small.items():
            if ring.pool is not None:
                some = ids[ring.pool.apart[ids % ring.pool.cells] >= 0]
                rows = self.gather(some).next_obs[i].cpu().numpy() if len(some) else np.empty((0, *ring.leaf.shape))
                kept[f"obs.{i}"] = Apart(some.cpu().numpy(), rows.astype(ring.leaf.dtype, copy=False), 0, len(some))
        return kept

    def thaw(
        self, next_tick: int, first_tick: int, newest: dict[int, Array], paired: Collection[int], scouts: dict[str, Any]
    ) -> None:
        """Begin to take over rows that were frozen elsewhere; they follow with `put`, oldest first."""
        del paired, scouts  # next observations with rows of their own are compared as they come
        self._counts.copy_(self.torch.tensor([next_tick, first_tick, 0]))
        self._thawed = (first_tick, next_tick, newest)
        if first_tick == next_tick and not self.small:
            self.lay_out({})

    def put(
        self, first: int, columns: Mapping[str, Array], apart: Mapping[str, tuple[NDArray[np.int64], Array]]
    ) -> None:
        """Take over rows of ticks from `first` on, in order."""
        self._awaited.append((first, columns, apart))
        if not self.small:
            pairs = self._saved_pairs()
            if pairs is None:
                return
            self.lay_out(windows_in(self.schema, pairs))
            self._attach()
        while self._awaited:
            self._put(*self._awaited.pop(0))
        self._attach()

    def _saved_pairs(self) -> Pairs | None:
        """Return what shows observations that were saved, and those that follow on them; None if more must come."""
        _, next_tick, newest = self._thawed
        first, (last, columns, _) = self._awaited[0][0], self._awaited[-1]
        end = last + len(columns["terminated.0"])
        some = -(-LOOKED_AT // self.lanes)

        def pairs(i: int) -> tuple[Array, Array]:
            found = [saved[f"obs.{i}"][: some + 1] for _, saved, _ in self._awaited]
            rows = np.concatenate([*found, newest[i][None]] if i in newest and end == next_tick else found)
            before, after = (side[:some].reshape(-1, *rows.shape[2:]) for side in (rows[:-1], rows[1:]))
            return before, after

        return pairs if end - first > 1 or end == next_tick else None

    def _put(self, first: int, columns: Mapping[str, Array], apart: Mapping[str, Any]) -> None:
        for name, column in self.columns().items():
            if name in columns and not isinstance(column, WindowColumn):
                put_rows(column, first, columns[name])
        for i, ring in self.small.items():
            if ring.window is not None:
                self._restore(i, ring, first, columns[f"obs.{i}"])
            ids, rows = apart.get(f"obs.{i}", (np.empty(0, np.int64), np.empty((0, *ring.leaf.shape), ring.leaf.dtype)))
            if f"next.{i}" in columns:
                ids, rows = self._unshared(first, i, columns[f"obs.{i}"], columns[f"next.{i}"])
            if len(ids) and ring.pool is not None:
                flat = self.torch.from_numpy(np.array(rows).reshape(len(ids), -1).view(np.uint8))
                ring.pool.put(self.to_device(ids) % ring.pool.cells, flat.to(self.device))
            _, next_tick, newest = self._thawed
            if i in newest:
                ring.put_newest(next_tick, newest[i])

    def _restore(self, i: int, ring: DeviceRing, first: int, obs: Array) -> None:
        """Write observations that are cut; as many ticks at once as places are free for."""
        flat, done = np.ascontiguousarray(obs).reshape(len(obs) * self.lanes, -1).view(np.uint8), 0
        while done < len(obs):
            self._rest()
            self._grow(ring, self.lanes)
            self._attach()
            ticks = min(len(obs) - done, int(self._seen_free[1 + i]) // self.lanes)
            some = self.torch.from_numpy(flat[done * self.lanes : (done + ticks) * self.lanes].copy()).to(self.device)
            has_previous = first + done > self._thawed[0]
            self._loops.restore(first + done, {i: some}, ticks, has_previous=has_previous)
            done += ticks

    def _unshared(self, first: int, i: int, obs: Array, following: Array) -> tuple[NDArray[np.int64], Array]:
        """Return the next observations that the following rows do not show; the newest tick's stand behind it."""
        ticks = len(obs)
        flat = following.reshape(ticks, self.lanes, -1).view(np.uint8)
        differs = np.ones((ticks, self.lanes), np.bool_)
        differs[:-1] = (flat[:-1] != obs.reshape(ticks, self.lanes, -1).view(np.uint8)[1:]).any(axis=2)
        if first + ticks == self._next_tick:
            self.small[i].put_newest(self._next_tick, following[-1])
            differs[-1] = False
        where = np.flatnonzero(differs)
        return first * self.lanes + where, following.reshape(ticks * self.lanes, *following.shape[2:])[where]

    def copy(self, first: int, end: int) -> dict[str, Array]:
        """Copy the rows of ticks [first, end) to the host, next observations too."""
        columns = {name: rows_of(ring, first, end) for name, ring in self.columns().items()}
        found = self.gather(self.to_device(np.arange(first * self.lanes, end * self.lanes)))
        for i in self.small:
            columns[f"next.{i}"] = found.next_obs[i].cpu().numpy().reshape(columns[f"obs.{i}"].shape)
        return columns

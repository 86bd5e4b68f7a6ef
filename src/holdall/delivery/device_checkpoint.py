"""Rings on a device, as checkpoints see them: columns that are read on the host, and rows that come back from there.

In:  rows that were saved, oldest first.  Out: arrays of the host, by column.
Invariant: rows that come back are laid out as if they were added here. How observations are cut is not saved: the first
rows that come back show it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.delivery.device_fields import LOOKED_AT, DeviceRing, Pairs, WindowColumn, windows_in
from holdall.delivery.device_rings import DeviceRings
from holdall.schema import Array
from holdall.storage import Apart, put_rows, rows_of


class SavedRings(DeviceRings):
    """The rings of a store, which exchanges rows with the host."""

    def __init__(self, *arguments: Any) -> None:
        self._thawed: tuple[int, int, dict[int, Array]] = (0, 0, {})  # first tick, next tick, its observations
        self._awaited: list[tuple[int, Mapping[str, Array], Any]] = []  # rows that say too little about windows
        super().__init__(*arguments)

    def apart(self) -> dict[str, Apart]:
        """Return the next observations that are kept apart now, by column."""
        first, end = self._first_held(), self._next_tick
        ids = self.torch.arange(first * self.lanes, end * self.lanes, device=self.device)
        kept = {}
        for i, ring in self.small.items():
            if ring.pool is not None:
                some = ids[ring.pool.apart[ids % ring.pool.cells] >= 0]
                rows = (
                    self.loops.read(some, None).next_obs[i].cpu().numpy()
                    if len(some)
                    else np.empty((0, *ring.leaf.shape))
                )
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
            self.loops.restore(first + done, {i: some}, ticks, has_previous=has_previous)
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
        found = self.loops.read(self.to_device(np.arange(first * self.lanes, end * self.lanes)), None)
        for i in self.small:
            columns[f"next.{i}"] = found.next_obs[i].cpu().numpy().reshape(columns[f"obs.{i}"].shape)
        return columns

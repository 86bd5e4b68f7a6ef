"""What all calls of a memory stand on: its store and the lock, the short ways in and out, and where batches are made.

The first tensors that are added to a memory with a `store_device` say that everything lives on their device. From then
on the store's rings are there, and batches are made of them, see `delivery.resident`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.background import left
from holdall.batch import Batch, Draw
from holdall.checkpoint import Restored, RowsKey, SavedMemory, Snapshot
from holdall.delivery import (
    Batches,
    BatchJob,
    Delivery,
    ObservationAssembler,
    ResidentBatches,
    SlotDraw,
    TensorFit,
    batches_for,
    is_on_device,
    rings_on,
)
from holdall.errors import ArgumentError, ClosedError, HoldallError
from holdall.sampling import Held, Sampler
from holdall.schema import Array, Leaf, as_ids, ids_of_any_shape, on_host, require_held
from holdall.storage import Budget, Kernels, Rows, StepsLeft, Store, StoreContent, Tick, last_rows


class BaseMemory(SavedMemory):
    """The part of `ReplayMemory` that has the store, and knows devices."""

    _store: Store | None
    _kernels: Kernels
    _budget: Budget
    _tensor_fit: TensorFit | None = None  # of a memory that lives on its device
    _resident: ResidentBatches | None = None  # the same one's batches
    add_at_once: Callable[..., int]  # adds a tick in one step, see `FastTick.add`; for adapters
    draw_at_once: Callable[..., Any]  # draws a batch in one step, see `BatchReader`; for adapters

    def _open(self) -> Store:
        if self._store is None:
            raise ClosedError("the memory was closed; make a new ReplayMemory")
        return self._store

    def _whole(self) -> Store:
        store = self._open()
        if store.repair.is_pending[0]:
            store.repair.run()
        return store

    def _held(self, store: Store) -> Held:
        first, end = store.first_tick * self.num_envs, store.next_tick * self.num_envs
        return Held(first, end, self.num_envs, self.capacity, store)

    def _locked(self) -> Any:
        if self._lock._is_owned():
            self._leave_interrupted()
        return self._lock

    def _leave_interrupted(self) -> None:
        """Release the lock for a call of this thread that was interrupted where it was about to do so.

        Refuse to go on if the call is still under way: a signal handler, or a sampler, called the memory from inside.
        """
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_locals.get("self") is self:
            frame = frame.f_back
        while frame is not None:
            if frame.f_locals.get("self") is self:
                raise HoldallError(
                    "the memory was called from inside one of its own calls; let signal handlers and samplers do "
                    "without it, and call it when they have returned"
                )
            frame = frame.f_back
        left(self._lock)

    @property
    def first_id(self) -> int:
        """Lowest transition id that is still held."""
        return self._open().first_tick * self.num_envs

    @property
    def next_id(self) -> int:
        """Id of the first transition of the next `add`."""
        return self._open().next_tick * self.num_envs

    def drain(self) -> None:
        """Wait until no block waits to be compressed or spilled; for measurements and tests."""
        with self._locked():
            sealer = self._whole().sealer
        if sealer is not None:
            sealer.drain()

    @functools.cached_property
    def _delivery(self) -> Delivery:
        return Delivery.of(self._settings["device"], self._settings["store_device"], self.schema.leaves)

    @functools.cached_property
    def _assembler(self) -> ObservationAssembler:
        return ObservationAssembler(self._kernels, self._budget.staging_bytes // 2, self._budget.threads)

    @functools.cached_property
    def _batches(self) -> Batches:
        return self._resident or self._batches_to(
            self._delivery, store_on_device=self._settings["store_device"] is not None
        )

    @functools.cached_property
    def _elsewhere(self) -> dict[str, Batches]:
        return {}

    def _batches_on(self, device: str) -> Batches:
        """Return what makes batches for another device than the memory's own."""
        if device not in self._elsewhere:
            self._elsewhere[device] = self._batches_to(Delivery(device, self.schema.leaves))
        return self._elsewhere[device]

    def _batches_to(self, delivery: Delivery, *, store_on_device: bool = False) -> Batches:
        pins = self._budget.limit is None
        return batches_for(self.schema, self._kernels, self._assembler, delivery, store_on_device, pins)

    def _close_batches(self) -> None:
        """End the threads that make batches, and release what is pinned."""
        for batches in vars(self).pop("_elsewhere", {}).values():
            batches.close()
        for made in {"_batches", "_assembler"} & vars(self).keys():
            getattr(self, made).close()

    def add_as_is(self, *arguments: Any) -> int:
        """Add a tick the short way, if it has one; return how many were added in all, or 0 if not; for adapters.

        Args:
            arguments: Those of `add_at_once`, which was tried before.
        """
        store = self._store
        packed = None if store is None else store.fast_tick.pack(*arguments)
        if store is None or not packed:
            return 0
        with self._locked():
            if self._store is not store or not store.fast_tick.is_open:
                return 0
            ticks = store.write_fast(packed, arguments[0], arguments[3])
        store.wait_for_room()
        return max(ticks, 0)

    def draw_on(self, device: str, count: int, rows: SlotDraw, *, ahead: bool) -> BatchJob | None:
        """Draw rows and begin a batch of them on a device in one step, if there is such a way; for adapters."""
        with self._locked():
            store = self._whole()
            return self._batches_on(device).draw_slots(rows, count, store, ahead=ahead)

    def follow(self, draw: Draw, device: str | None = None) -> Batch:
        """Return the batch that a recipe describes, on the memory's device or another; for adapters."""
        return self.begin(draw, device, ahead=False).receive()

    def begin(self, draw: Draw, device: str | None = None, *, ahead: bool = True) -> BatchJob:
        """Begin such a batch, before it is wanted if `ahead`; for adapters."""
        with self._locked():
            store = self._whole()
            if type(draw) is not Draw or not store.all_valid:
                self._held(store).require_drawn(draw)
            batches = self._batches if device is None else self._batches_on(device)
            drawn = batches.look_up(draw, store, ahead=ahead)
        (job := batches.start(draw, drawn)).work()
        return job

    def rows(self, ids: NDArray[np.int64]) -> Rows:
        """Return copies of all fields of held and valid `ids`, as arrays; for adapters."""
        with self._locked():
            store = self._whole()
            rows = store.read(ids, self._assembler.staging.take)
            store.offer_batches(len(ids))
        return self._assembler.complete(rows, self.schema.observation.leaves)

    @property
    def _staged_bytes(self) -> int:
        return self._assembler.staging.nbytes + self._batches.pinned_bytes + self._open().batch_reader.nbytes

    def _fit(self, leading: tuple[int, ...], *arguments: Any) -> Tick:
        """Check every argument; nothing is written if one does not fit."""
        reward_dtype = self._open().reward_dtype
        if self._settings["store_device"] is not None and self._is_born_on_device(arguments[0]):
            return self._fit_tensors(leading, reward_dtype, arguments)
        tick = Tick.fitted(self.schema, leading, reward_dtype, *arguments)
        if reward_dtype is None and (self._settings["device"] or self._settings["store_device"]):
            self._delivery.require(self.schema.reward_leaf(tick.reward.dtype, "reward"))
        return tick

    def _write_steps(self, left: StepsLeft, *, waits: bool = True) -> None:
        """Write all steps, and let others in when blocks pile up; the first interrupt waits for the last step."""
        try:
            while left:
                with self._locked():
                    store = self._whole()
                    left.write(store)
                store.wait_for_room()
        except BaseException:
            if waits:
                self._write_steps(left, waits=False)
            raise

    def _is_born_on_device(self, obs: Any) -> bool:
        """Whether observations are on the store's device, or the memory lives there anyway."""
        return self._tensor_fit is not None or is_on_device(self._delivery, obs)

    def _fit_tensors(self, leading: tuple[int, ...], reward_dtype: Any, arguments: tuple[Any, ...]) -> Tick:
        """Check tensors on the store's device; the first of them say that everything lives there."""
        fit = self._tensor_fit or TensorFit(self._delivery, self.schema)
        tick = fit.tick(leading, reward_dtype, *arguments)
        if self._tensor_fit is None:
            if self._open().next_tick:
                raise ArgumentError(
                    f"obs is on {fit.device}, but the memory was begun with arrays of the host; go on with these, or "
                    "make a new memory"
                )
            self._move_to_device(fit, tick)
        return tick

    def update(self, ids: Any, /, **columns: Any) -> None:
        """Rewrite extras of transitions that are held: recurrent states, latents, values that were computed again.

        Batches that were handed out, or drawn ahead by a loader, keep what they were given.

        Args:
            ids: Of transitions; of sequences, `batch.ids[batch.mask]`. If one comes twice, its last row counts.
            columns: New rows by the name of their extra, one per id, of the extra's own shape and dtype.
        """
        self._open()
        fit, wanted = self._tensor_fit, as_ids(on_host(ids))
        if not columns:
            raise ArgumentError("update was given no rows; name an extra: update(ids, hidden=...)")
        rows = self.schema.extras.flatten_some(columns, wanted.shape, _fit_rows if fit is None else fit.rows)
        wanted, copies = last_rows(wanted, {f"extras.{leaf}": new for leaf, new in rows.items()})
        with self._locked():
            store, lanes = self._whole(), self.num_envs
            require_held(wanted, store.first_tick * lanes, store.next_tick * lanes, store)
            store.rewrite(wanted, copies)
            if "_batches" in vars(self):
                self._batches.rewritten(wanted)

    def extra(self, name: str, ids: Any) -> Array:
        """Return one extra of `ids`, of any shape; nothing else is read. For adapters."""
        with self._locked():
            store, wanted, lanes = self._whole(), ids_of_any_shape(ids), self.num_envs
            require_held(wanted, store.first_tick * lanes, store.next_tick * lanes, store)
            return store.extra((self.schema.extras.keys or ()).index(name), wanted)

    def _move_to_device(self, fit: TensorFit, steps: Tick | None) -> None:
        """Let everything live on the store's device; nothing was added yet."""
        ticks = self.capacity // self.num_envs
        rings: Any = rings_on(fit, self.schema, ticks, self._budget.limit, steps)
        budget = replace(self._budget, limit=None)  # the limit was one of the device
        store = Store(self.schema, ticks, self._kernels, self._lock, budget, None, large=(), rings=rings)
        before, batches = self._open(), ResidentBatches(self.schema, rings, self.capacity)
        # In one step, since an interrupt may come between any two; `_batches` were those of the host.
        here = {"_store": store, "add_at_once": store.fast_tick.add, "draw_at_once": store.batch_reader.draw}
        vars(self).update(here, _tensor_fit=fit, _resident=batches, _batches=batches)
        before.close()

    def _choose_home(self, content: StoreContent | None) -> None:
        """Move to the store's device what was saved, if nothing of it is compressed."""
        if self._settings["store_device"] is not None and content is not None and not content.large:
            self._move_to_device(TensorFit(self._delivery, self.schema), None)

    def _take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Become what was saved."""
        self._choose_home(found.content)
        super()._take_over(found, sampler)

    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        if self._resident is not None:
            with self._locked():
                self._resident.bring_back()
        return super()._snapshot(saved, attach)


def _fit_rows(leaf: Leaf, value: Any, leading: tuple[int, ...], argument: str) -> Array:
    return leaf.fit(on_host(value), leading, argument, "one row per id")

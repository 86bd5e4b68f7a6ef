"""A memory whose data is born on a device: when it moves there, and how it is saved from there.

The first tensors that are added to a memory with a `store_device` say that everything lives on their device. From then
on the store's rings are there, and batches are made of them, see `delivery.resident`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdall.checkpoint import Restored, RowsKey, SavedMemory, Snapshot
from holdall.delivery import Delivery, ResidentBatches, TensorFit, is_on_device, rings_on
from holdall.errors import ArgumentError
from holdall.sampling import Sampler
from holdall.storage import Budget, Kernels, Store, StoreContent, Tick


class MemoryOnDevice(SavedMemory):
    """The part of `ReplayMemory` that knows tensors."""

    _store: Store | None
    _kernels: Kernels
    _budget: Budget
    _delivery: Delivery
    _tensor_fit: TensorFit | None = None  # of a memory that lives on its device
    _resident: ResidentBatches | None = None  # the same one's batches

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
            self._move_to_device(fit)
        return tick

    def _move_to_device(self, fit: TensorFit) -> None:
        """Let everything live on the store's device; nothing was added yet."""
        ticks = self.capacity // self.num_envs
        rings: Any = rings_on(fit, self.schema, ticks, self._budget.limit)
        budget = replace(self._budget, limit=None)  # the limit was one of the device
        store = Store(self.schema, ticks, self._kernels, self._lock, budget, None, large=(), rings=rings)
        before = self._open()
        self._resident, self._tensor_fit = ResidentBatches(self.schema, rings, self.capacity), fit
        vars(self).pop("_batches", None)  # those of the host
        self._store = store
        before.close()

    def _choose_home(self, content: StoreContent | None) -> None:
        """Move to the store's device what was saved, if nothing of it is compressed."""
        if self._settings["store_device"] is not None and content is not None and not content.large:
            self._move_to_device(TensorFit(self._delivery, self.schema))

    def _take_over(self, found: Restored, sampler: Sampler | None) -> None:
        """Become what was saved."""
        self._choose_home(found.content)
        super()._take_over(found, sampler)

    def _snapshot(self, saved: Mapping[int, RowsKey], attach: Mapping[str, Path | bytes]) -> Snapshot:
        if self._resident is not None:
            with self._locked():
                self._resident.bring_back()
        return super()._snapshot(saved, attach)

"""Batches of a memory whose store is on a torch device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from holdall.batch import Batch, Draw
from holdall.checks import require_count
from holdall.delivery.batch_source import BatchSource
from holdall.delivery.loader import Loader, return_unchanged
from holdall.device.store import DeviceStore
from holdall.sampling import Held, Sampler
from holdall.store.missing import MissingStore


class DeviceBatchSource(BatchSource):
    """Batches that are made on the device of a store. Samplers without a version for devices draw on the host.

    A loader only starts the operations of the device, and does not wait for them.
    """

    def __init__(self, store: DeviceStore, sampler: Sampler, generator: np.random.Generator) -> None:
        super().__init__(sampler, generator)
        self._store: DeviceStore | MissingStore = store

    def sample(self, count: int) -> Batch:
        """See `BatchSource`. One transition is enough, because counting transitions may wait for the device."""
        with self.lock:
            return self._store.sample(self.sampler, count, self.generator)

    def draw(self, count: int) -> Draw:
        """See `BatchSource`. Waits for the device."""
        count = require_count("batch_size", count, 1)
        with self.lock:
            return self._store.draw(self.sampler, count, self.generator)

    def deliver(self, draw: Draw, device: str | None = None) -> Batch:
        """See `BatchSource`."""
        del device
        store = self._store
        held = Held(store.first_id, store.next_id, store.lanes, store.capacity, store)
        return store.deliver(held.check_draw(draw))

    def load(self, count: int, prefetch: int, device: str | None = None) -> Loader:
        """See `BatchSource`."""
        del device
        return Loader(lambda: partial(return_unchanged, self.sample(count)), return_unchanged, prefetch)

    def load_draws(self, draw: Callable[[], Draw], prefetch: int, device: str | None = None) -> Loader:
        """See `BatchSource`."""
        del device
        return Loader(lambda: partial(return_unchanged, self.deliver(draw())), return_unchanged, prefetch)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """See `BatchSource`."""
        with self.lock:
            self._store.update_priorities(self.sampler, ids, priorities)

    def bring_back_priorities(self) -> None:
        """See `BatchSource`. Waits for the device."""
        self._store.bring_back_priorities(self.sampler)

    def close(self) -> None:
        """See `BatchSource`."""
        self._store = MissingStore()

    def close_in_child(self, reason: str) -> None:
        """See `BatchSource`."""
        self._store = MissingStore(reason)
        self.lock = threading.RLock()

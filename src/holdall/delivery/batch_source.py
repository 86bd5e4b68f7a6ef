"""BatchSource: draws ids with a memory's sampler, and makes batches of their rows.

    HostBatchSource      for a store on the host
    DeviceBatchSource    for a store on a torch device, in holdall.device.batch_source

A memory makes every batch with its batch source. Adapters use `memory.batch_source` to draw ids without reading rows,
or to make the batch of a draw that they composed.
"""

from __future__ import annotations

import math
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from holdall.batch import Batch, Draw
from holdall.checks import require_count
from holdall.delivery import new_delivery
from holdall.delivery.delivery import Delivery
from holdall.delivery.loader import Loader, Prepare, return_unchanged
from holdall.errors import ArgumentError
from holdall.reset_check import (
    FIRST_CHECK_TICK,
    RecentTransitions,
    find_added_resets,
    next_check_tick,
    recent_ids,
    warn_of_resets,
)
from holdall.sampling import Held, Sampler, draw_from, draws_once, require_enough, set_priorities
from holdall.schema import Schema
from holdall.store.missing import MissingStore
from holdall.store.store import Store
from holdall.store.view import View

_CALLER_OF_SAMPLE = 5
"""Stack level of the code that called `ReplayMemory.sample`, for warnings of `warn_of_resets`."""


class BatchSource(ABC):
    """The sampler and the generator of one memory, and the batches that are made with them.

    All methods may be called from any thread.

    Attributes:
        sampler: The memory's sampler.
        generator: The source of all random numbers.
        lock: Guards the sampler and the generator. A checkpoint is taken while it is held.
    """

    def __init__(self, sampler: Sampler, generator: np.random.Generator) -> None:
        self.sampler = sampler
        self.generator = generator
        self.lock = threading.RLock()
        self._draws_once = draws_once(sampler)

    def replace_sampler(self, sampler: Sampler) -> None:
        """Draw with another sampler from now on."""
        self.sampler = sampler
        self._draws_once = draws_once(sampler)

    @abstractmethod
    def sample(self, count: int) -> Batch:
        """Draw `count` rows, and return their batch. Raise ArgumentError if fewer transitions are held."""

    @abstractmethod
    def draw(self, count: int) -> Draw:
        """Draw `count` rows without reading them. Rows may repeat, so one transition is enough."""

    @abstractmethod
    def deliver(self, draw: Draw, device: str | None = None) -> Batch:
        """Return the batch of a draw. Raise TransitionIdError if a row is not held.

        `device` replaces the device of the memory's batches. A memory that is stored on a device ignores it.
        """

    @abstractmethod
    def load(self, count: int, prefetch: int, device: str | None = None) -> Loader:
        """Return an endless iterator over batches of `count` rows. `prefetch` of them are made ahead."""

    @abstractmethod
    def load_draws(self, draw: Callable[[], Draw], prefetch: int, device: str | None = None) -> Loader:
        """Return an endless iterator over batches. The function `draw` makes the draw of each batch."""

    @abstractmethod
    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """Set priorities. Raise ArgumentError if the sampler does not use priorities."""

    def bring_back_priorities(self) -> None:  # noqa: B027  Only a store on a device has priorities there.
        """Copy priorities from a device to the sampler. Call this before the sampler is saved or copied."""

    def wait_until_read(self) -> None:  # noqa: B027  Most sources read rows when they draw them.
        """Wait until loaders have read the rows that they drew. Call this before rows are rewritten."""

    @abstractmethod
    def close(self) -> None:
        """Make every further call raise ClosedError. Batches that were returned stay valid."""

    @abstractmethod
    def close_in_child(self, reason: str) -> None:
        """Close the source in a forked child, without locks that a thread of the parent may hold."""


class HostBatchSource(BatchSource):
    """Batches of a store on the host.

    Args:
        store: The store of the memory.
        schema: Spaces of all fields.
        capacity: Maximum number of transitions over all lanes.
        device: Device of the batches, as for `ReplayMemory`.
        delivery: Delivery to this device.
        sampler: The memory's sampler.
        generator: The source of all random numbers.
    """

    def __init__(
        self,
        store: Store,
        schema: Schema,
        capacity: int,
        device: str | None,
        delivery: Delivery,
        sampler: Sampler,
        generator: np.random.Generator,
    ) -> None:
        super().__init__(sampler, generator)
        self._store: Store | MissingStore = store
        self._schema = schema
        self._lanes = schema.num_envs
        self._capacity = capacity
        self._delivery = delivery
        self._deliveries: dict[str | None, Delivery] = {None: delivery, device: delivery}
        self._loaders: weakref.WeakSet[Loader] = weakref.WeakSet()
        # The `next_id` at which `sample` looks for resets that were added as transitions.
        self._next_reset_check: float = FIRST_CHECK_TICK * self._lanes

    def sample(self, count: int) -> Batch:
        """See `BatchSource`. Warn once if resets of the environment were added as transitions."""
        with self.lock:
            view = self._store.view()
            if view.next_id >= self._next_reset_check:
                self._check_for_resets(view)
            draw = self._draw(view, count, count)
        return self._delivery.deliver(draw, view)

    def draw(self, count: int) -> Draw:
        """See `BatchSource`."""
        count = require_count("batch_size", count, 1)
        with self.lock:
            return self._draw(self._store.view(), count, 1)

    def deliver(self, draw: Draw, device: str | None = None) -> Batch:
        """See `BatchSource`."""
        view = self._store.view()
        checked = self._describe_held(view).check_draw(draw)
        return self._find_delivery(device).deliver(checked, view)

    def load(self, count: int, prefetch: int, device: str | None = None) -> Loader:
        """See `BatchSource`."""
        delivery = self._find_delivery(device)

        def draw_batch() -> Prepare:
            with self.lock:
                view = self._store.view()
                drawn = self._draw(view, count, count)
            return partial(delivery.prepare, drawn, view)

        return self._add_loader(draw_batch, delivery, prefetch)

    def load_draws(self, draw: Callable[[], Draw], prefetch: int, device: str | None = None) -> Loader:
        """See `BatchSource`.

        Batches with other goals are prepared by the thread that requests batches, because a framework's environments
        may compute their rewards, and the same thread steps these environments.
        """
        delivery = self._find_delivery(device)

        def draw_batch() -> Prepare:
            chosen = draw()
            view = self._store.view()
            drawn = self._describe_held(view).check_draw(chosen)
            if drawn.goals is not None:
                return partial(return_unchanged, delivery.prepare(drawn, view))
            return partial(delivery.prepare, drawn, view)

        return self._add_loader(draw_batch, delivery, prefetch)

    def update_priorities(self, ids: Any, priorities: Any) -> None:
        """See `BatchSource`."""
        with self.lock:
            set_priorities(self.sampler, self._describe_held(self._store.view()), ids, priorities)

    def wait_until_read(self) -> None:
        """See `BatchSource`."""
        for loader in list(self._loaders):
            loader.wait_until_read()

    def close(self) -> None:
        """See `BatchSource`."""
        self._store = MissingStore()
        for delivery in self._deliveries.values():
            delivery.close()

    def close_in_child(self, reason: str) -> None:
        """See `BatchSource`."""
        self._store = MissingStore(reason)
        self.lock = threading.RLock()

    def _draw(self, view: View, count: int, min_transitions: int) -> Draw:
        """Draw `count` rows if at least `min_transitions` are held. Called with the lock.

        If the draw fails or is interrupted, restore the state of the generator.
        """
        held = self._describe_held(view)
        if self._draws_once and view.all_valid:
            require_enough(count, view.next_id - view.first_id, min_transitions)
            return self.sampler.draw(held, count, self.generator)
        require_enough(count, len(view), min_transitions)
        bits = self.generator.bit_generator
        state = bits.state
        try:
            return draw_from(self.sampler, held, count, self.generator)
        except BaseException:
            bits.state = state
            raise

    def _describe_held(self, view: View) -> Held:
        return Held(view.first_id, view.next_id, self._lanes, self._capacity, view)

    def _find_delivery(self, device: Any) -> Delivery:
        """Return the delivery to `device`. None stands for the device of the memory's batches."""
        if device is not None and not isinstance(device, str):
            raise ArgumentError(f"device ({device!r}) must be a name, such as 'cuda', or None. Pass one.")
        delivery = self._deliveries.get(device)
        if delivery is None:
            delivery = new_delivery(self._schema, device)
            self._deliveries[device] = delivery
        return delivery

    def _add_loader(self, draw_batch: Callable[[], Prepare], delivery: Delivery, prefetch: int) -> Loader:
        loader = Loader(draw_batch, delivery.receive, prefetch, delivery.start)
        self._loaders.add(loader)
        return loader

    def _check_for_resets(self, view: View) -> None:
        """Warn once if resets of the environment were added as transitions."""
        self._next_reset_check = next_check_tick(view.next_id // self._lanes) * self._lanes
        if not view.all_valid:
            return
        ids = recent_ids(view.first_id, view.next_id, self._lanes)
        mode = find_added_resets(RecentTransitions(ids, view.outcomes, view.observation_pairs))
        if mode is not None:
            self._next_reset_check = math.inf
            warn_of_resets(mode, stacklevel=_CALLER_OF_SAMPLE)

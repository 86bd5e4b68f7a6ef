"""Batches for a GPU that are made before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdall import ReplayMemory
from holdall.batch import Batch, Draw
from holdall.delivery import Loader


class BatchesAhead:
    """Batches that a buffer has drawn, and that are being made on a device.

    The caller's thread makes all draws in order, so one seed gives one sequence of batches. Copies and pickles of this
    object are empty.
    """

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._memory: ReplayMemory | None = None  # Memory of the loader.
        self._settings: tuple[Any, ...] = ()  # Device, batch size and prefetch of the loader.

    def __reduce__(self) -> Any:
        return BatchesAhead, ()

    def take(
        self, memory: ReplayMemory, device: str, batch_size: int, prefetch: int, draw: Callable[[int], Draw]
    ) -> Batch:
        """Return the next batch of `draw(batch_size)`, and draw later batches until `prefetch` of them are made ahead.

        If an argument has changed, drop the batches that were made ahead first.
        """
        settings = (device, batch_size, prefetch)
        if self._loader is None or self._memory is not memory or self._settings != settings:
            if self._loader is not None:
                self._loader.close()
            self._loader = memory.batch_source.load_draws(lambda: draw(batch_size), prefetch, device)
            self._memory = memory
            self._settings = settings
        return next(self._loader)

"""Batches for JAX: made where JAX computes, if torch can fill memory there, and handed over by DLPack.

In:  what makes batches of arrays or tensors.  Out: the same batches as arrays of JAX.
"""

from __future__ import annotations

from holdall.batch import Batch, Draw
from holdall.delivery.batches import Batches, BatchJob, DrawnRows
from holdall.storage import Store


class JaxBatches(Batches):
    """Makes batches as another does, and hands them to JAX."""

    def __init__(self, inner: Batches) -> None:
        self._inner = inner

    def look_up(self, draw: Draw, store: Store) -> DrawnRows:
        """See `Batches`."""
        return self._inner.look_up(draw, store)

    def start(self, draw: Draw, drawn: DrawnRows) -> BatchJob:
        """See `Batches`."""
        return _JaxJob(self._inner.start(draw, drawn))

    def make(self, draw: Draw, drawn: DrawnRows) -> Batch:
        """See `Batches`."""
        return self._inner.make(draw, drawn).jax()

    def keep(self, batches: int) -> None:
        """See `Batches`."""
        self._inner.keep(batches)

    @property
    def pinned_bytes(self) -> int:
        """See `Batches`."""
        return self._inner.pinned_bytes

    def close(self) -> None:
        """See `Batches`."""
        self._inner.close()


class _JaxJob:
    """A batch that JAX gets."""

    def __init__(self, inner: BatchJob) -> None:
        self._inner = inner
        self.is_quick = inner.is_quick

    def work(self) -> None:
        """See `BatchJob`."""
        self._inner.work()

    def receive(self) -> Batch:
        """See `BatchJob`."""
        return self._inner.receive().jax()

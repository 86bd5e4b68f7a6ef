"""Batches ahead of time: several are drawn with one call to every shard, and put together in the background.

In:  a way to draw some batches.  Out: jobs for a loader, one a batch, in order.
Invariant: a batch is drawn by the consumer's own call, at most `prefetch` batches before it is handed out, and each for
itself: a call that brings the rows of several only spares what a call costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from holdall.batch import Batch
from holdall.errors import ShardError
from holdall.ray.drawing import Drawing, Request

Draw = Callable[[int], list[Request]]
"""Draws so many batches."""


def together(prefetch: int, shards: int) -> int:
    """Return how many batches are drawn at once, of `prefetch` that may be.

    With that many a shard's answer holds about half a batch. From one or two shards it does so anyway; of one shard
    batches are drawn exactly when a local memory draws them.
    """
    return max(1, min(prefetch, shards // 2))


class Ahead:
    """Starts one batch after another, and draws some at once when there is none left."""

    def __init__(self, drawing: Drawing, draw: Draw, batches: int) -> None:
        self._drawing = drawing
        self._draw = draw
        self._batches = batches
        self._drawn: deque[Request] = deque()

    def __call__(self) -> Job:
        """Start the next batch."""
        if not self._drawn:
            self._drawn.extend(self._draw(self._batches))
        return Job(self._drawing, self._drawn.popleft())


class Job:
    """A batch that was asked for and is put together in the background."""

    is_quick = False

    def __init__(self, drawing: Drawing, request: Request) -> None:
        self._drawing = drawing
        self._request = request
        self._batch: Batch | None = None

    def work(self) -> None:
        """Wait for the answers, and decode them."""
        self._batch = self._drawing.finish(self._request)

    def receive(self) -> Batch:
        """Return the batch."""
        if self._batch is None:
            self.work()
        batch, self._batch = self._batch, None
        if batch is None:
            raise ShardError("a batch was received before it was made; report this")
        return batch

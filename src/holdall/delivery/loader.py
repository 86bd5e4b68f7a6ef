"""Loader: an endless iterator over batches that are made ahead.

Batches are drawn by the consumer's calls of `next`, so they never depend on the speed of a thread. A background thread
then reads the rows. A batch is drawn `prefetch` batches before it is returned.

The background thread reads rows, and sends large batches while it reads. The consumer's thread does everything else,
because threads that compete for the GIL wait for each other longer than this work takes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

from holdall.batch import Batch
from holdall.errors import ClosedError

Prepare = Callable[[], Any]
"""Reads the rows of a batch that was drawn."""


def return_unchanged(value: Any) -> Any:
    """Return the argument. This is `Prepare` or `receive` for batches that need no further work."""
    return value


class Loader:
    """An endless iterator over batches. Also a context manager. Threads may share one: each batch goes to one of them.

    Args:
        draw: Draws a batch, and returns the function that reads its rows.
        receive: Makes the batch of the rows that this function returned.
        prefetch: Number of batches that are made ahead.
        start: Begins to send the rows to a device, see `Delivery.start`.
    """

    def __init__(
        self,
        draw: Callable[[], Prepare],
        receive: Callable[[Any], Batch],
        prefetch: int,
        start: Callable[[Any], None] | None = None,
    ) -> None:
        self._draw = draw
        self._receive = receive
        self._start = start
        self._prefetch = prefetch
        self._pending: deque[Future[Any]] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="holdall loader") if prefetch else None
        self._is_closed = False
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. If making it failed in the background, the error is raised here."""
        if self._process != os.getpid():
            raise ClosedError("The loader was made before this process was forked. Make a new one here.")
        with self._lock:
            if self._is_closed:
                raise ClosedError("The loader was closed. Make a new one.")
            if self._worker is None:
                return self._receive(self._draw()())
            while len(self._pending) <= self._prefetch:
                self._pending.append(self._worker.submit(self._draw()))
            # The batch is removed from the queue only when it is complete, so an interrupt loses no batch.
            self._pending[0].exception()
            self._start_complete()
            return self._receive(self._pending.popleft().result())

    def _start_complete(self) -> None:
        """Begin to send all batches whose rows were read. Later batches are sent while the consumer uses this one."""
        if self._start is None:
            return
        for future in self._pending:
            if future.done() and future.exception() is None:
                self._start(future.result())

    def wait_until_read(self) -> None:
        """Wait until the rows of all batches that were drawn are read. Call this before rows are rewritten."""
        wait(tuple(self._pending))

    @property
    def is_closed(self) -> bool:
        """Whether the loader returns no more batches."""
        return self._is_closed

    def close(self) -> None:
        """Stop the thread, and drop the batches that were made ahead. Batches that were returned stay valid."""
        self._is_closed = True
        if self._process != os.getpid():
            return
        with self._lock:
            for future in self._pending:
                future.cancel()
            if self._worker is not None:
                self._worker.shutdown(wait=True)
            self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

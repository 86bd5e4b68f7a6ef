"""A loader: batches ahead of time, in order.

In:  a way to start a batch.  Out: batches, for ever.
Invariant: what a batch holds depends on the calls of the consumer alone, never on how quick a thread is:
it is drawn and looked up by the consumer's own call, and only put together in the background: by a thread, or by the
device alone where there is nothing to do for the host.
A batch is drawn `prefetch` batches before it is handed out; with `prefetch=0` when it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from holdall.batch import Batch
from holdall.errors import ClosedError
from holdall.experience.delivery.build import Job


class Loader:
    """An endless iterator over batches; also a context manager.

    Args:
        start: Draws a batch, and looks up where its rows are.
        prefetch: Batches that are under way besides the one that is asked for.
        finish: Called when the loader is closed and nothing is under way any more.
    """

    def __init__(self, start: Callable[[], Job], prefetch: int, finish: Callable[[], None] | None = None) -> None:
        self._start = start
        self._finish = finish
        self._prefetch = prefetch
        self._under_way: deque[tuple[Job, Future[None]]] = deque()
        self._worker: ThreadPoolExecutor | None = None
        if prefetch:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="holdall-loader")
        self._closed = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; an error of the worker's is raised here, in the batch's turn."""
        if self._closed:
            raise ClosedError("the loader was closed; make a new one with memory.loader(...)")
        if self._worker is None:
            job = self._start()
            job.work()
            return job.receive()
        while len(self._under_way) <= self._prefetch:
            job = self._start()
            self._under_way.append((job, _done(job) if job.is_quick else self._worker.submit(job.work)))
        job, done = self._under_way.popleft()
        done.result()
        return job.receive()

    @property
    def under_way(self) -> int:
        """Batches that were drawn, and not handed out yet."""
        return len(self._under_way)

    def close(self) -> None:
        """Stop; batches under way are given up, batches handed out stay as they are."""
        self._closed = True
        for _, future in self._under_way:
            future.cancel()
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self._under_way.clear()
        if self._finish is not None:
            self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _done(job: Job) -> Future[None]:
    """Do a job at once; what it raises is raised in its turn."""
    future: Future[None] = Future()
    try:
        job.work()
        future.set_result(None)
    except Exception as error:
        future.set_exception(error)
    return future

"""Background work on full blocks: compression, and moves to disk.

One worker thread takes jobs from a queue. Each job computes a new form of a block, and the worker assigns it to
`block.form`. A block stays readable in its old form until that assignment, so a failed job never loses data: the block
keeps its form, and `failure` says why. The worker sees blocks, never the store that they belong to.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

# `np.unique` imports numpy.ma when it is first called. If the worker did that import while another thread forks, the
# child would wait for ever for the lock of that import.
import numpy.ma  # noqa: F401

from holdall._native import Block, Coded, Raw
from holdall.background import end_at_exit
from holdall.store.tuning import Tuning

_LOG = logging.getLogger("holdall")


class Job(NamedTuple):
    """A new form to make for one block."""

    block: Block
    make_form: Callable[[Block, bool], Coded]  # The second argument: whether a fast codec is needed.
    nbytes: int  # Bytes of RAM that the block takes before the job.
    is_spill: bool = False  # Whether the job moves a compressed block to disk, instead of compressing a raw one.


class Result(NamedTuple):
    """The outcome of a job."""

    block: Block
    is_spill: bool
    error: BaseException | None  # None: the block has its new form.

    def describe_failure(self) -> str:
        """Return what went wrong, and what to do."""
        cause = f"{type(self.error).__name__}: {self.error}"
        if self.is_spill:
            return f"A block could not be written to spill_dir ({cause}). Free disk space, or pass another spill_dir."
        return f"A block could not be compressed ({cause}). It stays uncompressed."


class Compactor:
    """Runs jobs in the order in which they were submitted.

    All methods may be called from any thread. An exception that a signal handler raises in one of them, such as
    KeyboardInterrupt, leaves the compactor usable: jobs are kept in a dict whose single operations are atomic, and no
    lock is held between two statements. The worker is a daemon thread that starts with the first job.

    Attributes:
        max_queued_bytes: Bytes of queued blocks above which `wait_for_room` waits.
        can_hurry: Whether blocks may be compressed with a fast codec, which makes them larger.
    """

    def __init__(self, tuning: Tuning, max_queued_bytes: int) -> None:
        self.max_queued_bytes = max_queued_bytes
        self.can_hurry = True
        self._tuning = tuning
        self._jobs: dict[Block, Job] = {}  # Queued jobs, and the job that the worker runs.
        self._offered: dict[Block, Coded] = {}  # Compressed forms of queued blocks that another thread made.
        self._results: deque[Result] = deque()
        self._failures: dict[bool, str] = {}  # Last failure by kind of job: `is_spill`.
        self._logged_at: dict[tuple[object, ...], float] = {}  # When a failure was logged last, by its kind.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiters: deque[threading.Lock] = deque()  # A locked lock of each waiting thread.
        self._worker: threading.Thread | None = None
        self._worker_lock = threading.Lock()  # Held by the worker, so that only one worker runs at a time.
        self._idle_waits: set[object] = set()  # A token of each call of `wait_idle`. No job hurries meanwhile.
        self._is_closed = False

    @property
    def backlog(self) -> int:
        """Number of blocks that are queued or being compressed or moved."""
        return len(self._jobs)

    @property
    def failure(self) -> str:
        """Why jobs fail. Empty if the last job of every kind succeeded."""
        return next(iter(list(self._failures.values())), "")

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs. A job for a block that is queued already, or that has another form by now, is skipped."""
        for job in jobs:
            if self._is_closed:
                return
            if isinstance(job.block.form, Raw) != job.is_spill:
                self._jobs.setdefault(job.block, job)
        if self._jobs:
            self._start_worker()

    def offer(self, block: Block, coded: Coded) -> None:
        """Use `coded` for a block that is queued for compression. Has no effect on other blocks."""
        job = self._jobs.get(block)
        if job is not None and not job.is_spill:
            self._offered[block] = coded

    def withdraw(self, blocks: Iterable[Block]) -> None:
        """Remove the jobs of blocks that were evicted.

        The job that the worker has begun is completed. Its result keeps the block until `take_results`.
        """
        for block in blocks:
            self._jobs.pop(block, None)

    def take_results(self) -> list[Result]:
        """Return the results of the jobs that ended since the last call."""
        results = []
        with contextlib.suppress(IndexError):
            while True:
                results.append(self._results.popleft())
        return results

    def wait_for_room(self) -> None:
        """Wait until the queued blocks take at most `max_queued_bytes`."""
        if self._jobs:
            self._wait(lambda: self._count_queued_bytes() <= self.max_queued_bytes)

    def wait_idle(self) -> None:
        """Wait until every job ended. No block is compressed in a hurry meanwhile."""
        token = object()
        try:
            self._idle_waits.add(token)
            self._wait(lambda: not self._jobs)
        finally:
            self._idle_waits.discard(token)

    def close(self) -> None:
        """Stop the worker after its current job. Queued blocks keep their form."""
        self.stop()
        worker = self._worker
        if worker is not None and worker is not threading.current_thread() and worker.is_alive():
            worker.join(self._tuning.stop_timeout_s)
        self._jobs.clear()
        self._results.clear()

    def stop(self) -> None:
        """Ask the worker to end after its current job, and do not wait for it.

        A job that fails from now on is not reported, because its file may be closed already.
        """
        self._is_closed = True
        self._wake.put(None)
        self._notify()

    def _count_queued_bytes(self) -> int:
        return sum(job.nbytes for job in list(self._jobs.values()))

    # ---------------------------------------------------------------- waiting

    def _wait(self, is_over: Callable[[], bool]) -> None:
        began_s = time.monotonic()
        is_logged = False
        while not (is_over() or self._is_closed):
            self._start_worker()
            if not is_logged and time.monotonic() - began_s > self._tuning.slow_warning_s:
                is_logged = True
                self._log_slowness()
            waiter = threading.Lock()
            waiter.acquire()
            self._waiters.append(waiter)
            if not (is_over() or self._is_closed):
                # With a timeout, Ctrl-C is noticed on every platform, and a lost notification costs little time.
                waiter.acquire(timeout=self._tuning.poll_s)

    def _log_slowness(self) -> None:
        reason = f" The last failure: {self.failure}" if self.failure else ""
        _LOG.warning(
            "Adding waits because %d blocks are still to be compressed or moved to disk.%s", len(self._jobs), reason
        )

    def _notify(self) -> None:
        """Wake all waiting threads."""
        with contextlib.suppress(IndexError):
            while True:
                self._waiters.popleft().release()

    # ---------------------------------------------------------------- the worker

    def _start_worker(self) -> None:
        worker = self._worker
        if (worker is None or not worker.is_alive()) and not self._is_closed:
            worker = threading.Thread(target=self._work, name="holdall compactor", daemon=True)
            end_at_exit(worker, functools.partial(_stop, weakref.ref(self)))
            self._worker = worker
            worker.start()
        self._wake.put(None)

    def _work(self) -> None:
        with self._worker_lock:
            while not self._is_closed:
                job = self._next_job()
                if job is None:
                    self._offered.clear()  # No job is left that could use these forms.
                    self._wake.get()
                    continue
                self._run(job)
                self._jobs.pop(job.block, None)
                self._notify()
                del job  # The worker must not keep an evicted block alive while it waits.

    def _next_job(self) -> Job | None:
        while True:
            with contextlib.suppress(RuntimeError):  # Another thread submitted a job at this moment.
                return next(iter(self._jobs.values()), None)

    def _is_behind(self) -> bool:
        """Return whether the worker should use fast codecs, because more than half of the allowed bytes are queued."""
        if self._idle_waits or not self.can_hurry:
            return False
        return 2 * self._count_queued_bytes() > self.max_queued_bytes

    def _run(self, job: Job) -> None:
        try:
            offered = None if job.is_spill else self._offered.pop(job.block, None)
            job.block.form = job.make_form(job.block, self._is_behind()) if offered is None else offered
        except BaseException as error:  # Also SystemExit: without the worker, `add` would wait for ever.
            if self._is_closed:
                return
            result = Result(job.block, job.is_spill, error)
            self._failures[job.is_spill] = result.describe_failure()
            self._results.append(result)
            self._log_failure(result)
            return
        self._failures.pop(job.is_spill, None)
        self._results.append(Result(job.block, job.is_spill, None))

    def _log_failure(self, result: Result) -> None:
        """Log a failure, unless one of the same kind was logged lately. A full disk may refuse blocks for hours."""
        error = result.error
        kind = (result.is_spill, type(error), getattr(error, "errno", None))
        now_s = time.monotonic()
        if now_s - self._logged_at.get(kind, -math.inf) < self._tuning.repeat_warning_s:
            return
        self._logged_at[kind] = now_s
        _LOG.warning("%s", result.describe_failure())
        _LOG.debug("The error in full.", exc_info=error)


def _stop(reference: weakref.ref[Compactor]) -> None:
    """Stop a compactor at the end of the program, if it still exists."""
    compactor = reference()
    if compactor is not None:
        compactor.stop()

"""Threads that do jobs one after another in the background. A memory that is closed waits for their jobs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from holdall.background import JOBS
from holdall.checkpoint.waiting import Waiting
from holdall.errors import CheckpointError

_POLL_S = 0.05
_GIVE_UP_SHARE = 0.9
"""Share of the timeout of `end` after which the current job is cancelled. The job has the rest of the time to end."""
_IDLE_S = 60.0
"""Seconds without a job after which the thread ends. Starting a thread takes milliseconds on a busy machine."""
_CHECK_S = 1.0
"""Seconds after which the thread looks for jobs even if `put` did not wake it, because an interrupt ended `put`."""
_YIELD_S = 0.001
"""Pause of a thread that was woken. Without the pause, it would take the GIL from the thread that woke it."""

_J = TypeVar("_J")


class JobThread(Generic[_J]):
    """Does jobs in the order in which they were put. The thread starts with the first job.

    All methods may be called from any thread.

    Args:
        waiting: Progress of the current job, and the way to cancel it.
        work: Does a job and raises nothing.
    """

    def __init__(self, name: str, waiting: Waiting, work: Callable[[_J], None]) -> None:
        # Guards the other attributes. Use `_lock`, and not `_changed`, in a `with` statement: an interrupt inside of
        # `Condition.__enter__`, which is Python code, would leave the lock taken for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # Notified when a job is queued or done.
        self._waiting = waiting
        self._jobs: deque[_J] = deque()  # Queued jobs.
        self._current: _J | None = None  # The job that is being done.
        self._has_given_up = False  # Whether `end` stopped waiting. The remaining jobs then fail.
        self._is_ending = False
        self._name = name
        self._work = work
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a job is being done or queued. False in a forked child."""
        return self._process == os.getpid() and (self._current is not None or bool(self._jobs))

    def put(self, make_job: Callable[[], _J]) -> None:
        """Queue the job that `make_job` returns. Raise RuntimeError if no thread can be started.

        `make_job` is called while the queue is locked, so jobs are queued in the order in which they were made.
        """
        with self._lock:
            self._queue(make_job())

    def replace(self, job: _J) -> None:
        """Queue a job in place of those that are queued. Raise RuntimeError if no thread can be started."""
        with self._lock:
            self._jobs.clear()
            self._queue(job)

    def cancel(self, is_meant: Callable[[_J], bool]) -> list[_J]:
        """Remove the queued jobs that are meant and return them. Cancel the current job if it is meant."""
        with self._lock:
            removed = [job for job in self._jobs if is_meant(job)]
            for job in removed:
                self._jobs.remove(job)
            if self._current is not None and is_meant(self._current):
                self._waiting.cancel()
        return removed

    def list_jobs(self) -> list[_J]:
        """Return the jobs that are queued and the one that is being done."""
        with self._lock:
            current = [] if self._current is None else [self._current]
            return [*current, *self._jobs]

    def _queue(self, job: _J) -> None:
        """Start the thread if it does not run, and queue a job. The caller holds the lock."""
        if self._process != os.getpid():
            # A forked child has a copy of the queue, but not the thread.
            self._thread = None
            self._current = None
            self._process = os.getpid()
            self._jobs.clear()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            JOBS.add(self)
        self._jobs.append(job)
        self._changed.notify_all()

    def end(self, timeout: float, began: float) -> None:
        """Wait until all jobs are done. Raise CheckpointError if there is no progress for `timeout` seconds.

        `began` is the time at which the caller began to wait for this thread, or for another thread before it.
        """
        with self._lock:
            self._is_ending = True
            self._changed.notify_all()
        waiting = self._waiting
        since = time.monotonic()
        reason = ""
        while self.is_busy:
            waited = time.monotonic() - waiting.last_progress_after(began)
            if waited >= _GIVE_UP_SHARE * timeout and not reason:
                reason = waiting.reason or "there is no progress"
                self._has_given_up = True
                waiting.cancel()
            if waited >= timeout:
                break
            waiting.remind(since, f"{waiting.url} is being saved: {waiting.reason or 'it makes progress'}.")
            with self._lock:
                self._changed.wait_for(lambda: not self.is_busy, _POLL_S)
        if reason:
            raise CheckpointError(
                f"{waiting.url} was not saved: {reason}. close() waits at most {timeout:g} s for progress. Check the "
                "URL and the endpoint. Earlier checkpoints are intact."
            )

    def _run(self) -> None:
        while True:
            with self._lock:
                idle_since = time.monotonic()
                while not self._is_ending and not self._jobs and time.monotonic() - idle_since < _IDLE_S:
                    self._changed.wait(_CHECK_S)
                if not self._jobs:
                    self._thread = None  # Under the lock, so that the next `put` starts another thread.
                    return
            time.sleep(_YIELD_S)
            with self._lock:
                if not self._jobs:
                    continue  # All jobs were cancelled.
                self._current = self._jobs.popleft()
                if not self._has_given_up:
                    self._waiting.begin()
            try:
                self._work(self._current)
            finally:
                with self._lock:
                    self._current = None
                    self._changed.notify_all()

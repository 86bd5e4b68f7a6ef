"""Threads that do jobs one after another in the background. A memory that is closed waits for their jobs."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

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


class JobThread:
    """Does jobs in the order in which they were put. The thread starts with the first job.

    Attributes:
        lock: Lock that guards the other attributes. Use `lock`, and not `changed`, in a `with` statement: an interrupt
            inside of `Condition.__enter__`, which is Python code, would leave the lock taken for ever.
        changed: Condition of `lock`. Notified when a job is queued or done.
        waiting: Progress of the current job, and the way to cancel it.
        jobs: Queued jobs.
        current: The job that is being done, or None.
        has_given_up: Whether `end` stopped waiting. The remaining jobs then fail.
    """

    def __init__(self, name: str, waiting: Waiting, work: Callable[[Any], None]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.waiting = waiting
        self.jobs: deque[Any] = deque()
        self.current: Any = None
        self.has_given_up = False
        self._is_ending = False
        self._name = name
        self._work = work  # Does a job and raises nothing.
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    @property
    def is_busy(self) -> bool:
        """Whether a job is being done or queued. False in a forked child."""
        return self._process == os.getpid() and (self.current is not None or bool(self.jobs))

    def put(self, job: Any) -> None:
        """Queue a job. Callers hold `lock`. Raise RuntimeError if no thread can be started."""
        if self._process != os.getpid():
            # A forked child has a copy of the queue, but not the thread.
            self._thread = None
            self.current = None
            self._process = os.getpid()
            self.jobs.clear()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            JOBS.add(self)
        self.jobs.append(job)
        self.changed.notify_all()

    def end(self, timeout: float, began: float) -> None:
        """Wait until all jobs are done. Raise CheckpointError if there is no progress for `timeout` seconds.

        `began` is the time at which the caller began to wait for this thread, or for another thread before it.
        """
        with self.lock:
            self._is_ending = True
            self.changed.notify_all()
        waiting = self.waiting
        since = time.monotonic()
        reason = ""
        while self.is_busy:
            waited = time.monotonic() - waiting.last_progress_after(began)
            if waited >= _GIVE_UP_SHARE * timeout and not reason:
                reason = waiting.reason or "there is no progress"
                self.has_given_up = True
                waiting.cancel()
            if waited >= timeout:
                break
            waiting.remind(since, f"{waiting.url} is being saved: {waiting.reason or 'it makes progress'}.")
            with self.lock:
                self.changed.wait_for(lambda: not self.is_busy, _POLL_S)
        if reason:
            raise CheckpointError(
                f"{waiting.url} was not saved: {reason}. close() waits at most {timeout:g} s for progress. Check the "
                "URL and the endpoint. Earlier checkpoints are intact."
            )

    def _run(self) -> None:
        while True:
            with self.lock:
                idle_since = time.monotonic()
                while not self._is_ending and not self.jobs and time.monotonic() - idle_since < _IDLE_S:
                    self.changed.wait(_CHECK_S)
                if not self.jobs:
                    self._thread = None  # Under the lock, so that the next `put` starts another thread.
                    return
            time.sleep(_YIELD_S)
            with self.lock:
                if not self.jobs:
                    continue  # All jobs were cancelled.
                self.current = self.jobs.popleft()
                if not self.has_given_up:
                    self.waiting.begin()
            try:
                self._work(self.current)
            finally:
                with self.lock:
                    self.current = None
                    self.changed.notify_all()

"""Background jobs: their order, and which of them a cancellation removes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from holdall.checkpoint.jobs import JobThread
from holdall.checkpoint.waiting import Waiting
from holdall.errors import CheckpointError

LONG_S = 60.0


class Worker:
    """Does jobs, which are names. The job "first" takes until `resume` is set or the job is cancelled."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.started = threading.Event()
        self.resume = threading.Event()
        self._waiting = Waiting("a place")
        self.thread: JobThread[str] = JobThread("test-jobs", self._waiting, self._work)

    def start(self, *queued: str) -> None:
        """Start the job "first", and queue others."""
        self.thread.put(lambda: "first")
        assert self.started.wait(LONG_S)
        for name in queued:
            self.thread.put(partial(str, name))

    def finish(self) -> list[str]:
        """Return the jobs that were done, once none is left."""
        self.resume.set()
        self.thread.end(LONG_S, 0.0)
        return self.done

    def _work(self, job: str) -> None:
        if job == "first":
            self.started.set()
            while not self.resume.is_set():
                try:
                    self._waiting.pause(0.01)
                except CheckpointError:
                    job = "first, cancelled"
                    break
        self.done.append(job)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.finish()


def test_jobs_are_done_in_the_order_in_which_they_were_put(worker: Worker) -> None:
    worker.start("second", "third")
    assert worker.thread.list_jobs() == ["first", "second", "third"]
    assert worker.finish() == ["first", "second", "third"]
    assert worker.thread.list_jobs() == []
    assert not worker.thread.is_busy


def test_a_replacement_drops_queued_jobs_and_not_the_current_one(worker: Worker) -> None:
    worker.start("second", "third")
    worker.thread.replace("newest")
    assert worker.finish() == ["first", "newest"]


@pytest.mark.parametrize(
    ("meant", "removed", "done"),
    [
        ({"second"}, ["second"], ["first", "third"]),
        ({"second", "third"}, ["second", "third"], ["first"]),
        ({"first"}, [], ["first, cancelled", "second", "third"]),
        ({"first", "third"}, ["third"], ["first, cancelled", "second"]),
        ({"another"}, [], ["first", "second", "third"]),
    ],
)
def test_a_cancellation_affects_only_the_jobs_that_are_meant(
    meant: set[str], removed: list[str], done: list[str], worker: Worker
) -> None:
    worker.start("second", "third")
    assert worker.thread.cancel(lambda job: job in meant) == removed
    assert worker.finish() == done


def test_a_job_that_cannot_be_made_is_not_queued(worker: Worker) -> None:
    def fail() -> str:
        raise ValueError("no snapshot")

    worker.start()
    with pytest.raises(ValueError, match="no snapshot"):
        worker.thread.put(fail)
    assert worker.finish() == ["first"]

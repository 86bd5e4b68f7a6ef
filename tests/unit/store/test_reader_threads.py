"""ReaderThreads: helpers are started once, however many threads ask for them."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from holdall.store.reader_threads import ReaderThreads


class SlowReader:
    """A reader that lets two callers of `wanted_helpers` meet, if nothing keeps them apart."""

    def __init__(self, wanted_helpers: int) -> None:
        self.helpers = 0
        self._wanted_helpers = wanted_helpers
        self._meeting = threading.Barrier(2)

    @property
    def wanted_helpers(self) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            self._meeting.wait(0.2)
        return self._wanted_helpers

    def help(self) -> None:
        self.helpers += 1

    def dismiss(self) -> None:
        pass


@pytest.mark.parametrize(("wanted", "max_threads", "expected"), [(2, 8, 2), (7, 4, 3), (5, 1, 0)])
def test_two_threads_that_start_helpers_at_once_start_as_many_as_one(
    wanted: int, max_threads: int, expected: int
) -> None:
    reader: Any = SlowReader(wanted)
    helpers = ReaderThreads(reader, max_threads)
    started_before = set(threading.enumerate())
    callers = [threading.Thread(target=helpers.start) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for thread in set(threading.enumerate()) - started_before:
        thread.join()
    assert reader.helpers == expected


def test_dismissed_helpers_are_not_started_again() -> None:
    reader: Any = SlowReader(3)
    helpers = ReaderThreads(reader, 8)
    helpers.dismiss()
    helpers.start()
    assert reader.helpers == 0

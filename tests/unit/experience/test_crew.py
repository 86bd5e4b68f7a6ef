"""A crew covers its rows exactly once, whoever does them, and leaves no work behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter

import pytest

from holdall.threads import ThreadPool

PIECE = 1 << 18


def covered(crew: ThreadPool, rows: int, nbytes: int) -> tuple[Counter[int], set[int]]:
    """Count how often each row was done, and by which threads."""
    done, threads, lock = Counter[int](), set[int](), threading.Lock()

    def work(first: int, end: int) -> None:
        time.sleep(0.001)
        with lock:
            done.update(range(first, end))
            threads.add(threading.get_ident())

    crew.share(work, rows, nbytes)
    return done, threads


@pytest.mark.parametrize("hands", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 256])
@pytest.mark.parametrize("nbytes", [0, 1, PIECE, 40 * PIECE])
def test_every_row_is_done_exactly_once(hands: int, rows: int, nbytes: int) -> None:
    """However rows are shared out, none is left out and none is done twice."""
    crew = ThreadPool(hands=hands)
    done, _ = covered(crew, rows, nbytes)
    crew.dismiss()
    assert done == Counter(range(rows))


def test_much_work_is_shared_and_little_is_not() -> None:
    """Helpers are woken only where the work is worth it; a crew of one has none."""
    crew = ThreadPool(hands=3)
    assert covered(crew, 100, PIECE)[1] == {threading.get_ident()}
    assert len(covered(crew, 100, 100 * PIECE)[1]) > 1
    crew.dismiss()
    assert covered(ThreadPool(hands=1), 100, 100 * PIECE)[1] == {threading.get_ident()}


@pytest.mark.parametrize("failing", ["caller", "helper", "all"])
def test_an_error_in_any_hand_reaches_the_caller(failing: str) -> None:
    """What fails in a thread fails in the call, after every other hand has let go of the rows."""
    crew, caller = ThreadPool(hands=3), threading.get_ident()
    begun, ended = list[int](), list[int]()  # appending is atomic, counting is not

    def work(first: int, end: int) -> None:
        begun.append(first)
        mine = threading.get_ident() == caller
        time.sleep(0.005)
        ended.append(first)
        if failing == "all" or mine == (failing == "caller"):
            raise ValueError(f"rows {first} to {end}")

    with pytest.raises(ValueError, match="rows"):
        crew.share(work, 100, 100 * PIECE)
    assert sorted(begun) == sorted(ended)
    crew.dismiss()


def test_no_helper_outlives_the_call() -> None:
    """When the call returns, nobody writes to its arrays any more."""
    crew = ThreadPool(hands=4)
    for _ in range(20):
        begun, ended = list[int](), list[int]()

        def work(first: int, _end: int, begun: list[int] = begun, ended: list[int] = ended) -> None:
            begun.append(first)
            time.sleep(0.0005)
            ended.append(first)

        crew.share(work, 40, 40 * PIECE)
        assert sorted(begun) == sorted(ended) == list(range(40))
    crew.dismiss()


def test_a_dismissed_crew_can_be_used_again() -> None:
    """Closing a memory while a batch is on its way must not fail the batch."""
    crew = ThreadPool(hands=2)
    for _ in range(3):
        assert covered(crew, 50, 50 * PIECE)[0] == Counter(range(50))
        crew.dismiss()
    crew.dismiss()


def test_dismissing_ends_the_threads() -> None:
    """A closed memory leaves no threads behind."""
    crew = ThreadPool(hands=4)
    covered(crew, 50, 50 * PIECE)
    crew.dismiss()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("holdall-crew")]


def test_sharing_and_dismissing_at_once_loses_no_rows() -> None:
    """A crew that is dismissed in the middle of a call still covers the call's rows."""
    crew, stop = ThreadPool(hands=3), threading.Event()

    def dismiss() -> None:
        while not stop.is_set():
            crew.dismiss()

    thread = threading.Thread(target=dismiss)
    thread.start()
    try:
        for _ in range(60):
            assert covered(crew, 30, 30 * PIECE)[0] == Counter(range(30))
    finally:
        stop.set()
        thread.join(30)
    crew.dismiss()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # forking beside threads is the very thing tested
def test_a_crew_works_in_a_forked_child() -> None:
    """Threads do not survive a fork; a child starts its own."""
    crew = ThreadPool(hands=3)
    covered(crew, 20, 40 * PIECE)
    child = os.fork()
    if child == 0:
        done, _ = covered(crew, 20, 40 * PIECE)
        os._exit(0 if done == Counter(range(20)) else 1)
    deadline = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    crew.dismiss()
    assert os.waitstatus_to_exitcode(status[1]) == 0


def test_a_crew_has_no_more_hands_than_cores() -> None:
    """By default as many hands as the process may use, four at most."""
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    assert ThreadPool().hands == min(usable, 4)

"""The thread pool: rows are filled exactly once, threads come when they are needed and end when they are not."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdall import machine, threads
from holdall.errors import DamageError
from holdall.native import ThreadPool, chosen_kernels, native_library, reading
from holdall.schema import Bytes, Leaf
from holdall.storage.batch_source import Places
from holdall.storage.blocks import Codec, Method, Transform, reserve
from holdall.storage.slices import ClosedPart, Window
from holdall.storage.ticks import Kernels

LIBRARY = native_library()
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
WIDTH = 1000


@dataclass
class Rows:
    """Transitions of one lane in a closed part, raw or sealed, and how to read them."""

    kernels: Kernels
    places: Places
    expected: tuple[bytes, bytes]
    rows: Bytes

    @classmethod
    def written(cls, count: int, *, sealed: bool = False) -> Rows:
        """Write `count` transitions of which no two are alike."""
        kernels = chosen_kernels()
        rows = np.zeros((count + 1, 1, WIDTH), np.uint8)
        rows.reshape(-1, WIDTH)[:, :8] = np.arange(count + 1).reshape(-1, 1).view(np.uint8)
        window = Window.whole(Leaf("", (WIDTH,), np.dtype("u1")))
        block = kernels.new_block(WIDTH, reserve((count + 2) * 2 * WIDTH))
        part, cursors = kernels.new_part(window, 1, block, 0), np.zeros((count, 1), np.uint32)
        for tick in range(count):
            part.append(rows[tick], rows[tick + 1], cursors[tick])
        closed = part.closed()
        if sealed:
            compressed = kernels.coder.seal(block.raw, Codec(Method.LZ4, 0, Transform(WIDTH)))
            assert compressed is not None
            block.replace_by(compressed)
        return cls(kernels, _places(closed, cursors), (rows[:-1].tobytes(), rows[1:].tobytes()), rows)

    def are_read_by(self, pool: ThreadPool) -> bool:
        """Fill a batch, and say whether every row is as it was written."""
        shape = (len(self.places.segment), WIDTH)
        obs, next_obs = np.full(shape, 7, np.uint8), np.full(shape, 7, np.uint8)
        self.kernels.gather(self.places, 0, obs, next_obs, pool)
        return (obs.tobytes(), next_obs.tobytes()) == self.expected


def _places(part: ClosedPart, cursors: np.ndarray) -> Places:
    count = len(cursors)
    return Places(
        records=[np.array([part.record()], np.int64)],
        segment=np.zeros(count, np.int32),
        cursors=[cursors.reshape(-1).copy()],
        lane=np.zeros(count, np.int32),
        lanes=1,
        held=((part.held,),),
    )


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small batches go in many pieces, by all threads there are."""
    monkeypatch.setattr(reading, "_PIECE_BYTES", 3_000)
    monkeypatch.setattr(reading, "_BYTES_PER_THREAD", 3_000)


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    own = ThreadPool(threads=3)
    yield own
    own.dismiss()


def waiting() -> int:
    return sum(thread.name.startswith("holdall-pool") for thread in threading.enumerate())


def in_a_child(check: object) -> int:
    """Run a check in a forked child; return its exit code."""
    child = os.fork()
    if child == 0:
        os._exit(0 if callable(check) and check() else 1)
    deadline = time.monotonic() + 30
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(status[1])


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 7, 256])
@pytest.mark.parametrize("sealed", [False, True])
def test_every_row_is_filled(number: int, count: int, sealed: bool) -> None:
    """However rows are shared among threads, none is left out."""
    own, rows = ThreadPool(threads=number), Rows.written(count, sealed=sealed)
    for _ in range(3):
        assert rows.are_read_by(own)
    own.dismiss()


def test_threads_start_when_they_are_needed_and_end_when_dismissed(pool: ThreadPool) -> None:
    """Little work wakes nobody; the caller is one of the threads, so there is one less; they may be used again."""
    assert Rows.written(2).are_read_by(pool)
    assert waiting() == 0
    rows = Rows.written(100)
    for _ in range(3):
        assert rows.are_read_by(pool)
        assert waiting() == 2
        pool.dismiss()
        pool.dismiss()
        assert waiting() == 0


def test_one_thread_is_the_caller() -> None:
    """Where there is one core, or one thread is asked for, the caller does it all."""
    assert Rows.written(100).are_read_by(ThreadPool(threads=1))
    assert waiting() == 0


def test_threads_end_when_nobody_refers_to_the_pool() -> None:
    """A memory that was never closed leaves no threads behind."""
    own = ThreadPool(threads=2)
    assert Rows.written(100).are_read_by(own)
    assert waiting() == 1
    del own
    gc.collect()
    assert waiting() == 0


@pytest.mark.parametrize("wrong", [0, 57, 99])
def test_a_row_that_fails_in_any_thread_fails_the_call(pool: ThreadPool, wrong: int) -> None:
    """Whoever finds it; and the pool can be used again."""
    rows = Rows.written(100)
    segment = rows.places.segment.copy()
    segment[wrong] = 5
    for _ in range(5):
        with pytest.raises(DamageError, match=f"row {wrong} "):
            replace(rows, places=replace(rows.places, segment=segment)).are_read_by(pool)
        assert rows.are_read_by(pool)


def helpers_of(pool: ThreadPool) -> tuple[int, int]:
    assert LIBRARY is not None
    with pool.helping(LIBRARY, 2) as found:
        return found


def test_a_call_that_finds_the_threads_taken_works_alone(pool: ThreadPool) -> None:
    """It neither waits for them nor loses a row."""
    rows = Rows.written(100)
    assert LIBRARY is not None
    with pool.helping(LIBRARY, 2) as (address, helpers):
        assert (address > 0, helpers) == (True, 2)
        with ThreadPoolExecutor(1) as another:
            assert another.submit(rows.are_read_by, pool).result()
            assert another.submit(helpers_of, pool).result() == (0, 0)


def test_reading_from_several_threads_and_dismissing_at_once_loses_no_rows(pool: ThreadPool) -> None:
    """Closing a memory while batches are on their way must not fail them."""
    rows, stop, wrong = Rows.written(100, sealed=True), threading.Event(), list[int]()

    def dismiss() -> None:
        while not stop.is_set():
            pool.dismiss()

    def read(number: int) -> None:
        if not all(rows.are_read_by(pool) for _ in range(60)):
            wrong.append(number)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    dismissing = threading.Thread(target=dismiss)
    for thread in (dismissing, *readers):
        thread.start()
    for reader in readers:
        reader.join(60)
    stop.set()
    dismissing.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in (dismissing, *readers))


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores, and Linux"
)
def test_helpers_keep_off_the_core_of_their_caller() -> None:
    """Woken there, they would take turns with it, and sharing would gain nothing."""
    pool, rows, others = ThreadPool(3), Rows.written(6_000), set(threading.enumerate())
    assert rows.are_read_by(pool)  # the threads are there
    helpers = set(threading.enumerate()) - others
    assert len(helpers) == 2
    allowed = os.sched_getaffinity(0)

    def off_one_core() -> bool:
        assert rows.are_read_by(pool)
        cores = [os.sched_getaffinity(thread.native_id or 0) for thread in helpers]
        return all(mask < allowed and len(mask) == len(allowed) - 1 for mask in cores)

    assert any(off_one_core() for _ in range(1_000))  # a thread may just have been started


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # forking beside threads is the very thing tested
def test_a_forked_child_has_threads_of_its_own(pool: ThreadPool) -> None:
    """Threads do not survive a fork; a child starts its own, and ends them."""
    rows = Rows.written(100, sealed=True)
    assert rows.are_read_by(pool)

    def check() -> bool:
        found = rows.are_read_by(pool) and waiting() == 2
        pool.dismiss()
        return found and waiting() == 0

    assert in_a_child(check) == 0
    assert rows.are_read_by(pool)


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_was_forked_during_a_call_does_not_wait_for_it(pool: ThreadPool) -> None:
    """The lock that another thread of the parent held is not the child's."""
    rows = Rows.written(100)
    assert LIBRARY is not None

    def check() -> bool:
        pool.dismiss()
        return rows.are_read_by(pool)

    with pool.helping(LIBRARY, 2):
        assert in_a_child(check) == 0


def test_a_process_ends_while_threads_wait() -> None:
    """Nobody has to dismiss them."""
    code = (
        "from holdall.native import ThreadPool, native_library\n"
        "pool = ThreadPool(threads=3)\n"
        "with pool.helping(native_library(), 2) as (address, helpers): print(helpers)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2\n"


def test_a_pool_has_no_more_threads_than_cores() -> None:
    """By default as many as the process may use, eight at most."""
    assert ThreadPool().threads == min(threads.usable_cores(), 8)


@pytest.mark.parametrize(("content", "number"), [("max 100000", 8), ("250000 100000", 2), ("100000 100000", 1)])
def test_a_containers_quota_counts_for_the_pools(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, number: int
) -> None:
    """A container with one core on a large machine has no threads beside the caller, neither here nor for devices."""
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    monkeypatch.delenv("HOLDALL_THREADS", raising=False)
    monkeypatch.setattr(machine, "_QUOTA", quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    kernels = chosen_kernels()
    namer = kernels.namer()
    assert ThreadPool().threads == number
    assert namer.pool.threads == (16 if number == 8 else number)


@pytest.mark.parametrize("started", [0, 1])
def test_where_no_more_threads_can_be_started_those_that_were_share_the_work(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container limits how many threads there may be: nothing is raised, and none is left behind with every batch."""
    data, pool, start, before = Rows.written(6000), ThreadPool(4), threading.Thread.start, threading.active_count()
    tried = list[str]()

    def limited(thread: threading.Thread) -> None:
        tried.append(thread.name)
        if len(tried) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    for _ in range(3):
        assert data.are_read_by(pool)
    assert len(tried) == started + 1
    assert threading.active_count() == before + started
    pool.dismiss()
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_daemon_uses_outlives_the_end_of_python(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes away what is a thread's own, and runs finalizers, while a daemon is in a call without the GIL."""
    data, pool, seen = Rows.written(6000, sealed=True), ThreadPool(threads), list[int]()
    coder: Any = data.kernels.coder
    library: Any = LIBRARY
    read = library.holdall_gather

    def take_away(*arguments: Any) -> Any:
        mine = weakref.ref(coder._thread.memory)
        del coder._thread.memory
        pool.workspaces = []
        gc.collect()
        assert mine() is not None
        seen.append(arguments[-2])  # helpers
        return read(*arguments)

    class Library:
        holdall_gather = staticmethod(take_away)

        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

    monkeypatch.setattr(data.kernels, "_library", Library())
    assert data.are_read_by(pool)
    assert seen == [threads - 1]
    assert pool._end is None or not pool._end.atexit
    pool.dismiss()


def test_blocks_that_come_at_the_same_time_can_all_be_read() -> None:
    """Memories share a coder, and their workers bring it blocks at once; it knows the longest unit of all of them."""
    kernels, slices = chosen_kernels(), np.arange(64 * 900, dtype=np.uint8).reshape(64, 900)
    assert kernels is not None
    coder: Any = kernels.coder.keeping()
    short, long = (Codec(Method.ZSTD, 3, Transform(width), group=group) for width, group in ((90, 2), (900, 16)))
    found, first = (kernels.coder.seal(slices[:, :width].copy(), codec) for width, codec in ((900, long), (90, short)))
    assert found is not None
    assert first is not None
    coded = found.coded

    class Size(int):
        """Another worker's block comes while this one is compared."""

        def __gt__(self, other: object) -> bool:
            adopted.append(coder.adopt(coded))
            return int(self) > int(str(other))

    adopted = list[Any]()
    object.__setattr__(short, "unit_bytes", Size(short.unit_bytes))
    coder.adopt(first.coded)
    adopted.append(coder.adopt(coded) if not adopted else adopted[0])
    out = np.zeros_like(slices)
    coder.decode(adopted[0], np.arange(64), out)
    assert np.array_equal(out, slices)

"""Compactor: blocks in, other forms out."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from holdall._native import Block, Coded, Raw, decode, encode
from holdall.codec.codec import Codec, Method
from holdall.store.compactor import Compactor, Job
from holdall.store.tuning import Tuning

SLICES = np.arange(64, dtype=np.uint8).repeat(32).reshape(32, 64)


class Interrupt(BaseException):
    """Raised in place of KeyboardInterrupt, which would end the tests."""


def new_block() -> Block:
    return Block(64, 32, SLICES)


def compress(block: Block, is_behind: bool) -> Coded:
    coded = encode(block, Codec(64, Method.LZ4, 0 if is_behind else 7))
    assert coded is not None
    return coded


def fail(block: Block, is_behind: bool) -> Coded:
    raise MemoryError("no room")


def refuse(block: Block, is_behind: bool) -> Coded:
    raise OSError(28, "No space left on device")


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def test_submitted_blocks_are_compressed_and_read_as_before() -> None:
    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    blocks = [new_block() for _ in range(5)]
    compactor.submit([Job(block, compress, 2048) for block in blocks])
    compactor.wait_idle()
    assert compactor.backlog == 0
    for block in blocks:
        assert isinstance(block.form, Coded)
        assert decode(block.form, 0, 32).tobytes() == SLICES.tobytes()
    assert [(result.block, result.error) for result in compactor.take_results()] == [(block, None) for block in blocks]
    assert compactor.take_results() == []
    compactor.close()


def test_a_block_is_compressed_once() -> None:
    seen: list[Block] = []

    def count(block: Block, is_behind: bool) -> Coded:
        seen.append(block)
        return compress(block, is_behind)

    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    block = new_block()
    for _ in range(3):
        compactor.submit([Job(block, count, 2048), Job(block, count, 2048)])
    compactor.wait_idle()
    compactor.submit([Job(block, count, 2048)])
    compactor.wait_idle()
    assert len(seen) == 1
    compactor.close()


def test_an_offered_form_saves_the_work_of_a_queued_block() -> None:
    """A block that is not queued keeps its form, and a block that was offered late is compressed as usual."""
    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    is_offered = threading.Event()

    def wait(block: Block, is_behind: bool) -> Coded:
        assert is_offered.wait(60)
        return compress(block, is_behind)

    working = new_block()
    queued = new_block()
    other = new_block()
    offered = compress(queued, False)
    compactor.submit([Job(working, wait, 2048), Job(queued, fail, 2048)])
    for block in (working, queued, other):
        compactor.offer(block, offered)
    is_offered.set()
    compactor.wait_idle()
    assert id(queued.form) == id(offered)
    assert isinstance(working.form, Coded)
    assert not isinstance(other.form, Coded)
    assert [(result.block, result.error) for result in compactor.take_results()] == [(working, None), (queued, None)]
    compactor.submit([Job(other, compress, 2048)])
    compactor.wait_idle()
    assert id(other.form) != id(offered)
    compactor.close()


def test_a_failed_block_keeps_its_form_and_later_blocks_are_compressed(caplog: pytest.LogCaptureFixture) -> None:
    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    blocks = [new_block(), new_block()]
    with caplog.at_level(logging.WARNING, "holdall"):
        for _ in range(2):
            compactor.submit([Job(blocks[0], fail, 2048)])
            compactor.wait_idle()
    assert isinstance(blocks[0].form, Raw)
    assert compactor.failure == "A block could not be compressed (MemoryError: no room). It stays uncompressed."
    assert len(caplog.records) == 1  # The second failure of the same kind is not logged.
    assert [type(result.error) for result in compactor.take_results()] == [MemoryError, MemoryError]
    compactor.submit([Job(blocks[1], compress, 2048)])
    compactor.wait_idle()
    assert compactor.failure == ""
    compactor.close()


def test_a_failure_to_write_to_disk_is_shown_until_the_disk_takes_a_block() -> None:
    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    block = new_block()
    block.form = compress(block, False)
    compactor.submit([Job(block, refuse, 2048, is_spill=True)])
    compactor.wait_idle()
    compactor.submit([Job(new_block(), compress, 2048)])
    compactor.wait_idle()
    assert "No space left on device" in compactor.failure
    assert "Free disk space" in compactor.failure
    coded = block.form
    assert isinstance(coded, Coded)
    compactor.submit([Job(block, lambda *_: coded, 2048, is_spill=True)])
    compactor.wait_idle()
    assert compactor.failure == ""
    compactor.close()


def test_a_job_that_fails_after_close_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    has_begun = threading.Event()
    may_fail = threading.Event()

    def fail_late(block: Block, is_behind: bool) -> Coded:
        has_begun.set()
        may_fail.wait()
        raise OSError(9, "Bad file descriptor")

    compactor.submit([Job(new_block(), fail_late, 2048)])
    has_begun.wait()
    compactor.stop()
    may_fail.set()
    compactor.close()
    assert compactor.failure == ""
    assert not caplog.records


@pytest.mark.timeout(20)
def test_jobs_of_an_interrupted_submit_are_run_when_a_thread_waits() -> None:
    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    block = new_block()

    def list_jobs() -> Iterator[Job]:
        yield Job(block, compress, 2048)
        raise Interrupt

    with pytest.raises(Interrupt):
        compactor.submit(list_jobs())
    compactor.wait_idle()
    assert isinstance(block.form, Coded)
    compactor.close()


@pytest.mark.timeout(20)
def test_waiting_for_room_ends_when_the_queue_is_short_and_when_it_is_closed() -> None:
    may_go_on = threading.Event()
    has_begun = threading.Event()

    def wait(block: Block, is_behind: bool) -> Coded:
        has_begun.set()
        may_go_on.wait()
        return compress(block, is_behind)

    compactor = Compactor(Tuning(poll_s=0.01), max_queued_bytes=2048)
    compactor.submit([Job(new_block(), wait, 2048) for _ in range(3)])
    has_begun.wait()
    is_over = threading.Event()

    def wait_for_room() -> None:
        compactor.wait_for_room()
        is_over.set()

    waiter = threading.Thread(target=wait_for_room)
    waiter.start()
    assert not is_over.is_set()
    may_go_on.set()
    waiter.join()
    assert is_over.is_set()
    compactor.close()
    compactor.wait_for_room()
    compactor.submit([Job(new_block(), compress, 2048)])
    assert compactor.backlog == 0


@pytest.mark.timeout(60)
def test_a_worker_hurries_while_more_than_half_of_the_allowed_bytes_are_queued() -> None:
    hurries: list[bool] = []

    def record(block: Block, is_behind: bool) -> Coded:
        hurries.append(is_behind)
        return compress(block, is_behind)

    compactor = Compactor(Tuning(), max_queued_bytes=3 * 2048)
    compactor.submit([Job(new_block(), record, 2048) for _ in range(5)])
    wait_until(lambda: compactor.backlog == 0)
    compactor.close()
    assert hurries == [True, True, True, True, False]


@pytest.mark.timeout(60)
def test_an_interrupted_wait_does_not_hurry_jobs_that_another_thread_waits_for() -> None:
    hurries: list[bool] = []
    is_over = threading.Event()

    def record(block: Block, is_behind: bool) -> Coded:
        """Record `is_behind`, and keep the queue full."""
        hurries.append(is_behind)
        if not is_over.is_set():
            compactor.submit([Job(new_block(), record, 2048)])
        return compress(block, is_behind)

    def interrupt(*_: object) -> None:
        raise Interrupt

    def wait_until_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        compactor.wait_idle()

    compactor = Compactor(Tuning(), max_queued_bytes=2048)
    compactor.submit([Job(new_block(), record, 2048) for _ in range(3)])
    other = threading.Thread(target=compactor.wait_idle)
    other.start()
    wait_until(lambda: not all(hurries))  # The other thread waits.
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupt):
            wait_until_interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    jobs_so_far = len(hurries)
    wait_until(lambda: len(hurries) >= jobs_so_far + 3)
    is_over.set()
    other.join()
    compactor.close()
    assert not any(hurries[jobs_so_far + 1 :])


def test_a_stopped_compactor_frees_its_blocks_although_jobs_are_queued() -> None:
    """A memory that is dropped without `close` stops its compactor. Its blocks and files must go then."""
    threads_before = set(threading.enumerate())
    is_begun = threading.Event()
    may_end = threading.Event()

    def wait(block: Block, is_behind: bool) -> Coded:
        is_begun.set()
        may_end.wait()
        return compress(block, is_behind)

    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    compactor.submit([Job(new_block(), wait, 2048) for _ in range(3)])
    is_begun.wait()
    reference = weakref.ref(compactor)
    (worker,) = set(threading.enumerate()) - threads_before
    compactor.stop()
    del compactor
    may_end.set()
    worker.join()
    del worker
    gc.collect()
    assert reference() is None


def test_a_withdrawn_block_is_not_compressed() -> None:
    may_go_on = threading.Event()

    def wait(block: Block, is_behind: bool) -> Coded:
        may_go_on.wait()
        return compress(block, is_behind)

    compactor = Compactor(Tuning(), max_queued_bytes=10**6)
    first = new_block()
    second = new_block()
    compactor.submit([Job(first, wait, 2048), Job(second, compress, 2048)])
    compactor.withdraw([second])
    may_go_on.set()
    compactor.wait_idle()
    assert isinstance(second.form, Raw)
    compactor.close()


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Some interrupts hit a finalizer.
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_an_interrupt_at_any_moment_leaves_the_compactor_usable(count: int) -> None:
    compactor = Compactor(Tuning(poll_s=0.01), max_queued_bytes=2048)

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    blocks = []
    try:
        for i in range(count):
            blocks.append(new_block())
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + i % 100))
                compactor.submit([Job(blocks[-1], compress, 2048)])
                compactor.wait_for_room()
                time.sleep(1)  # The signal ends it.
            except (Interrupt, RuntimeError):  # Python's Condition raises the latter if an interrupt hits its `wait`.
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
    compactor.submit([Job(block, compress, 2048) for block in blocks])
    compactor.wait_idle()
    assert all(isinstance(block.form, Coded) for block in blocks)
    compactor.close()

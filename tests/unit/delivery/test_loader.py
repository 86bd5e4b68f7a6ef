"""The loader: it draws batches ahead of time, in a fixed order, and no earlier than `prefetch` says."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import (
    ArgumentError,
    ClosedError,
    DamageError,
    NStep,
    Prioritized,
    ReplayMemory,
)
from holdall.delivery import Loader
from holdall.testing import LeafPlan, Stream, assert_same_bits
from holdall.testing.strategies import box


def make_memory(ticks: int = 150, **options: Any) -> tuple[ReplayMemory, Stream]:
    space = spaces.Dict(image=box((4, 36, 36), "u1"), state=box((3,), "f4"))
    stream = Stream(space, spaces.Discrete(3), 2, plans=[LeafPlan(axis=0)])
    memory = ReplayMemory(space, spaces.Discrete(3), 200, 2, seed=4, **options)
    memory.extend(**stream.ticks(ticks).arguments())
    return memory, stream


@pytest.fixture(autouse=True)
def no_loader_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and any("holdall loader" in t.name for t in threading.enumerate()):
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if "holdall loader" in thread.name]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 7])
@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_batches_are_those_that_sample_would_have_drawn(prefetch: int, budget: str | None, device: str | None) -> None:
    """While nothing is added, they have the same order and the same bits."""
    (memory, _), (same, _) = make_memory(budget=budget), make_memory(budget=budget, device=device)
    with memory.loader(32, prefetch, device=device) as loader:
        for _, batch in zip(range(12), loader, strict=False):
            assert_same_bits(batch, same.sample(32))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_batch_is_drawn_prefetch_batches_before_it_is_returned(prefetch: int) -> None:
    """A batch can have transitions that were added before its draw, and none that were added after it."""
    memory, stream = make_memory(ticks=5, sampler=Newest())
    with memory.loader(1, prefetch) as loader:
        added = [memory.next_id]
        for turn in range(20):
            batch = next(loader)
            drawn_at = added[max(0, turn - prefetch)]
            assert batch.ids.tolist() == [drawn_at - 1]
            memory.add(**stream.tick().arguments())
            added.append(memory.next_id)


def test_one_seed_gives_one_sequence_however_quick_the_worker_is() -> None:
    """The test adds, updates priorities and draws in turn. Batches depend on these calls only."""
    sequences = []
    for delay in (0.0, 0.003):
        memory, stream = make_memory(sampler=NStep(3, 0.9, by=Prioritized()))
        sequence = []
        with memory.loader(16, prefetch=2) as loader:
            for turn in range(25):
                batch = next(loader)
                sequence.append((batch.ids.tolist(), batch.obs["image"].tobytes(), batch.weights.tolist()))
                memory.update_priorities(batch.ids, np.arange(16.0) + turn)
                time.sleep(delay)
                memory.add(**stream.tick().arguments())
        sequences.append(sequence)
    assert sequences[0] == sequences[1]


def test_rows_that_are_evicted_before_their_batch_is_returned_are_right() -> None:
    """A prepared batch refers to the blocks that it needs, so they are not freed."""
    memory, stream = make_memory(budget=None)
    same, _ = make_memory(budget=None)
    with memory.loader(64, prefetch=3) as loader:
        expected = [same.sample(64) for _ in range(4)]
        assert_same_bits(next(loader), expected[0])
        memory.extend(**stream.ticks(300).arguments())
        for batch in expected[1:]:
            assert_same_bits(next(loader), batch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_by_the_request_for_its_batch(prefetch: int) -> None:
    """The batches before and after it are returned."""
    memory, _ = make_memory()
    calls = []

    def fail_once(_catalog: Any, _ids: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise DamageError("bytes are damaged")

    memory.host_store.before_read = fail_once
    with memory.loader(8, prefetch) as loader:
        next(loader)
        next(loader)
        with pytest.raises(DamageError, match="bytes are damaged"):
            next(loader)
        next(loader)


def test_a_closed_memory_ends_its_loaders() -> None:
    """Batches that were drawn are still returned. The next draw raises the error."""
    memory, _ = make_memory()
    with memory.loader(8, prefetch=1) as loader:
        next(loader)
        memory.close()
        with pytest.raises(ClosedError, match="The memory was closed"):
            next(loader)


def test_a_closed_loader_refuses_requests_and_its_batches_stay() -> None:
    """A second `close` does nothing."""
    memory, _ = make_memory()
    loader = memory.loader(8)
    batch = next(loader)
    image = batch.obs["image"].copy()
    loader.close()
    loader.close()
    with pytest.raises(ClosedError, match="The loader was closed"):
        next(loader)
    memory.sample(8)
    assert (batch.obs["image"] == image).all()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_threads_may_share_a_loader(prefetch: int) -> None:
    """Each batch is returned to one thread. A thread that waits when the loader is closed gets the error."""
    (memory, _), (same, _) = make_memory(), make_memory()
    loader = memory.loader(8, prefetch)
    got = list[Any]()
    errors = list[Exception]()

    def consume() -> None:
        try:
            while len(got) < 400:
                got.append(next(loader))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(got) < 100 and not errors:
        time.sleep(0.001)
    loader.close()
    for thread in threads:
        thread.join()
    assert {str(error) for error in errors} <= {"The loader was closed. Make a new one."}
    drawn = sorted(batch.ids.tolist() for batch in got)
    assert drawn == sorted(same.sample(8).ids.tolist() for _ in range(len(got)))


def test_the_thread_of_a_deleted_loader_ends() -> None:
    """`close` is not needed."""
    memory, _ = make_memory()
    next(memory.loader(8))


def test_held_batches_do_not_change_while_others_are_drawn() -> None:
    memory, _ = make_memory()
    with memory.loader(32, prefetch=3) as loader:
        held = [next(loader) for _ in range(6)]
        copies = [batch.obs["image"].copy() for batch in held]
        for _ in range(40):
            next(loader).obs["image"][:] = 0
        for batch, image in zip(held, copies, strict=True):
            assert (batch.obs["image"] == image).all()


def test_a_wrong_argument_of_loader_is_refused() -> None:
    """A batch that is larger than the memory is refused at the first request."""
    memory, _ = make_memory()
    with pytest.raises(ArgumentError, match=r"^batch_size \(0\)"):
        memory.loader(0)
    with pytest.raises(ArgumentError, match=r"^prefetch \(-1\)"):
        memory.loader(8, prefetch=-1)
    with memory.loader(500) as loader, pytest.raises(ArgumentError, match=r"batch_size \(500\) is more than the 200"):
        next(loader)


class Newest:
    """A sampler that draws the newest transition."""

    def draw(self, held: Any, count: int, _generator: Any) -> Any:
        from holdall.batch import Draw

        return Draw(np.full(count, held.next_id - 1), np.ones(count, np.float32))

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, _state: Any) -> None:
        pass


def test_batches_that_were_read_are_sent_before_they_are_requested() -> None:
    """The thread that requests batches sends them. So the background thread need not wait for the device."""
    numbers = iter(range(100))
    started: set[int] = set()
    threads = set()

    def draw() -> Any:
        number = next(numbers)
        return lambda: number

    def start(prepared: int) -> None:
        started.add(prepared)
        threads.add(threading.current_thread())

    with Loader(draw, lambda prepared: prepared, 2, start) as loader:
        for requested in range(8):
            received: Any = next(loader)
            assert received == requested
            assert set(range(requested + 2 if requested else 1)) <= started
            loader.wait_until_read()
    assert threads == {threading.current_thread()}

"""Pages ahead of who writes: they are made present in time, nothing is changed, and nothing is touched that is gone."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory, native
from holdall.native import native_kernels
from holdall.schema import Bytes
from holdall.storage.blocks import address, reserve
from holdall.testing import OracleMemory, assert_same_bits
from holdall.testing.strategies import box

pytestmark = [
    pytest.mark.skipif(native_kernels() is None, reason="the compiled loops are needed"),
    pytest.mark.skipif(sys.platform != "linux", reason="there is no such thread here"),
]
PATIENCE_S = 20
FRAME = (64, 64, 16)
FRAME_BYTES = 2**16
MIB = 2**20


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.001)


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "holdall-pages"]


@pytest.fixture(autouse=True)
def _others() -> None:
    """Let the threads of other tests end first."""
    gc.collect()
    wait_until(lambda: not feeders())


def frames(tick: int) -> Any:
    return np.random.default_rng(tick).integers(0, 255, (1, *FRAME), np.uint8)


def arguments(tick: int) -> list[Any]:
    never = np.zeros(1, np.bool_)
    return [frames(tick), np.zeros(1, np.int64), np.zeros(1, np.float32), frames(tick + 1), never, never]


def filled(ticks: int, capacity: int = 2_000, budget: Any = "auto") -> ReplayMemory:
    memory = ReplayMemory(box(FRAME, "u1"), spaces.Discrete(2), capacity, budget=budget)
    for tick in range(ticks):
        memory.add(*arguments(tick))
    return memory


def arena_of(memory: ReplayMemory) -> Bytes:
    block = memory._open().large_segments.open.parts[0].block
    assert block is not None
    return block.arena


def present_bytes(arena: Bytes) -> int:
    """Return how much of an arena has pages."""
    first, found = address(arena), 0
    within = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and not head.endswith(":"):
            start = int(head.split("-")[0], 16)
            within = first <= start < first + arena.nbytes
        elif within and head == "Rss:":
            found += 1024 * int(rest.split()[0])
    return found


def test_pages_are_present_before_they_are_written() -> None:
    """Those behind the one that is being written, and no more than a few; what stands there stays."""
    with filled(40) as memory:  # 2.6 MiB
        arena = arena_of(memory)
        wait_until(lambda: present_bytes(arena) >= 41 * FRAME_BYTES + 2 * MIB)
        used = memory._open().large_segments.open_bytes()
        assert present_bytes(arena) <= used + 2 * MIB + 2 * 2 * MIB
        assert (memory.gather(np.arange(40)).obs == np.concatenate([frames(i) for i in range(40)])).all()
        assert not arena[used:].any()


def test_a_memory_that_is_hardly_used_has_no_such_thread() -> None:
    with filled(2) as memory:
        assert not feeders()
        assert present_bytes(arena_of(memory)) < MIB
    small = ReplayMemory(box((64, 64), "u1"), spaces.Discrete(2), 500, budget="32MiB")  # no large pages anyway
    with small:
        for tick in range(400):
            now, action, reward, after, never, _ = arguments(tick)
            small.add(now[:, :, :, 0].copy(), action, reward, after[:, :, :, 0].copy(), never, never)
        assert not feeders()


def test_pages_that_are_not_needed_are_given_back_when_a_segment_closes() -> None:
    """Also those that are touched at the very moment."""
    with filled(40) as memory:
        store, arena = memory._open(), arena_of(memory)
        wait_until(lambda: present_bytes(arena) >= 41 * FRAME_BYTES + 2 * MIB)
        store.large_segments._most_ticks = 45  # it closes early
        store.large_segments._sure_until = store._writer.blocks_pause_tick = 0
        for tick in range(40, 60):
            memory.add(*arguments(tick))
        assert arena_of(memory) is not arena
        wait_until(lambda: present_bytes(arena) <= 46 * FRAME_BYTES + mmap.PAGESIZE)
        (part,) = store.large_segments.closed[-1].parts
        arena[8 * MIB :] = 0  # as if it had been touched just then
        assert present_bytes(arena) > 8 * MIB
        native._let_go([(1, [(part.block, arena)])], set())
        assert present_bytes(arena) <= 46 * FRAME_BYTES + mmap.PAGESIZE


def test_what_is_added_while_pages_are_touched_comes_back_as_it_was() -> None:
    """Over many segments that fill, are sealed and leave: bit for bit."""
    oracle = OracleMemory(600)
    memory = ReplayMemory(box(FRAME, "u1"), spaces.Discrete(2), 600, budget=None)
    with memory:
        for tick in range(900):
            given = arguments(tick)
            oracle.add(*given)
            if not memory.add_at_once(*given):
                memory.add(*given)
        assert len(feeders()) == 1
        held = oracle.ids[-500:]
        for some in np.split(held, 10):
            assert_same_bits(memory.gather(some), oracle.gather(some))


def test_bytes_are_never_changed_by_touching() -> None:
    """A thread that writes to the same pages at the same time finds what it wrote."""
    library: Any = native_kernels()._library  # type: ignore[union-attr]
    state, wrong, alive = np.zeros(library.holdall_pages_size(), np.uint8), [], []
    library.holdall_pages_new(address(state))
    feeding = threading.Thread(target=library.holdall_pages_feed, args=(address(state),))
    feeding.start()
    for turn in range(1, 11):
        arena = reserve(8 * MIB)
        memory = np.array([[address(arena), arena.nbytes, 0]], np.int64)
        library.holdall_pages_follow(address(state), 1, address(memory), 1)
        for place in (0, 1):
            arena[place :: mmap.PAGESIZE] = turn
        wrong.append(int(arena.astype(np.int64).sum()) != 2 * turn * (8 * MIB // mmap.PAGESIZE))
        alive.append(arena)
    library.holdall_pages_dismiss(address(state))
    feeding.join(PATIENCE_S)
    assert not any(wrong)
    assert not feeding.is_alive()


def test_memory_lives_as_long_as_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is still touched when others are followed is held until the thread says that it is done."""
    memory = filled(40)
    feeder: Any = vars(memory._open()._writer)["_pages"]
    touched = [feeder._generation]

    class Library:
        """Says that the last page of the generation before is still being touched."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native_kernels()._library, name)  # type: ignore[union-attr]

        def holdall_pages_follow(self, *given: Any) -> Any:
            native_kernels()._library.holdall_pages_follow(*given)  # type: ignore[union-attr]
            return touched[0]

    monkeypatch.setattr(feeder, "_library", Library())
    arena = weakref.ref(arena_of(memory).base)
    for tick in range(40, 600):  # two segments
        memory.add(*arguments(tick))
    assert len(feeder._held) == 2
    assert arena() is not None
    touched[0] = 0
    native._let_go(feeder._held, {feeder._generation})
    assert len(feeder._held) == 1
    memory.close()


def test_the_thread_ends_with_its_memory() -> None:
    """Whether it is closed or dropped; nothing of it is kept."""
    memory = filled(40)
    assert len(feeders()) == 1
    arena = weakref.ref(arena_of(memory).base)
    memory.close()
    del memory
    gc.collect()
    wait_until(lambda: not feeders())
    assert arena() is None
    memory = filled(40)
    assert len(feeders()) == 1
    del memory
    gc.collect()
    wait_until(lambda: not feeders())


def test_nothing_is_lost_without_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no more can be started, add writes to pages as they come."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "holdall-pages":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with filled(300) as memory:
        assert not feeders()
        assert (memory.gather(np.array([299])).obs == frames(299)).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_goes_on_by_itself() -> None:
    """It has no such thread, whatever the parent's was in the middle of, and starts one with its next segment."""
    with filled(40) as memory:
        child = os.fork()
        if child == 0:
            is_right = not feeders()
            for tick in range(40, 600):
                memory.add(*arguments(tick))
            is_right &= len(feeders()) == 1
            is_right &= bool(
                (memory.gather(np.array([39, 599])).obs == np.concatenate([frames(39), frames(599)])).all()
            )
            os._exit(0 if is_right else 1)
        memory.add(*arguments(40))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (memory.gather(np.array([40])).obs == frames(40)).all()

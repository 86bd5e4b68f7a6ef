"""Batches that are drawn in one call: the same rows, generator and memory as the general way, and nothing is shared."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.batch import Batch
from holdall.errors import ClosedError, DamageError, TransitionIdError
from holdall.native import draw_slots, one_call
from holdall.storage import RECORD_FIELDS, BatchReader, SegmentIndex
from holdall.testing import assert_same_bits

SLOTS = 40
STACK = spaces.Box(0, 255, (4, 24, 24), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "stack": STACK,
    "dict": spaces.Dict({"image": STACK, "place": spaces.Box(-1, 1, (105,), np.float64)}),
}
ACTION = spaces.Box(-1, 1, (2,), np.float32)


class Steps:
    """Steps of environments whose stacks shift, with an end every seven ticks and final observations of their own."""

    def __init__(self, space: spaces.Space[Any], lanes: int) -> None:
        self.space, self.lanes, self.tick = space, lanes, 0
        self._random = np.random.default_rng(0)
        self._frames = {name: self._new(leaf) for name, leaf in self._leaves()}

    def _leaves(self) -> list[tuple[str, Any]]:
        return list(self.space.items()) if isinstance(self.space, spaces.Dict) else [("", self.space)]

    def _new(self, leaf: Any) -> Any:
        return self._random.integers(0, 3, (self.lanes, *leaf.shape)).astype(leaf.dtype)

    def _seen(self) -> Any:
        seen = {name: rows.copy() for name, rows in self._frames.items()}
        return seen if isinstance(self.space, spaces.Dict) else seen[""]

    def add(self, memory: holdall.ReplayMemory, extras: dict[str, Any] | None = None) -> None:
        """Add one step."""
        obs, ends = self._seen(), self.tick % 7 == 6
        for name, leaf in self._leaves():
            new = self._new(leaf)
            self._frames[name] = (
                np.concatenate([self._frames[name][:, 1:], new[:, :1]], 1) if leaf.shape[0] == 4 else new
            )
        action = self._random.normal(size=(self.lanes, 2)).astype(np.float32)
        reward = self._random.normal(size=self.lanes).astype(np.float32)
        cut = np.arange(self.lanes) % 2 == 0 if ends else np.zeros(self.lanes, np.bool_)
        memory.add(obs, action, reward, self._seen(), np.full(self.lanes, ends) & ~cut, cut, extras)
        if ends:
            self._frames = {name: self._new(leaf) for name, leaf in self._leaves()}
        self.tick += 1


def at_once(memory: holdall.ReplayMemory, rows: int) -> Any:
    """Draw in one call, as adapters do."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    filled = min(memory.next_id // memory.num_envs, SLOTS)
    return memory.draw_at_once(generator, rows, filled, SLOTS)


def generator_place() -> tuple[int, bytes]:
    """Return where the global generator is in its sequence."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[2], state[1].tobytes()


def ids_of_draw(memory: holdall.ReplayMemory, rows: int) -> Any:
    """Draw ids the general way."""
    ticks = memory.next_id // memory.num_envs
    return draw_slots(rows, min(ticks, SLOTS), SLOTS, ticks - 1, memory.num_envs)


def require_same(found: tuple[Any, ...], batch: Batch) -> None:
    """Compare arrays that were drawn in one call with a batch of the same ids."""
    action, ended, reward, *observed = found
    leaves = list(batch.obs) if isinstance(batch.obs, dict) else [None]
    expected = [batch.action, (batch.terminated > batch.truncated).astype(np.float32)[:, None], batch.reward[:, None]]
    for key in leaves:
        expected += [batch.obs, batch.next_obs] if key is None else [batch.obs[key], batch.next_obs[key]]
    for ours, theirs in zip([action, ended, reward, *observed], expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()
        assert ours.ctypes.data % 64 == 0
        assert ours.flags.writeable


@pytest.fixture(autouse=True)
def _generator_as_it_was() -> Any:
    state = np.random.get_state()  # noqa: NPY002  the generator that adapters draw from
    yield
    np.random.set_state(state)  # noqa: NPY002


def filled_memory(name: str, lanes: int = 1, ticks: int = 30, **settings: Any) -> tuple[holdall.ReplayMemory, Steps]:
    """Make a memory with some steps in it, and have batches drawn in one call."""
    memory = holdall.ReplayMemory(SPACES[name], ACTION, SLOTS * lanes, lanes, seed=0, **settings)
    steps = Steps(SPACES[name], lanes)
    for _ in range(ticks):
        steps.add(memory)
    memory.rows(ids_of_draw(memory, 64))
    return memory, steps


@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", SPACES)
def test_rows_and_generator_are_those_of_the_general_way(name: str, lanes: int, budget: str | None) -> None:
    memory, steps = filled_memory(name, lanes, budget=budget)
    drawn = 0
    for tick in range(60):
        steps.add(memory)
        rows = (1, 64, 7)[tick % 3]
        np.random.seed(tick)  # noqa: NPY002
        found, after = at_once(memory, rows), generator_place()
        np.random.seed(tick)  # noqa: NPY002
        untouched, ids = generator_place(), ids_of_draw(memory, rows)
        drawn += type(found) is tuple
        if type(found) is tuple:
            require_same(found, memory.gather(ids))
            assert after == generator_place()
        else:
            assert found == 0
            assert after == untouched
        memory.rows(ids)
    assert drawn > 25
    if budget is None and name == "stack":
        assert memory.report().segments > 1
        memory.drain()
        assert sum(field.sealed_bytes for field in memory.report().fields) > 0


class CountedReader(BatchReader):
    """Counts the batches that were gathered in one call."""

    def __init__(self, memory: Any) -> None:
        self._reader, self.count = memory._store.batch_reader, 0
        memory._store.batch_reader = self

    def __getattribute__(self, name: str) -> Any:
        if name in {"count", "_reader", "gather", "__dict__"}:
            return object.__getattribute__(self, name)
        return getattr(self._reader, name)

    def gather(self, ids: Any) -> Any:
        found = self._reader.gather(ids)
        self.count += type(found) is tuple
        return found


@pytest.mark.parametrize("budget", ["auto", None])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", SPACES)
def test_sample_gives_the_batches_of_the_general_way(name: str, lanes: int, budget: str | None) -> None:
    """The same rows by the same numbers of the memory's generator, while ticks come and leave."""
    extras: dict[str, spaces.Space[Any]] = {
        "log_prob": spaces.Box(-9, 9, (), np.float64),
        "hidden": spaces.Box(-9, 9, (2, 3), np.float32),
    }
    memories: list[Any] = []
    for _ in range(2):
        memory = holdall.ReplayMemory(
            SPACES[name], ACTION, SLOTS * lanes, lanes, seed=3, budget=budget, extras=extras if lanes == 3 else None
        )
        memories.append(memory)
    counted, memories[1]._store.batch_reader = CountedReader(memories[0]), BatchReader()
    steps, random = [Steps(SPACES[name], lanes) for _ in memories], np.random.default_rng(0)
    for tick in range(90):
        more = {"log_prob": random.normal(size=lanes), "hidden": random.normal(size=(lanes, 2, 3)).astype(np.float32)}
        for memory, each in zip(memories, steps, strict=True):
            each.add(memory, more if lanes == 3 else None)
        rows = (1, 16, 7)[tick % 3]
        if tick >= 16:
            ours, theirs = (memory.sample(rows) for memory in memories)
            assert_same_bits(ours, theirs)
            assert_same_bits(ours, memories[0].gather(ours.ids))
    assert counted.count > 40
    assert memories[0]._generator.bit_generator.state == memories[1]._generator.bit_generator.state


def test_ids_that_left_or_never_came_are_left_to_the_general_way() -> None:
    memory, _ = filled_memory("vector", ticks=60)
    gather = memory._open().batch_reader.gather
    held = np.arange(memory.first_id, memory.next_id)
    assert type(gather(held)) is tuple
    for wrong in (memory.first_id - 1, memory.next_id, -1, 2**62):
        assert gather(np.array([*held, wrong])).tolist() == [*held, wrong]
    for ids in (held.astype(np.int32), held[::2], held[None], held.tolist(), held[:0], np.resize(held, 10_000), None):
        assert gather(ids) == 0


def test_ticks_that_a_store_forgets_are_left_to_the_general_way() -> None:
    memory, _ = filled_memory("vector")
    store = memory._open()
    with memory:
        assert type(store.batch_reader.gather(np.arange(5))) is tuple
        with memory._lock:
            store.forget_before(10)
        assert type(store.batch_reader.gather(np.arange(5))) is not tuple


def test_a_batch_never_changes_and_memory_is_used_again_when_nobody_has_it() -> None:
    memory, _ = filled_memory("stack")
    first = at_once(memory, 64)
    obs, before = first[3], [array.copy() for array in first]
    others = [at_once(memory, 64) for _ in range(6)]
    places = {array.ctypes.data for batch in [first, *others] for array in batch}
    assert len(places) == 7 * len(first)
    assert all(np.array_equal(ours, then) for ours, then in zip(first, before, strict=True))
    row, place = obs[3, 1:2], obs.ctypes.data
    expected = row.copy()
    del first, obs, others
    assert all(at_once(memory, 64)[3].ctypes.data != place for _ in range(20))
    assert np.array_equal(row, expected)
    del row
    assert place in {batch[3].ctypes.data for batch in [at_once(memory, 64) for _ in range(4)]}
    others = [at_once(memory, 64) for _ in range(20)]
    assert 0 < memory._open().batch_reader.nbytes < 10 * sum(array.nbytes for array in others[0])


def test_a_batch_outlives_its_memory() -> None:
    memory, _ = filled_memory("dict")
    found = at_once(memory, 32)
    before = [array.copy() for array in found]
    draw = memory.draw_at_once
    memory.close()
    del memory
    gc.collect()
    assert all(np.array_equal(ours, then) for ours, then in zip(found, before, strict=True))
    assert draw(np.random.get_bit_generator(), 32, 30, SLOTS) == 0  # type: ignore[attr-defined]


def test_a_hard_limit_holds_for_what_is_kept() -> None:
    memory, _ = filled_memory("stack", budget="64MiB")
    memory.drain()  # the first block is sealed at once, and changes where batches are read from
    limit = memory._budget.staging_bytes
    for rows in range(600, 1400, 50):
        memory.rows(ids_of_draw(memory, rows))
        batches = [at_once(memory, rows) for _ in range(4)]
        assert all(type(batch) is tuple for batch in batches)
        assert memory._open().batch_reader.nbytes + memory._assembler.staging.nbytes <= limit
    assert memory.report().staging_bytes >= memory._open().batch_reader.nbytes
    assert {"staging"} <= {name for name, _ in memory.arrays()}


@pytest.mark.parametrize(
    "arguments",
    [(0, 30, SLOTS), (-1, 30, SLOTS), (8, 0, SLOTS), (8, 31, SLOTS), (8, 29, SLOTS), (8, SLOTS, SLOTS), (8, 41, SLOTS),
     ("8", 30, SLOTS), (None, 30, SLOTS), (8, 30), (10**30, 30, SLOTS), (8, 30, SLOTS, 1)],
)  # fmt: skip
def test_what_is_not_as_it_must_be_draws_nothing(arguments: tuple[Any, ...]) -> None:
    memory, _ = filled_memory("vector")
    before = generator_place()
    assert memory.draw_at_once(np.random.get_bit_generator(), *arguments) == 0  # type: ignore[attr-defined]
    assert memory.draw_at_once(None, 8, 30, SLOTS) == 0
    assert before == generator_place()
    assert type(memory.draw_at_once(np.random.get_bit_generator(), 8, 30, SLOTS)) is tuple  # type: ignore[attr-defined]


def test_a_lock_that_somebody_has_is_waited_for_by_the_general_way() -> None:
    memory, _ = filled_memory("vector")
    with memory._lock:
        assert at_once(memory, 8) == 0
    with np.random.get_bit_generator().lock:  # type: ignore[attr-defined]
        assert at_once(memory, 8) == 0
    memory._open().repair.begin(lambda: None)
    assert at_once(memory, 8) == 0
    memory._open().repair.end()
    assert type(at_once(memory, 8)) is tuple


def test_another_global_generator_is_seen() -> None:
    memory, _ = filled_memory("vector")
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        assert at_once(memory, 8) == 0
        memory.rows(ids_of_draw(memory, 8))
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        memory.rows(np.arange(8))
        found = at_once(memory, 8)
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        require_same(found, memory.gather(ids_of_draw(memory, 8)))
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_damage_gives_the_ids_and_the_general_way_says_what_is_wrong() -> None:
    memory, steps = filled_memory("stack", budget=None, ticks=39)
    for _ in range(3 * SLOTS):
        steps.add(memory)
    memory.drain()
    memory.rows(ids_of_draw(memory, 64))
    index = memory._open().large_segments.index
    records = index.records[0]
    assert records[:, RECORD_FIELDS.index("sealed")].any()
    log_rows = records[:, 1].copy()
    np.random.seed(5)  # noqa: NPY002
    ids = ids_of_draw(memory, 64)
    try:
        records[:, 1] = 0  # every place is outside of its segment
        np.random.seed(5)  # noqa: NPY002
        found = at_once(memory, 64)
        assert found.dtype == np.int64
        assert np.array_equal(found, ids)
        with pytest.raises(DamageError):
            memory.rows(found)
    finally:
        records[:, 1] = log_rows
    assert type(at_once(memory, 64)) is tuple


def test_threads_may_draw_and_add_at_the_same_time() -> None:
    memory, steps = filled_memory("stack", lanes=3, budget=None)
    stop, wrong = threading.Event(), list[BaseException]()

    def draws() -> None:
        try:
            while not stop.is_set():
                found = at_once(memory, 200)
                if type(found) is tuple:
                    obs, next_obs = found[3:]
                    goes_on = (obs[:, 1:] == next_obs[:, :-1]).all(axis=(1, 2, 3))
                    assert goes_on.any()
                else:
                    with contextlib.suppress(TransitionIdError):  # they left since
                        memory.rows(np.arange(memory.next_id - 8, memory.next_id))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=draws) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(150):
        steps.add(memory)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    memory.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_child_draws_without_its_parents_threads() -> None:
    memory, _ = filled_memory("stack", budget=None)

    def draws() -> bool:
        for _ in range(100):  # a block that was just sealed changes where batches are read from
            memory.rows(ids_of_draw(memory, 2000))
            if type(at_once(memory, 2000)) is tuple:
                return True
        return False

    assert draws()
    child = os.fork()
    if child == 0:
        os._exit(0 if draws() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_kept_memory_is_freed_with_a_memory_that_is_dropped() -> None:
    memory, _ = filled_memory("stack")
    at_once(memory, 64)
    kept = memory._open().batch_reader.arrays()
    assert kept
    counts = [sys.getrefcount(array) for array in kept]
    memory.close()
    assert [sys.getrefcount(array) for array in kept] == [count - 1 for count in counts]
    with pytest.raises(ClosedError):
        memory.rows(np.arange(3))


def test_blocks_that_left_are_freed_also_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What batches were read from is referred to until blocks are others, in lists that a repair replaces, too."""
    memory, steps = filled_memory("stack", budget=None)
    segments = memory._open().large_segments

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with memory:
        while segments.open.first_tick + segments._most_ticks > steps.tick:
            steps.add(memory)
        with monkeypatch.context() as patched:
            patched.setattr(SegmentIndex, "open_next", interrupt)
            with pytest.raises(KeyboardInterrupt):
                steps.add(memory)
        steps.add(memory)
        memory.rows(ids_of_draw(memory, 64))
        assert at_once(memory, 64)
        arena = weakref.ref(segments.open.parts[0].slices.base)
        closed = len(segments.closed)
        while len(segments.closed) == closed:
            steps.add(memory)
        memory.drain()
        assert arena() is None


@pytest.mark.parametrize("missing", ["_held_at", "_array_interface"])
def test_an_interpreter_that_is_not_as_expected_goes_the_general_way(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    absent: dict[str, Callable[[], Any]] = {"_held_at": lambda: 0, "_array_interface": lambda: None}
    monkeypatch.setattr(one_call, missing, absent[missing])
    memory, _ = filled_memory("vector")
    assert type(memory._open().batch_reader) is BatchReader
    assert at_once(memory, 8) == 0


def test_the_byte_that_says_that_a_lock_is_held_is_found() -> None:
    lock = threading.Lock()
    held = ctypes.c_uint8.from_address(id(lock) + one_call._held_at())
    assert held.value == 0
    with lock:
        assert held.value == 1
    assert held.value == 0


MANY_THREADS = """
import sys
import numpy as np
from gymnasium import spaces
import holdall

frames = np.random.default_rng(0).integers(0, 9, (500, 3, 84, 21), np.uint8).repeat(4, axis=3)
no, action, reward = np.zeros(1, bool), np.zeros((1, 2), np.float32), np.zeros(1, np.float32)
space = spaces.Box(0, 255, (3, 84, 84), np.uint8)
memory = holdall.ReplayMemory(space, spaces.Box(-1, 1, (2,), np.float32), 500, budget=None, seed=0)
for number in range(499):
    memory.add(frames[number][None], action, reward, frames[number + 1][None], no, no)
memory.drain()
assert memory.report().fields[0].sealed_bytes > 0
for rows in [int(size) for size in sys.argv[1].split(",")] * 60:
    batch = memory.sample(rows)
    assert np.array_equal(batch.obs, frames[batch.ids]), rows
    assert np.array_equal(batch.next_obs, frames[batch.ids + 1]), rows
    batch.obs[:], batch.next_obs[:] = 99, 99  # it is the trainer's now: nothing of it may be read again
"""


@pytest.mark.parametrize("sizes", ["12", "20", "64,5,12,16,24"])
def test_few_of_many_threads_help(sizes: str) -> None:
    """Whichever of them begin, and whatever they decoded for the batch before, which its owner has changed since."""
    environment = os.environ | {"HOLDALL_THREADS": "8"}
    command = [sys.executable, "-X", "faulthandler", "-c", MANY_THREADS, sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def drawn_while_collecting(memory: Any, collected: Callable[[], None]) -> Any:
    """Draw a batch, and have the collector begin in the middle of it, where it does: something runs then."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    filled, kept = memory.next_id, gc.get_threshold()

    class Dropped:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            collected()

    state = np.random.get_state()  # noqa: NPY002
    batch = memory.gather(ids_of_draw(memory, 16))
    np.random.set_state(state)  # noqa: NPY002
    memory.rows(ids_of_draw(memory, 16))  # batches are offered
    length, draw = len(memory.draw_at_once(generator, 16, filled, SLOTS)), memory.draw_at_once
    np.random.set_state(state)  # noqa: NPY002
    gc.disable()
    # Python keeps up to 2,000 tuples of a length for later: the next one is to be new.
    hoard = [tuple(range(number, number + length)) for number in range(2_100)]
    Dropped()
    gc.set_threshold(1, 1, 1)
    gc.enable()
    found = draw(generator, 16, filled, SLOTS)
    gc.set_threshold(*kept)
    require_same(found, batch)
    return hoard


@pytest.mark.parametrize("name", ["stack", "dict"])
def test_what_the_collector_runs_in_the_middle_of_a_batch_changes_none_of_its_rows(name: str) -> None:
    """Making a tuple may start it: then another batch is asked for, and blocks that are read lie elsewhere."""
    memory, _ = filled_memory(name)
    store: Any = memory._store
    generator, filled, runs = np.random.get_bit_generator(), memory.next_id, 0  # type: ignore[attr-defined]

    def draw_too() -> None:
        nonlocal runs
        runs += 1
        memory.draw_at_once(generator, 8, filled, SLOTS)
        store.large_segments._rebuild_index()

    with memory:
        hoards = [drawn_while_collecting(memory, draw_too) for _ in range(20)]
    assert hoards
    if sys.version_info < (3, 12):  # later ones collect between instructions of Python alone
        assert runs > 0


@pytest.mark.timeout(60)
def test_a_memory_that_the_collector_closes_in_the_middle_of_a_batch_is_closed() -> None:
    """A trainer that is dropped closes its memory, from which another one draws: nobody waits for himself."""
    memory, _ = filled_memory("dict")
    drawn_while_collecting(memory, memory.close)
    gc.collect()
    with pytest.raises(ClosedError):
        memory.rows(np.arange(3))

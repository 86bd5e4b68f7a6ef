"""Store against a plain list of the transitions that were added."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall._native import Block, Coded
from holdall.errors import ArgumentError, TransitionIdError
from holdall.schema import Schema
from holdall.store.budget import Budget
from holdall.store.store import Store
from holdall.store.tuning import Tuning

SMALL = Tuning(
    block_bytes=4096,
    max_segment_ticks=24,
    min_segment_ticks=4,
    small_field_bytes=64,
    tiny_field_bytes=16,
    available_bytes=2**40,
)

SPACES: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1, 1, (3,), np.float32),
    "stack": spaces.Box(0, 255, (4, 5, 5), np.uint8),
    "last_axis": spaces.Box(0, 255, (6, 5, 3), np.uint8),
    "image": spaces.Box(0, 255, (9, 9), np.uint8),
    "dict": spaces.Dict(
        {"frames": spaces.Box(0, 255, (4, 5, 5), np.uint8), "speed": spaces.Box(-1, 1, (2,), np.float64)}
    ),
    "tuple": spaces.Tuple([spaces.Discrete(5), spaces.Box(0, 255, (9, 9), np.uint8)]),
}


def schema_of(space: spaces.Space[Any], lanes: int) -> Schema:
    extras = {"hidden": spaces.Box(-1, 1, (2,), np.float32)}
    return Schema.of(space, spaces.Discrete(4), extras, lanes, ())


def draw(space: spaces.Space[Any], lanes: int, rng: np.random.Generator, before: Any = None) -> Any:
    """Return an observation of all lanes: a new one, or one that shifts `before` as a stack of frames does."""
    if isinstance(space, spaces.Dict):
        return {
            key: draw(part, lanes, rng, None if before is None else before[key]) for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = before or [None] * len(space.spaces)
        return tuple(draw(part, lanes, rng, past) for part, past in zip(space.spaces, parts, strict=True))
    if isinstance(space, spaces.Discrete):
        return rng.integers(0, space.n, lanes)
    assert isinstance(space, spaces.Box)
    new: NDArray[Any] = rng.integers(0, 4, (lanes, *space.shape)).astype(space.dtype)
    if before is None or len(space.shape) < 3:
        return new
    axis = 3 if space.shape[-1] == 3 else 1
    kept = np.take(before, range(1, space.shape[axis - 1]), axis=axis)
    return np.concatenate([kept, np.take(new, [0], axis=axis)], axis=axis)


RAW = Budget.automatic(2**40, can_spill=False, tuning=SMALL)
COMPRESSED = Budget.least(2**40, can_spill=False, tuning=SMALL)


def new_store(schema: Schema, capacity_ticks: int, budget: Budget = RAW, tuning: Tuning = SMALL) -> Store:
    return Store(schema, capacity_ticks, budget, tuning=tuning)


def held_blocks(store: Store) -> set[Block]:
    """Return all blocks of a store."""
    return {part.block for segment in store.catalog.segments for part in segment.parts if part.block is not None}


class Story:
    """A stream of steps, and what every held transition must read as."""

    def __init__(
        self,
        space: spaces.Space[Any],
        lanes: int,
        capacity_ticks: int,
        budget: Budget = RAW,
        tuning: Tuning = SMALL,
    ) -> None:
        self.space = space
        self.lanes = lanes
        self.schema = schema_of(space, lanes)
        self.store = new_store(self.schema, capacity_ticks, budget, tuning)
        self.rng = np.random.default_rng(0)
        self.now = draw(space, lanes, self.rng)
        self.rows: list[list[bytes]] = []  # Bytes of all outputs of every transition, by id.

    @property
    def outputs(self) -> tuple[int, ...]:
        columns = self.store.columns
        observed = (*columns.obs_outputs, *columns.next_obs_outputs)
        others = (columns.reward_output, *columns.extra_outputs, columns.terminated_output, columns.truncated_output)
        return (*observed, *columns.action_outputs, *others)

    def step(self) -> tuple[Any, ...]:
        rng = self.rng
        now = self.now
        after = draw(self.space, self.lanes, rng, now)
        ends = rng.random((2, self.lanes)) < 0.1
        self.now = draw(self.space, self.lanes, rng) if rng.random() < 0.1 else after
        hidden = rng.standard_normal((self.lanes, 2)).astype(np.float32)
        return now, rng.integers(0, 4, self.lanes), rng.random(self.lanes), after, ends[0], ends[1], {"hidden": hidden}

    def record(self, step: tuple[Any, ...]) -> None:
        obs, action, reward, next_obs, terminated, truncated, extras = step
        leading = (self.lanes,)
        leaves = self.schema.observation.flatten(obs, leading, "") + self.schema.observation.flatten(
            next_obs, leading, ""
        )
        arrays = [*leaves, action, reward, extras["hidden"], terminated, truncated]
        self.rows += [[array[lane].tobytes() for array in arrays] for lane in range(self.lanes)]

    def add(self, ticks: int) -> None:
        for _ in range(ticks):
            step = self.step()
            self.store.append(*step)
            self.record(step)

    def check(self) -> None:
        ids = np.arange(self.store.first_id, self.store.next_id)
        self.rng.shuffle(ids)
        for position, array in enumerate(self.store.view().read(ids, self.outputs)):
            assert [row.tobytes() for row in array] == [self.rows[i][position] for i in ids.tolist()]


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", ["stack", "last_axis", "image", "dict"])
def test_compressed_transitions_read_as_they_were_added(name: str, lanes: int) -> None:
    story = Story(SPACES[name], lanes, 400, COMPRESSED)
    for _ in range(3):
        story.add(150)
        story.check()
    story.store.wait_idle()
    assert {type(block.form) for block in held_blocks(story.store) if not block.is_open} == {Coded}
    story.check()
    story.store.close()


def test_a_limited_store_drops_the_oldest_transitions_and_stays_within_its_limit() -> None:
    limit = 60_000
    budget = Budget.limited(limit, can_spill=False, tick_bytes=400, tuning=SMALL)
    story = Story(SPACES["image"], 2, 10_000, budget)
    for _ in range(10):
        story.add(100)
        story.store.wait_idle()
        story.check()
    assert 0 < story.store.first_id < story.store.next_id
    in_memory = sum(block.form.nbytes for block in held_blocks(story.store))
    in_memory += sum(part.nbytes for segment in story.store.catalog.segments[:-1] for part in segment.parts)
    assert in_memory <= limit
    story.store.close()


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", SPACES)
def test_every_held_transition_reads_as_it_was_added(name: str, lanes: int) -> None:
    story = Story(SPACES[name], lanes, capacity_ticks=90)
    for ticks in (1, 5, 40, 100, 64):
        story.add(ticks)
        assert len(story.store) == min(len(story.rows), 90 * lanes)
        story.check()


@pytest.mark.parametrize("capacity_ticks", [1, 2, 3, 7])
def test_a_tiny_capacity_holds_exactly_that_many_ticks(capacity_ticks: int) -> None:
    story = Story(SPACES["dict"], 2, capacity_ticks)
    for _ in range(30):
        story.add(1)
        assert len(story.store) == min(len(story.rows), 2 * capacity_ticks)
        story.check()


@pytest.mark.parametrize(
    ("name", "finding"), [("stack", "window of 4 along axis 0"), ("last_axis", "window of 3 along axis 2")]
)
def test_a_window_is_found_and_each_slice_is_stored_once(name: str, finding: str) -> None:
    story = Story(SPACES[name], 1, capacity_ticks=1000)
    story.add(300)
    assert story.store.describe(0).startswith(finding)
    story.check()


def test_evicting_everything_frees_the_slices_of_the_open_segment() -> None:
    """What is added afterwards is stored in a new block."""
    rng = np.random.default_rng(0)
    space = spaces.Box(0, 255, (9, 9), np.uint8)
    store = new_store(schema_of(space, 1), 100)
    flags = np.zeros(1, np.bool_)
    extras = {"hidden": np.zeros((1, 2), np.float32)}
    for _ in range(10):
        obs = draw(space, 1, rng)
        store.append(obs, np.zeros(1, np.int64), np.zeros(1), draw(space, 1, rng), flags, flags, extras)
    before = held_blocks(store)
    store.evict(store.next_tick)
    assert len(store) == 0
    assert held_blocks(store).isdisjoint(before)
    store.close()


def test_trajectories_read_as_steps_that_were_added_one_by_one() -> None:
    story = Story(SPACES["dict"], 2, capacity_ticks=500)
    steps = [story.step() for _ in range(120)]
    for step in steps:
        story.record(step)
    stacked: list[Any] = []
    for position in range(6):
        values = [step[position] for step in steps]
        if isinstance(values[0], dict):
            stacked.append({key: np.stack([value[key] for value in values]) for key in values[0]})
        else:
            stacked.append(np.stack(values))
    stacked.append({"hidden": np.stack([step[6]["hidden"] for step in steps])})
    story.store.extend(*stacked)
    assert len(story.store) == 240
    story.check()


def test_unusual_arguments_are_converted_or_refused_and_nothing_is_written() -> None:
    store = new_store(schema_of(SPACES["vector"], 1), 10)
    hidden = {"hidden": np.zeros((1, 2), np.float32)}
    obs = np.ones(3, np.float32)
    store.append(obs, 1, 1.5, obs, False, False, hidden)
    store.append(obs[None], np.array([2], np.int8), np.array([2.5]), obs, [True], np.bool_(False), hidden)
    assert len(store) == 2
    with pytest.raises(ArgumentError, match="obs has shape"):
        store.append(np.ones(4, np.float32), 1, 1.5, obs, False, False, hidden)
    with pytest.raises(ArgumentError, match="never casts"):
        store.append(obs.astype(np.float64), 1, 1.5, obs, False, False, hidden)
    assert len(store) == 2


def test_rewritten_extras_are_read_and_an_unknown_id_is_an_error() -> None:
    story = Story(SPACES["vector"], 2, capacity_ticks=50)
    story.add(60)
    ids = np.array([story.store.first_id, story.store.next_id - 1])
    rows = np.full((2, 2), 7, np.float32)
    story.store.rewrite(ids, {0: rows})
    for i in ids.tolist():
        story.rows[i][4] = rows[0].tobytes()
    story.check()
    with pytest.raises(TransitionIdError, match="is not held"):
        story.store.rewrite(np.array([0]), {0: rows[:1]})


class Interrupt(BaseException):
    """Raised by the signal handler of a test."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Some interrupts hit a finalizer.
@pytest.mark.parametrize("budget", [RAW, COMPRESSED], ids=["raw", "compressed"])
def test_an_interrupt_at_any_moment_leaves_whole_ticks(budget: Budget) -> None:
    story = Story(SPACES["dict"], 2, 60, budget)

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for i in range(400):
            step = story.step()
            ticks = story.store.next_id
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + i * 7 % 300))
                story.store.append(*step)
                time.sleep(1)  # The signal ends it.
            except Interrupt:
                interrupted += 1
            if story.store.next_id > ticks:
                story.record(step)
    finally:
        signal.signal(signal.SIGALRM, before)
    story.check()
    assert interrupted > 390  # A finalizer swallows some.
    story.add(100)
    story.store.wait_idle()
    story.check()
    assert story.store.backlog == 0
    story.store.close()


def test_a_signal_handler_may_add_while_a_tick_is_added() -> None:
    story = Story(SPACES["stack"], 2, 300, COMPRESSED)
    is_adding = False

    def add_one(*_: object) -> None:
        nonlocal is_adding
        if not is_adding:  # A handler that is interrupted by the next signal would record its tick too late.
            is_adding = True
            step = story.step()
            first_id = story.store.next_id
            story.store.append(*step)
            nested.append((first_id, step))
            is_adding = False

    nested: list[tuple[int, tuple[Any, ...]]] = []
    added: dict[int, tuple[Any, ...]] = {}
    before = signal.signal(signal.SIGALRM, add_one)
    try:
        for i in range(300):
            step = story.step()
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + i * 7 % 300))
            story.store.append(*step)
            signal.setitimer(signal.ITIMER_REAL, 0)
            # Every tick is either the one of the loop, or one of the handler.
            taken = {first_id for first_id, _ in nested}
            first_id = story.store.next_id - 2
            while first_id in taken:
                first_id -= 2
            added[first_id] = step
    finally:
        signal.signal(signal.SIGALRM, before)
    added |= dict(nested)
    for first_id in sorted(added):
        story.record(added[first_id])
    assert nested
    assert sorted(added) == list(range(0, story.store.next_id, 2))
    story.store.wait_idle()
    story.check()
    story.store.close()


def test_threads_read_whole_rows_while_another_one_adds_and_compresses() -> None:
    story = Story(SPACES["stack"], 2, 200, COMPRESSED)
    story.add(20)
    is_done = threading.Event()
    wrong: list[str] = []

    def read() -> None:
        rng = np.random.default_rng()
        while not is_done.is_set():
            first = story.store.first_id
            end = len(story.rows)
            ids = rng.integers(first, end, 16)
            try:
                arrays = story.store.view().read(ids, story.outputs)
            except TransitionIdError:
                continue
            for position, array in enumerate(arrays):
                if [row.tobytes() for row in array] != [story.rows[i][position] for i in ids.tolist()]:
                    wrong.append(f"output {position}")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    story.add(600)
    is_done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    story.check()


def test_repeating_small_observations_are_packed_where_the_budget_asks_for_it() -> None:
    tuning = replace(SMALL, min_packed_rows=16)
    goal = spaces.Dict(
        {"goal": spaces.Box(-1, 1, (6,), np.float32), "state": spaces.Box(-1, 1, (2,), np.float64)},
    )
    kinds = {}
    for name, budget in {"raw": RAW, "compressed": COMPRESSED}.items():
        story = Story(goal, 2, 1000, budget, tuning)
        for _ in range(200):
            before = story.now
            step = story.step()
            story.now = step[3] if story.rng.random() > 0.1 else story.now
            step[3]["goal"][:] = before["goal"]
            story.store.append(*step)
            story.record(step)
        story.check()
        kinds[name] = {part.kind for segment in story.store.catalog.closed_segments(0) for part in segment.parts[:2]}
        story.store.close()
    assert kinds == {"raw": {"shared"}, "compressed": {"packed"}}

"""After an exception at any line of a public method, the memory is as before the call or as after it.

Ctrl-C in a notebook, or any exception of a signal handler, is raised between two instructions. Here a trace function
raises it at every line of holdall's code in turn, in the calling thread. Then the program continues as a training loop
would, and everything is compared with the oracle.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.sampling import Held, Likelihood
from holdall.store.tuning import Tuning
from holdall.testing import OracleMemory, assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Raised in finalizers.

PACKAGE = str(Path(holdall.__file__).parent) + os.sep
ACTION = spaces.Box(-1, 1, (2,), np.float32)
SMALL = spaces.Box(-9, 9, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 24, 24), np.uint8)
STACK = spaces.Box(0, 255, (4, 36, 36), np.uint8)
MIXED = spaces.Dict({"camera": IMAGE, "goal": SMALL, "state": spaces.Box(-9, 9, (100,), np.float32)})
SAMPLERS: dict[str, Callable[[], Any]] = {
    "Uniform": holdall.Uniform,
    "Prioritized": holdall.Prioritized,
    "NStep": lambda: holdall.NStep(3, 0.9),
    "Sequence": lambda: holdall.Sequence(3),
}
POINTS = [pytest.param(None, id="all", marks=pytest.mark.nightly), pytest.param(3, id="some")]
"""Number of lines at which a call is interrupted: all lines, or a few that are chosen at random."""


EXTENDED = 3  # Number of steps of an `extend`.
TUNING = Tuning(block_bytes=150_000, max_segment_ticks=16, min_segment_ticks=8, min_packed_rows=8)
"""A few ticks fill a segment."""


class Interrupt(KeyboardInterrupt):
    """The exception of the signal handler."""


def interrupt_at(
    call: Callable[[], Any], at: int = 0, *, opcodes: bool = False, handle: Callable[[], None] | None = None
) -> int:
    """Make a call, and raise `Interrupt` at its `at`-th line of holdall's code. Return the number of executed lines.

    Args:
        handle: A function that is called in place of raising.
    """
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = opcodes
        frame.f_trace_lines = not opcodes
        if event == ("opcode" if opcodes else "line"):
            left -= 1
            if left == 0 and handle is not None:
                sys.settrace(None)
                handle()
            elif left == 0:
                raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(before)
    return at - left


def make_frames(t: int, count: int, lanes: int, size: int) -> Any:
    """Return stacks of `count` pictures that shift by one picture per step."""
    pictures = [np.random.default_rng(t + i).integers(0, 200, (lanes, size, size), np.uint8) for i in range(count)]
    return np.stack(pictures, axis=1)


def make_observation(space: Any, t: int, lanes: int) -> Any:
    """Return the observations of all lanes at a step."""
    if isinstance(space, spaces.Dict):
        return {key: make_observation(each, t, lanes) for key, each in space.spaces.items()}
    if space.dtype == np.uint8 and space.shape[0] == 4:
        return make_frames(t, 4, lanes, space.shape[1])
    if space.dtype == np.uint8:
        return np.random.default_rng(t).integers(0, 200, (lanes, *space.shape), np.uint8)
    values = np.arange(lanes)[:, None] * 1000 + t + np.zeros((lanes, *space.shape))
    return values.astype(space.dtype)


@dataclass
class Scene:
    """A memory that was filled with some steps, its oracle, and the stream of further steps."""

    space: Any
    lanes: int = 1
    capacity: int = 40
    ticks: int = 12
    episode: int = 7  # Length in steps.
    still: int = 0  # Number of first steps without any movement.
    settings: dict[str, Any] = field(default_factory=dict)
    with_valid: bool = False
    extras: tuple[str, ...] = ()
    t: int = 0
    rows: dict[str, Any] = field(default_factory=dict)  # Arguments of the interrupted call.
    frozen: Any = None  # A snapshot from before the call.
    stored: list[bytes] = field(default_factory=list)  # Bytes of the extras in that snapshot.

    def __post_init__(self) -> None:
        make = dict(self.settings)
        self.folder = make.pop("folder", None)
        sampler = make.pop("make_sampler", holdall.Uniform)()
        self.memory = holdall.ReplayMemory(
            self.space,
            ACTION,
            self.capacity * self.lanes,
            self.lanes,
            seed=1,
            sampler=sampler,
            extras=dict.fromkeys(self.extras, SMALL),
            _tuning=TUNING,
            **make,
        )
        self.oracle = OracleMemory(self.capacity * self.lanes, self.lanes)
        for _ in range(self.ticks):
            self.add()

    def step(self, t: int) -> dict[str, Any]:
        """Return a step. After the end of an episode, the next observation is unrelated."""
        ends = t % self.episode == self.episode - 1
        now, then = (max(shown - self.still, 0) for shown in (t, t + (500 if ends else 1)))
        made: dict[str, Any] = {
            "obs": make_observation(self.space, now, self.lanes),
            "action": np.full((self.lanes, 2), t, np.float32),
            "reward": np.full(self.lanes, t, np.float32),
            "next_obs": make_observation(self.space, then, self.lanes),
            "terminated": np.full(self.lanes, ends),
            "truncated": np.zeros(self.lanes, np.bool_),
        }
        if self.extras:
            made["extras"] = {name: np.full((self.lanes, 3), t, np.float32) for name in self.extras}
        if self.with_valid:
            made["valid"] = np.arange(self.lanes) + t % 5 != 4
        return made

    def add(self) -> None:
        step = self.step(self.t)
        self.t += 1
        self.memory.add(**step)
        self.oracle.add(**step)

    def continue_and_check(self, steps: int = 3) -> None:
        """Add the next steps, and compare every row."""
        for _ in range(steps):
            self.add()
        self.check(self.memory)

    def check(self, memory: Any) -> None:
        oracle = self.oracle
        assert (memory.next_id, memory.first_id) == (oracle.next_id, max(oracle.first_id, memory.first_id))
        oracle.evict(memory.first_id)  # A budget without a disk tier drops transitions early.
        assert len(memory) == len(oracle)
        ids = oracle.ids
        assert_same_bits(memory.gather(ids), oracle.gather(ids))
        assert len(memory.sample(min(8, len(memory))).ids)

    def check_saved(self, folder: Path) -> None:
        """Save and load, and compare every row."""
        self.memory.save(folder).result(60)
        with holdall.ReplayMemory.load(folder, sampler=type(self.memory.sampler)()) as loaded:
            self.check(loaded)


def make_scenes(tmp_path: Path) -> dict[str, Callable[[], Scene]]:
    """Return memories in different states. The next `add` has to do something else in each of them."""
    spill = {"budget": None, "spill_dir": tmp_path / "spill"}
    return {
        "first tick": lambda: Scene(SMALL, ticks=0),
        "rows": lambda: Scene(SMALL, ticks=9),
        "rows, episode ends": lambda: Scene(SMALL, ticks=7),
        "rows, full": lambda: Scene(SMALL, ticks=52, lanes=4),
        "rows, valid": lambda: Scene(SMALL, ticks=50, lanes=2, with_valid=True),
        "rows, packed": lambda: Scene(SMALL, ticks=15),
        "rows, packed, full": lambda: Scene(SMALL, ticks=63, lanes=2),
        "rows become pairs": lambda: Scene(SMALL, ticks=9, episode=1),
        "rows, paired": lambda: Scene(SMALL, ticks=60, episode=1),
        "window found in a small field": lambda: Scene(spaces.Box(0, 255, (4, 12, 12), np.uint8), ticks=7, episode=100),
        "window found in a large field": lambda: Scene(STACK, ticks=7, episode=100, settings={"budget": None}),
        "window found late": lambda: Scene(STACK, ticks=87, capacity=1600, episode=999, still=80),
        "segment": lambda: Scene(IMAGE, ticks=5, settings={"budget": None}),
        "segment closes": lambda: Scene(IMAGE, ticks=16, settings={"budget": None}),
        "segment is evicted": lambda: Scene(STACK, ticks=55, settings={"budget": None}),
        "Dict, segment closes": lambda: Scene(MIXED, ticks=16, lanes=2, settings={"budget": None}),
        "Dict, spills": lambda: Scene(MIXED, ticks=48, lanes=2, capacity=64, settings=spill),
        "limited": lambda: Scene(IMAGE, ticks=150, capacity=400, settings={"budget": 2_500_000}),
    }


NAMES = tuple(make_scenes(Path()))


def choose_lines(lines: int, points: int | None) -> list[int]:
    """Return the lines at which the call is interrupted: all of them, or `points` random ones."""
    if points is None:
        return list(range(1, lines + 1))
    return sorted(random.Random(lines).sample(range(1, lines + 1), min(points, lines)))


def interrupt_every_line(
    make: Callable[[], Any],
    call: Callable[[Any], Any],
    points: int | None,
    check: Callable[[Any], None],
    *,
    opcodes: bool = False,
) -> None:
    """Interrupt a call at one line after another, each time in a new scene, and call `check` afterwards."""
    scene = make()
    lines = interrupt_at(lambda: call(scene), opcodes=opcodes)
    scene.memory.close()
    for at in choose_lines(lines, points):
        scene = make()
        try:
            interrupt_at(lambda: call(scene), at, opcodes=opcodes)  # noqa: B023  It is called at once.
            check(scene)
        except BaseException as error:
            error.add_note(f"interrupted at line {at} of {lines}")
            raise
        finally:
            scene.memory.close()


def settle_add(scene: Scene) -> None:
    """Continue after an interrupted `add` of step `scene.t`, as a training loop does."""
    step = scene.step(scene.t)
    scene.t += 1
    if scene.memory.next_id > scene.oracle.next_id:
        scene.oracle.add(**step)
    scene.continue_and_check()


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_add_writes_the_whole_step_or_nothing(name: str, points: int | None, tmp_path: Path) -> None:
    make = make_scenes(tmp_path)[name]
    interrupt_every_line(make, lambda scene: scene.memory.add(**scene.step(scene.t)), points, settle_add)


@pytest.mark.parametrize(
    "points", [pytest.param(None, id="all", marks=pytest.mark.nightly), pytest.param(8, id="some")]
)
def test_an_interrupt_between_an_early_drop_and_its_report_loses_no_count(points: int | None) -> None:
    """The capacity is never reached, so every evicted transition was dropped early."""
    several = 16  # One of 16 ticks closes a segment and evicts others.

    def make() -> Scene:
        return Scene(IMAGE, ticks=330, capacity=4_000, settings={"budget": 2_500_000})

    def add_several(scene: Scene) -> None:
        for k in range(several):
            scene.memory.add(**scene.step(scene.t + k))

    def settle(scene: Scene) -> None:
        for _ in range(scene.memory.next_id - scene.oracle.next_id):
            scene.oracle.add(**scene.step(scene.t))
            scene.t += 1
        while not scene.memory.first_id:
            scene.add()
        scene.continue_and_check()
        assert scene.memory.report().dropped_early == scene.memory.first_id

    interrupt_every_line(make, add_several, points, settle)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_signal_handler_that_reads_the_memory_changes_no_batch(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler uses the decoder of the same thread and the same pool of threads, and writes to its own batch."""
    monkeypatch.setenv("HOLDALL_THREADS", threads)
    scene = Scene(STACK, ticks=250, capacity=300, episode=100, settings={"budget": None})
    ids = np.random.default_rng(0).choice(scene.oracle.ids, 400)
    expected = scene.oracle.gather(ids)

    def handle() -> None:
        batch = scene.memory.gather(ids[::-1])
        assert_same_bits(batch, scene.oracle.gather(ids[::-1]))
        batch.obs.fill(7)
        batch.next_obs.fill(7)

    with scene.memory:
        scene.memory.store.wait_idle()
        lines = interrupt_at(lambda: scene.memory.gather(ids))
        for at in range(1, lines + 1):
            made: list[Any] = []
            interrupt_at(lambda: made.append(scene.memory.gather(ids)), at, handle=handle)  # noqa: B023  It is called at once.
            assert_same_bits(made[0], expected)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("name", ["first tick", "rows, full", "rows, packed", "Dict, segment closes", "Dict, spills"])
def test_an_interrupted_extend_writes_all_steps_or_none(name: str, points: int | None, tmp_path: Path) -> None:
    """An interrupt between two steps is raised after the last step."""
    interrupt_every_line(make_scenes(tmp_path)[name], extend, points, settle_extend)


def extend(scene: Scene) -> None:
    steps = [scene.step(scene.t + k) for k in range(EXTENDED)]
    scene.memory.extend(**{key: stack([step[key] for step in steps]) for key in steps[0]})


def settle_extend(scene: Scene) -> None:
    steps = [scene.step(scene.t + k) for k in range(EXTENDED)]
    scene.t += EXTENDED
    written = (scene.memory.next_id - scene.oracle.next_id) // scene.lanes
    assert written in (0, EXTENDED)
    for step in steps[:written]:
        scene.oracle.add(**step)
    scene.continue_and_check()


def stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: stack([value[key] for value in values]) for key in values[0]}
    return np.stack(values)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("with_valid", [False, True])
def test_an_interrupted_sample_draws_once_or_not_at_all(sampler: Any, with_valid: bool, points: int | None) -> None:
    """The generator has the state from before the call or from after it."""

    def make() -> Scene:
        scene = Scene(SMALL, lanes=2, ticks=30, with_valid=with_valid, settings={"make_sampler": sampler})
        scene.memory.sample(4)
        return scene

    twin = make()
    states = [get_generator_state(twin)]
    twin.memory.sample(4)
    states.append(get_generator_state(twin))
    twin.memory.close()

    def check(scene: Scene) -> None:
        assert get_generator_state(scene) in states
        scene.continue_and_check()

    interrupt_every_line(make, lambda scene: scene.memory.sample(4), points, check)


def get_generator_state(scene: Scene) -> Any:
    len(scene.memory)  # A call completes the work of an interrupted one.
    return scene.memory.batch_source.generator.bit_generator.state


@pytest.mark.parametrize("points", POINTS)
def test_an_interrupted_update_of_priorities_sets_all_or_none(points: int | None) -> None:
    """The rule includes the highest priority, which new transitions get."""

    def make() -> Scene:
        scene = Scene(SMALL, lanes=2, ticks=30, settings={"make_sampler": holdall.Prioritized})
        scene.memory.update_priorities(np.arange(4), np.full(4, 2.0))
        return scene

    ids = np.arange(10, 20)
    values = np.arange(10.0)
    kept = []
    for updates in (0, 1):
        twin = make()
        for _ in range(updates):
            twin.memory.update_priorities(ids, values)
        twin.continue_and_check()
        kept.append(read_priorities(twin))
        twin.memory.close()

    def check(scene: Scene) -> None:
        scene.continue_and_check()
        assert read_priorities(scene) in kept

    interrupt_every_line(make, lambda scene: scene.memory.update_priorities(ids, values), points, check)


def read_priorities(scene: Scene) -> tuple[bytes, float, float]:
    scene.memory.sample(2)
    state = scene.memory.sampler.state()
    memory = scene.memory
    held = Held(memory.first_id, memory.next_id, scene.lanes, memory.capacity, memory.store.view())
    return state["scaled"].tobytes(), state["highest"], Likelihood(memory.sampler).compute_total_mass(held)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("name", ["rows, full", "Dict, spills"])
def test_other_interrupted_calls_do_not_change_the_memory(name: str, points: int | None, tmp_path: Path) -> None:
    make = make_scenes(tmp_path)[name]
    calls: dict[str, Callable[[Scene], Any]] = {
        "gather": lambda scene: scene.memory.gather(scene.oracle.ids),
        "relieve": lambda scene: scene.memory.relieve(1 << 20),
        "report": lambda scene: scene.memory.report(),
        "loader": lambda scene: next(scene.memory.loader(4, prefetch=2)),
    }
    for call in calls.values():
        interrupt_every_line(make, call, points, lambda scene: scene.continue_and_check())


@pytest.mark.parametrize("points", POINTS)
def test_an_interrupted_set_flags_sets_all_flags_or_none(points: int | None, tmp_path: Path) -> None:
    def set_flags(memory: Any, scene: Scene) -> None:
        ids = scene.oracle.ids[::3]
        memory.set_flags(ids, np.ones(len(ids), np.bool_), np.ones(len(ids), np.bool_))

    def settle(scene: Scene) -> None:
        len(scene.memory)
        if scene.memory.gather(scene.oracle.ids[:1]).truncated[0]:
            set_flags(scene.oracle, scene)
        scene.continue_and_check()

    interrupt_every_line(
        make_scenes(tmp_path)["Dict, segment closes"], lambda scene: set_flags(scene.memory, scene), points, settle
    )


def compute_no_reward(achieved: Any, _desired: Any, _info: Any) -> Any:
    return np.zeros(len(achieved), np.float32)


# Starts of the sequences are restricted, so the sampler `by` looks at the flags.
FLAG_SAMPLERS: dict[str, Callable[[], Any]] = {
    "Hindsight": lambda: holdall.Hindsight("final", 1.0, compute_no_reward),
    "Sequence by Prioritized": lambda: holdall.Sequence(2, stride=50, by=holdall.Prioritized()),
}


@pytest.mark.parametrize("make_sampler", FLAG_SAMPLERS.values(), ids=FLAG_SAMPLERS)
def test_samplers_draw_by_the_flags_of_an_interrupted_set_flags(make_sampler: Callable[[], Any]) -> None:
    """The sampler draws the same ids as a new sampler of the same memory."""
    goals = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), SMALL))
    ids = np.arange(9, 99, 10)

    def make() -> holdall.ReplayMemory:
        memory = holdall.ReplayMemory(goals, ACTION, 1000, sampler=make_sampler(), seed=0)
        rows = np.arange(101, dtype=np.float32)[:, None, None] + np.zeros((101, 1, 3), np.float32)
        shown = dict.fromkeys(goals, rows)
        memory.extend(
            {key: each[:-1] for key, each in shown.items()},
            np.zeros((100, 1, 2), np.float32),
            np.zeros((100, 1), np.float32),
            {key: each[1:] for key, each in shown.items()},
            np.zeros((100, 1), np.bool_),
            (np.arange(100) == 99)[:, None],
        )
        memory.sample(64)
        return memory

    def set_flags(memory: holdall.ReplayMemory) -> None:
        memory.set_flags(ids, np.ones(len(ids), np.bool_), np.zeros(len(ids), np.bool_))

    def draw_many(memory: holdall.ReplayMemory, sampler: Any) -> list[Any]:
        held = Held(memory.first_id, memory.next_id, 1, memory.capacity, memory.store.view())
        draw = sampler.draw(held, 200, np.random.default_rng(1))
        return [draw.ids.tolist(), None if draw.goals is None else draw.goals.ids.tolist()]

    with make() as memory:
        lines = interrupt_at(lambda: set_flags(memory))
    outcomes = set()
    for at in range(1, lines + 2):  # The last call is not interrupted.
        with make() as memory:
            interrupt_at(lambda: set_flags(memory), at)
            outcomes.add(bool(np.asarray(memory.gather(ids).terminated).all()))
            assert draw_many(memory, memory.sampler) == draw_many(memory, make_sampler()), at
    assert outcomes == {False, True}


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("columns", [1, 2])
def test_an_interrupted_update_writes_all_rows_or_none(columns: int, points: int | None, tmp_path: Path) -> None:
    """The caller may change its arrays after the call. A snapshot from before the call does not change."""
    ids = np.arange(5, 60, 2)
    numbers = itertools.count()

    def make() -> Scene:
        scene = Scene(SMALL, lanes=2, ticks=110, capacity=120, extras=("hidden", "value"))
        scene.folder = tmp_path / f"run{next(numbers)}"
        scene.rows = {name: np.full((len(ids), 3), 9_000, np.float32) for name in ("hidden", "value")[:columns]}
        scene.frozen = scene.memory.store.snapshot()
        scene.stored = stored_extras(scene)
        return scene

    def stored_extras(scene: Scene) -> list[bytes]:
        first_extra = scene.memory.store.columns.first_extra
        columns = (first_extra, first_extra + 1)
        return [segment.parts[each].arrays()["rows"].tobytes() for segment in scene.frozen.segments for each in columns]

    def settle(scene: Scene) -> None:
        assert stored_extras(scene) == scene.stored
        for rows in scene.rows.values():
            rows[:] = -1  # The arrays belong to the caller.
        seen = scene.memory.gather(ids).extras["hidden"]
        if (seen == 9_000).all():
            scene.oracle.update(ids, **{name: np.full_like(rows, 9_000) for name, rows in scene.rows.items()})
        scene.continue_and_check()
        scene.check_saved(scene.folder)

    interrupt_every_line(make, lambda scene: scene.memory.update(ids, **scene.rows), points, settle)


@pytest.mark.parametrize("points", POINTS)
def test_an_interrupted_save_changes_neither_the_memory_nor_its_checkpoints(points: int | None, tmp_path: Path) -> None:
    numbers = itertools.count()

    def make() -> Scene:
        scene = make_scenes(tmp_path / "spill")["Dict, segment closes"]()
        scene.folder = tmp_path / f"run{next(numbers)}"
        scene.memory.save(scene.folder).result(60)
        return scene

    def settle(scene: Scene) -> None:
        scene.continue_and_check()
        scene.check_saved(scene.folder)

    interrupt_every_line(make, lambda scene: scene.memory.save(scene.folder), points, settle)


@pytest.mark.parametrize("points", POINTS)
def test_an_interrupted_load_can_be_repeated(points: int | None, tmp_path: Path) -> None:
    source = make_scenes(tmp_path / "spill")["Dict, segment closes"]()
    source.memory.save(tmp_path / "run").result(60)
    lines = interrupt_at(lambda: holdall.ReplayMemory.load(tmp_path / "run").close())
    for at in choose_lines(lines, points)[:: 1 if points else 8]:
        interrupt_at(lambda: holdall.ReplayMemory.load(tmp_path / "run").close(), at)
        with holdall.ReplayMemory.load(tmp_path / "run") as loaded:
            source.check(loaded)
    source.memory.close()


@pytest.mark.parametrize("points", POINTS)
def test_an_interrupted_close_can_be_repeated(points: int | None, tmp_path: Path) -> None:
    def settle(scene: Scene) -> None:
        scene.memory.close()
        with pytest.raises(holdall.ClosedError):
            len(scene.memory)

    interrupt_every_line(make_scenes(tmp_path)["Dict, spills"], lambda scene: scene.memory.close(), points, settle)


# ---------------------------------------------------------------- rollouts and drop-ins


ROLLOUTS = {"flat": (SMALL, None), "slices": (STACK, None), "compressed": (IMAGE, "speed")}


class Rollout:
    """A rollout memory, and a plain list of the steps that were added to it."""

    def __init__(self, kind: str, steps: int) -> None:
        self.space: Any
        self.space, compress = ROLLOUTS[kind]
        self.memory = holdall.RolloutMemory(self.space, ACTION, 24, 2, compress=compress, seed=0)
        self.rows: list[dict[str, Any]] = []
        self.t = 0
        for _ in range(steps):
            self.add()

    def step(self, t: int) -> dict[str, Any]:
        cut = np.array([t % 5 == 4, False])
        return {
            "obs": make_observation(self.space, t, 2),
            "action": np.full((2, 2), t, np.float32),
            "reward": np.full(2, t, np.float32),
            "terminated": np.zeros(2, np.bool_),
            "truncated": cut,
            "value": np.full(2, t, np.float32),
            "log_prob": np.full(2, t, np.float32),
            "final_obs": make_observation(self.space, 900 + t, 2),
        }

    def add(self) -> None:
        step = self.step(self.t)
        self.t += 1
        self.memory.add(**step)
        self.rows.append(step)

    def finish(self) -> None:
        cuts = sum(int(row["truncated"].sum()) for row in self.rows)
        self.memory.finish(np.zeros(2, np.float32), final_values=np.arange(cuts, dtype=np.float32))

    def continue_and_check(self) -> None:
        """Fill the rollout, finish it and compare every step. Then do the same with a new rollout."""
        for _ in range(2):
            while not self.memory.is_full:
                self.add()
            self.check()
            self.memory.reset()
            self.rows = []

    def check(self) -> None:
        assert len(self.memory) == 2 * len(self.rows)
        finals = [row["final_obs"][row["truncated"]] for row in self.rows if row["truncated"].any()]
        assert_same_bits(self.memory.final_obs(), np.concatenate(finals))
        self.finish()
        seen = 0
        for batch in self.memory.minibatches(7):
            for k, place in enumerate(batch.ids.tolist()):
                row = self.rows[place // 2]
                lane = place % 2
                assert_same_bits(batch.obs[k], row["obs"][lane])
                assert batch.reward[k] == batch.value[k] == row["reward"][lane]
                seen += 1
        assert seen == 2 * len(self.rows)


def settle_rollout(rollout: Rollout) -> None:
    step = rollout.step(rollout.t)
    rollout.t += 1
    if len(rollout.memory) > 2 * len(rollout.rows):
        rollout.rows.append(step)
    rollout.continue_and_check()


def settle_reset(rollout: Rollout) -> None:
    if not len(rollout.memory):
        rollout.rows = []
    rollout.continue_and_check()


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("kind", ROLLOUTS)
def test_an_interrupted_rollout_continues(kind: str, points: int | None) -> None:
    rollouts: Any = {steps: lambda steps=steps: Rollout(kind, steps) for steps in (8, 24)}
    calls: Any = {
        8: [(lambda rollout: rollout.memory.add(**rollout.step(rollout.t)), settle_rollout)],
        24: [
            (lambda rollout: rollout.finish(), lambda rollout: rollout.continue_and_check()),
            (lambda rollout: rollout.memory.reset(), settle_reset),
        ],
    }
    for steps, pairs in calls.items():
        for call, settle in pairs:
            interrupt_every_line(rollouts[steps], call, points, settle)


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("space", [SMALL, MIXED], ids=["Box", "Dict"])
def test_an_interrupted_add_of_the_drop_in_writes_the_whole_step_or_nothing(space: Any, points: int | None) -> None:
    buffers = pytest.importorskip("holdall.sb3")

    class Buffer(Scene):
        """The memory of a drop-in, and an oracle with the same steps."""

        def __post_init__(self) -> None:
            self.buffer = buffers.ReplayBuffer(40, self.space, ACTION, device="cpu", n_envs=self.lanes, budget=None)
            self.memory = self.buffer.memory
            self.oracle = OracleMemory(self.buffer.buffer_size * self.lanes, self.lanes)
            for _ in range(self.ticks):
                self.add()

        def put(self, step: dict[str, Any]) -> None:
            self.buffer.add(
                step["obs"], step["next_obs"], step["action"], step["reward"], step["terminated"], [{}] * self.lanes
            )

        def add(self) -> None:
            step = self.step(self.t)
            self.t += 1
            self.put(step)
            self.oracle.add(**step)

        def check(self, memory: Any) -> None:
            super().check(memory)
            ticks = memory.next_id // self.lanes
            assert (self.buffer.pos, self.buffer.full) == (ticks % self.buffer.buffer_size, ticks >= 20)

    interrupt_every_line(
        lambda: Buffer(space, lanes=2, ticks=26),
        lambda scene: scene.put(scene.step(scene.t)),
        points,
        settle_add,
    )


# ---------------------------------------------------------------- instructions, and real signals


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["rows, episode ends", "rows, full", "segment closes"])
def test_an_add_interrupted_at_any_instruction_writes_the_step_or_nothing(name: str, tmp_path: Path) -> None:
    """Some of these instructions release a lock. A real signal is never handled there."""
    make = make_scenes(tmp_path)[name]
    interrupt_every_line(make, lambda scene: scene.memory.add(**scene.step(scene.t)), None, settle_add, opcodes=True)


def send_signals(seconds: float, tmp_path: Path, seed: int) -> tuple[int, int]:
    """Send signals during calls for some seconds. Return the number of interrupted calls and of all calls."""
    generator = random.Random(seed)
    hits = 0
    calls = 0
    armed = False

    def handler(*_: Any) -> None:
        if armed:
            raise Interrupt

    before = signal.signal(signal.SIGALRM, handler)
    end = time.monotonic() + seconds
    try:
        for name in itertools.cycle(("rows, full", "Dict, segment closes", "segment is evicted", "Dict, spills")):
            scene = make_scenes(tmp_path / "spill")[name]()
            for k in range(60):
                step = scene.step(scene.t)
                added = False
                kind = generator.choice(["add", "add", "add", "extend", "sample", "gather", "save"])
                pause = generator.uniform(1e-6, 400e-6)
                calls += 1
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, pause)
                    if kind == "add":
                        added = True
                        scene.memory.add(**step)
                    elif kind == "extend":
                        extend(scene)
                    elif kind == "sample":
                        scene.memory.sample(8)
                    elif kind == "gather":
                        scene.memory.gather(scene.oracle.ids)
                    elif k % 10 == 0:
                        scene.memory.save(tmp_path / "run")
                    armed = False
                except Interrupt:
                    armed = False
                    hits += 1
                if kind == "extend":
                    settle_extend(scene)
                if added:
                    scene.t += 1
                    if scene.memory.next_id > scene.oracle.next_id:
                        scene.oracle.add(**step)
                if k % 12 == 0:
                    scene.continue_and_check()
            signal.setitimer(signal.ITIMER_REAL, 0)
            scene.continue_and_check()
            scene.check_saved(tmp_path / "run")
            scene.memory.close()
            if time.monotonic() > end:
                return hits, calls
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    raise AssertionError


@pytest.mark.timeout(600, method="thread")  # The other method of pytest-timeout uses the same signal.
@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.nightly)])
def test_real_signals_lose_no_row(seconds: int, tmp_path: Path) -> None:
    hits, calls = send_signals(seconds, tmp_path, seconds)
    assert 0 < hits < calls

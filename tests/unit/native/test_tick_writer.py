"""Ticks that one built-in function writes: only what needs no change, only when nobody is at work; all else as ever."""

from __future__ import annotations

import ctypes
import gc
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.native import one_call
from holdall.storage import rings
from holdall.testing import OracleMemory, assert_same_bits

LANES = 2
PLAIN = spaces.Box(-9, 9, (3,), np.float32)
GOALS = spaces.Dict({"a": PLAIN, "goal": spaces.Box(-9, 9, (2, 2), np.float64), "z": spaces.Discrete(5)})
ACTION = spaces.Box(-1, 1, (2,), np.float32)
CUT, UNCUT = {"TimeLimit.truncated": True}, {"TimeLimit.truncated": False, "other": 3}


def shown(space: Any, t: int) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: shown(each, t) for key, each in space.spaces.items()}
    return (np.zeros((LANES, *space.shape)) + t + np.arange(LANES).reshape(-1, *[1] * len(space.shape))).astype(
        space.dtype
    )


def step(space: Any, t: int) -> list[Any]:
    """Return what `add` takes; every step continues the one before."""
    flags = np.array([t % 7 == 6, False])
    return [
        shown(space, t), np.full((LANES, 2), t, np.float32), np.full(LANES, t, np.float32), shown(space, t + 1), flags,
        np.zeros(LANES, np.bool_),
    ]  # fmt: skip


def begun(space: Any, ticks: int = 3) -> tuple[Any, OracleMemory]:
    """Return a memory that knows its fields, and its oracle."""
    memory, oracle = holdall.ReplayMemory(space, ACTION, 16, LANES), OracleMemory(16, LANES)
    for t in range(ticks):
        memory.add(*step(space, t))
        oracle.add(*step(space, t))
    return memory, oracle


def assert_same(memory: Any, oracle: OracleMemory) -> None:
    assert memory.next_id == oracle.next_id
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


IMAGES = spaces.Box(0, 255, (3, 40, 60), np.uint8)
STACKS = spaces.Box(0, 255, (4, 16, 40), np.uint8)
CAMERA = spaces.Dict({"image": IMAGES, "speed": spaces.Box(-9, 9, (3,), np.float32)})


def pictured(space: Any, t: int) -> Any:
    """Return observations that no other tick has; those of a stack repeat three of the four frames before."""
    if isinstance(space, spaces.Dict):
        return {key: pictured(each, t) for key, each in space.spaces.items()}
    if space is not STACKS:
        return np.random.default_rng(t).integers(0, 200, (LANES, *space.shape)).astype(space.dtype)
    frames = [np.random.default_rng(t + k).integers(0, 9, (LANES, *space.shape[1:]), np.uint8) for k in range(4)]
    return np.stack(frames, axis=1)


def channels_last(obs: Any) -> Any:
    """Return images as they were before their channels were put first: the same elements, in another order."""
    if isinstance(obs, dict):
        return {key: channels_last(each) for key, each in obs.items()}
    return np.ascontiguousarray(obs.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) if obs.ndim == 4 else obs


def picture_step(space: Any, t: int) -> list[Any]:
    given = step(PLAIN, t)
    given[0], given[3] = pictured(space, t), pictured(space, t + 1)
    return given


@pytest.mark.parametrize("arranged", [lambda obs: obs, channels_last], ids=["as stored", "channels last"])
@pytest.mark.parametrize("space", [IMAGES, STACKS, CAMERA], ids=["images", "stacks", "camera"])
@pytest.mark.parametrize("budget", ["auto", None])
def test_images_are_added_at_once(space: Any, arranged: Callable[[Any], Any], budget: Any) -> None:
    """Most ticks are, over many segments that fill, are sealed and leave; not those for which there is more to do."""
    oracle = OracleMemory(400, LANES)
    memory: Any = holdall.ReplayMemory(space, ACTION, 400, LANES, budget=budget)
    at_once = 0
    with memory:
        for t in range(600):
            given = picture_step(space, t)
            oracle.add(*given)
            given[0], given[3] = arranged(given[0]), arranged(given[3])
            ticks = memory.add_at_once(*given)
            assert ticks in (0, t + 1)
            at_once += ticks > 0
            if not ticks:
                memory.add(*given)
            assert not memory._store.large_segments.has_before(t + 1 - 400 // LANES)  # all that left is gone
            if t % 150 == 0:
                assert_same(memory, oracle)
        assert at_once > 300
        assert_same(memory, oracle)


def test_images_that_lie_otherwise_than_the_last_ones_are_left_to_the_general_way() -> None:
    oracle = OracleMemory(400, LANES)
    memory: Any = holdall.ReplayMemory(IMAGES, ACTION, 400, LANES)
    orders: list[Callable[[Any], Any]] = [
        lambda obs: obs,
        channels_last,
        np.asfortranarray,
        lambda obs: np.repeat(obs, 2, axis=3)[..., ::2],
        lambda obs: obs[..., ::-1][..., ::-1],
    ]
    with memory:
        for t in range(300):
            given = picture_step(IMAGES, t)
            oracle.add(*given)
            now, later = (orders[k % len(orders)] for k in (t // 3, (t + t % 2) // 3))
            memory.add(now(given[0]), *given[1:3], later(given[3]), *given[4:])
        assert_same(memory, oracle)


def test_long_ticks_are_left_to_the_way_that_gives_up_the_gil() -> None:
    space = spaces.Box(0, 255, (3, 256, 256), np.uint8)
    with holdall.ReplayMemory(space, ACTION, 400, LANES) as memory:
        for t in range(200):
            memory.add(*picture_step(space, t))
        assert memory.add_at_once(*picture_step(space, 200)) == 0
        assert memory.add_as_is(*picture_step(space, 200)) == 201


def test_a_function_that_outlives_its_memory_writes_to_memory_that_is_there() -> None:
    memory: Any = holdall.ReplayMemory(IMAGES, ACTION, 400, LANES)
    for t in range(200):
        memory.add(*picture_step(IMAGES, t))
    add, parts = memory.add_at_once, [weakref.ref(part) for part in memory._store.large_segments.open.parts]
    del memory
    gc.collect()
    assert all(part() is not None for part in parts)
    add(*picture_step(IMAGES, 200))
    del add
    gc.collect()
    assert all(part() is None for part in parts)


class LikeAnArray(np.ndarray):
    """What is not exactly an array."""


def reordered(obs: Any) -> Any:
    return {key: obs[key] for key in reversed(obs)}


def with_other_keys(obs: Any) -> Any:
    return {"".join(list(key)): each for key, each in obs.items()}  # equal, and other objects


@pytest.mark.parametrize("space", [PLAIN, GOALS], ids=["plain", "goals"])
def test_arrays_that_need_no_change_are_added_at_once(space: Any) -> None:
    """Also over the end of the rings, several times."""
    memory, oracle = begun(space)
    with memory:
        for t in range(3, 40):
            assert memory.add_at_once(*step(space, t), [UNCUT, {}]) == t + 1
            oracle.add(*step(space, t))
        assert_same(memory, oracle)


@pytest.mark.parametrize("change", [OrderedDict, reordered, with_other_keys])
def test_a_dict_is_read_by_its_keys(change: Callable[[Any], Any]) -> None:
    memory, oracle = begun(GOALS)
    with memory:
        given = step(GOALS, 3)
        oracle.add(*given)
        given[0], given[3] = change(given[0]), change(given[3])
        assert memory.add_at_once(*given) == 4
        assert_same(memory, oracle)


WRONG: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "a key too much": (0, lambda obs: obs | {"more": obs["a"]}),
    "a key too few": (3, lambda obs: {key: obs[key] for key in ("a", "z")}),
    "another key": (0, lambda obs: {"b" if key == "a" else key: obs[key] for key in obs}),
    "a key that is no text": (0, lambda obs: {1 if key == "a" else key: obs[key] for key in obs}),
    "no Dict": (0, lambda obs: obs["a"]),
    "nothing": (3, lambda obs: None),
    "a list": (2, list),
    "another shape": (1, lambda rows: rows[:1]),
    "another number of axes": (1, lambda rows: rows[None]),
    "another dtype": (1, lambda rows: rows.astype(np.float64)),
    "another byte order": (1, lambda rows: rows.astype(">f4")),
    "not in one piece": (2, lambda rows: np.repeat(rows, 2)[::2]),
    "columns first": (1, lambda rows: np.asfortranarray(np.arange(4, dtype=np.float32).reshape(2, 2))),
    "a subclass": (2, lambda rows: rows.view(LikeAnArray)),
    "a number": (4, lambda flags: 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_left_to_the_general_way(name: str) -> None:
    """Nothing is written, and the next tick is added at once again."""
    where, change = WRONG[name]
    memory, oracle = begun(GOALS)
    with memory:
        given = step(GOALS, 3)
        given[where] = change(given[where])
        assert memory.add_at_once(*given) == 0
        assert_same(memory, oracle)
        assert memory.add_at_once(*step(GOALS, 3)) == 4


@pytest.mark.parametrize("infos", [[UNCUT, CUT], [CUT, CUT], [CUT, {}], [{"TimeLimit.truncated": None}, CUT]])
def test_episodes_that_a_time_limit_cut_are_added_at_once(infos: Any) -> None:
    """They ended, and were not terminated; a lane that is cut without an end is terminated, as in the general way."""
    memory, oracle = begun(PLAIN)
    cut = np.array([bool(info.get("TimeLimit.truncated")) for info in infos])
    with memory:
        for t, done in enumerate(([True, True], [False, True], [True, False]), start=3):
            given = step(PLAIN, t)
            given[4] = np.array(done)
            assert memory.add_at_once(*given, infos) == t + 1
            given[4:] = [given[4] ^ cut, cut]
            oracle.add(*given)
        assert_same(memory, oracle)


def test_a_cut_in_one_of_many_lanes_is_left_to_the_caller() -> None:
    space, lanes = spaces.Box(-9, 9, (), np.float32), 65
    rows, flags = np.arange(lanes, dtype=np.float32), np.zeros(lanes, np.bool_)
    given: list[Any] = [rows, np.zeros((lanes, 2), np.float32), rows, rows, flags, flags]
    with holdall.ReplayMemory(space, ACTION, 16 * lanes, lanes) as memory:
        memory.add(*given)
        assert memory.add_at_once(*given, [UNCUT] * lanes) == 2
        assert memory.add_at_once(*given, [UNCUT] * 64 + [CUT]) == 0


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("space", [PLAIN, GOALS, CAMERA], ids=["box", "dict", "camera"])
def test_ticks_that_continue_nothing_are_added_at_once(
    space: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reset the next observations of the tick before are kept apart; where most are, they get a ring."""
    monkeypatch.setattr(rings, "_UNSHARED_BEFORE_PAIRING", 150)
    rng = np.random.default_rng(int(10 * share))
    oracle = OracleMemory(100 * LANES, LANES)
    memory: Any = holdall.ReplayMemory(space, ACTION, 100 * LANES, LANES)
    at_once = 0
    with memory:
        for t in range(450):
            given = step(PLAIN, t)
            given[0], given[3] = pictured(space, t), pictured(space, t + 1)
            if rng.random() < share:
                lane = slice(None) if rng.random() < 0.5 else rng.integers(LANES)
                given[0] = _otherwise(given[0], lane)
            oracle.add(*given)
            ticks = memory.add_at_once(*given)
            at_once += ticks > 0
            if not ticks:
                memory.add(*given)
            if t % 50 == 7:
                assert_same(memory, oracle)
                assert_same(pickle.loads(pickle.dumps(memory)), oracle)
        assert_same(memory, oracle)
    assert at_once > (250 if space is CAMERA else 360)


def _otherwise(obs: Any, lane: Any) -> Any:
    if isinstance(obs, dict):
        return {key: _otherwise(each, lane) for key, each in obs.items()}
    changed = obs.copy()
    changed[lane] = 0
    return changed


@pytest.mark.parametrize(
    "infos",
    [
        [CUT], [CUT, UNCUT, UNCUT], (UNCUT, UNCUT), [UNCUT, None], [{"TimeLimit.truncated": np.True_}, {}],
        [{"TimeLimit.truncated": 1}, {}],
    ],
)  # fmt: skip
def test_infos_that_say_more_are_left_to_the_caller(infos: Any) -> None:
    memory, oracle = begun(PLAIN)
    with memory:
        assert memory.add_at_once(*step(PLAIN, 3), infos) == 0
        assert_same(memory, oracle)


def test_a_memory_that_is_closed_while_infos_are_looked_at_takes_nothing() -> None:
    """A key's own comparison runs any code, and lets other threads run: what arguments are compared with is freed."""
    memory, _ = begun(PLAIN)
    pack = memory._open().fast_tick.pack
    assert type(pack(*step(PLAIN, 3), [CUT] * LANES)) is bytes

    class Key(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            memory.close()
            return True

    assert pack(*step(PLAIN, 3), [{Key("TimeLimit.truncated"): True}] * LANES) == 0


def test_nothing_is_added_while_somebody_has_the_lock() -> None:
    """A thread that reads without the GIL has the lock, too."""
    memory, oracle = begun(PLAIN)
    with memory:
        taken, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            with memory._lock:
                taken.set()
                go_on.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        taken.wait(60)
        while_held = memory.add_at_once(*step(PLAIN, 3))
        go_on.set()
        thread.join()
        with memory._lock:
            by_its_own_thread = memory.add_at_once(*step(PLAIN, 3))
        assert (while_held, by_its_own_thread) == (0, 0)
        assert_same(memory, oracle)
        assert memory.add_at_once(*step(PLAIN, 3)) == 4


def test_nothing_is_added_before_an_interrupted_call_is_repaired() -> None:
    memory, oracle = begun(PLAIN)
    with memory:
        store, repaired = memory._store, []
        store.repair.begin(lambda: repaired.append(True))
        assert memory.add_at_once(*step(PLAIN, 3)) == 0
        memory.add(*step(PLAIN, 3))
        oracle.add(*step(PLAIN, 3))
        assert repaired == [True]
        assert memory.add_at_once(*step(PLAIN, 4)) == 5
        oracle.add(*step(PLAIN, 4))
        assert_same(memory, oracle)


def test_a_closed_memory_takes_nothing_and_lets_go_of_its_rings() -> None:
    memory, _ = begun(PLAIN)
    add, rings = memory.add_at_once, [weakref.ref(ring) for _, ring in memory._store.arrays()]
    memory.close()
    gc.collect()
    assert add(*step(PLAIN, 3)) == 0
    assert not any(ring() is not None for ring in rings)


def test_a_memory_is_freed_with_the_last_that_refers_to_it() -> None:
    """The built-in function is in a cycle with the store; the collector sees it."""
    memory, _ = begun(PLAIN)
    store = weakref.ref(memory._store)
    memory._store.repair.begin(memory._store.close)  # what an interrupted call leaves
    del memory
    gc.collect()
    assert store() is None


def test_an_interpreter_with_other_objects_goes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same is stored."""
    monkeypatch.setattr(one_call, "_has_expected_layout", lambda: False)
    memory, oracle = begun(GOALS)
    with memory:
        assert memory.add_at_once(*step(GOALS, 3)) == 0
        memory.add(*step(GOALS, 3))
        oracle.add(*step(GOALS, 3))
        assert_same(memory, oracle)


def test_objects_that_lie_otherwise_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_call._has_expected_layout()
    monkeypatch.setattr(one_call, "_OWNER_AT", 32)
    assert not one_call._has_expected_layout.__wrapped__()
    monkeypatch.undo()
    fields = list(one_call._ArrayFields._fields_)
    for first in range(len(fields) - 1):
        swapped = [*fields[:first], fields[first + 1], fields[first], *fields[first + 2 :]]
        other = type("Other", (ctypes.Structure,), {"_fields_": swapped})
        monkeypatch.setattr(one_call, "_ArrayFields", other)
        assert not one_call._has_expected_layout.__wrapped__(), swapped


@pytest.mark.parametrize("lanes", [1, 16])
def test_next_observations_are_kept_apart_only_where_there_is_room(lanes: int) -> None:
    """Room that was given up, or is too small for one of several fields, is not written to: Python is asked."""
    space = spaces.Box(-9, 9, (2,), np.float64)
    rows = np.random.default_rng(0).random((400, lanes, 2))
    action, flags = np.zeros((lanes, 2), np.float32), np.zeros(lanes, np.bool_)
    oracle = OracleMemory(900 * lanes, lanes)
    memory: Any = holdall.ReplayMemory(space, ACTION, 900 * lanes, lanes)
    with memory:
        for t in range(399):
            is_last = (np.arange(lanes)[:, None] + t) % 7 == 0
            following = np.where(is_last, -rows[t + 1], rows[t + 1])
            given = (rows[t], action, flags.astype(np.float32), following, flags, flags)
            apart = next(iter(memory._open()._rings.small.values())).apart
            before, room = len(apart.held), apart.room
            if t % 42 == 36:
                apart.hold(apart.held)  # as after a run was packed
                assert memory.add_at_once(*given) == 0
                assert (len(apart.held), room[3]) == (before, 0)
            memory.add(*given)
            oracle.add(*given)
            assert len(apart.held) <= len(apart.held.ids)
        assert_same(memory, oracle)


def test_nothing_is_added_at_once_to_rings_that_were_paired_since() -> None:
    """A tick that is one too many that continue nothing is left to the caller; others may add before it is added."""
    memory: Any = holdall.ReplayMemory(PLAIN, ACTION, 4000, LANES)
    oracle = OracleMemory(4000, LANES)
    with memory:
        rings: Any = memory._open()._rings.small
        t = 0
        while rings[0].is_shared:
            given = step(PLAIN, 3 * t)
            if memory.add_at_once(*given) == 0 and memory.add_as_is(*given) == 0:
                if not rings[0].is_shared:
                    given = step(PLAIN, 3 * t - 2)  # of another thread: it continues the tick before
                memory.add(*given)
            oracle.add(*given)
            t += 1
        assert_same(memory, oracle)
        for t in (0, 5):
            memory.add(*step(PLAIN, t))
            oracle.add(*step(PLAIN, t))
        assert memory.add_at_once(*step(PLAIN, 9))
        oracle.add(*step(PLAIN, 9))
        assert_same(memory, oracle)

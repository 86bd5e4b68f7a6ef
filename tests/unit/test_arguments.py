"""Every public argument: a wrong value is refused with the argument's name, before anything changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall import Hindsight, HoldallError, NStep, Prioritized, ReplayMemory, RolloutMemory, Sequence, Uniform
from holdall.testing import assert_same_bits

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
BUTTONS = spaces.Discrete(2)
LANES = 2
NAN = float("nan")
INFINITE = float("inf")
BAD_COUNTS: tuple[Any, ...] = (-1, True, None, "x", 1.5, NAN, [], {}, b"x")
BAD_NUMBERS: tuple[Any, ...] = (-1.0, True, None, "x", NAN, INFINITE, [], {}, b"x")
BAD_TEXTS: tuple[Any, ...] = (5, True, None, NAN, [], {}, b"x")
BAD_PATHS: tuple[Any, ...] = (5, True, NAN, [], {}, b"x")
BAD_FLAGS: tuple[Any, ...] = (5, None, "x", NAN, [], {}, b"x")
BAD_SPACES: tuple[Any, ...] = (5, None, "x", [], {}, spaces.Text(3), spaces.Box)
BAD_SAMPLERS: tuple[Any, ...] = (5, "x", [], {}, Uniform, Prioritized, lambda: None)
BAD_DEVICES: tuple[Any, ...] = (5, True, "nowhere", [], {}, b"x", 2**70, np.zeros(3))
META = torch.zeros(1, device="meta")
BAD_IDS: tuple[Any, ...] = (
    None,
    "x",
    NAN,
    {},
    META,
    [0.5],
    [True],
    [10**9],
    [-7],
    [2**70],
    np.ma.array([0], mask=[True]),
    np.array(["x"]),
    np.array([2**63], np.uint64),
)


def mask(array: Any) -> Any:
    return np.ma.array(array, mask=np.ones_like(array, np.bool_))


def make_step(**others: Any) -> dict[str, Any]:
    rows = np.ones((LANES, 3), np.float32)
    flags = np.zeros(LANES, np.bool_)
    numbers = np.ones(LANES, np.float32)
    named = {"obs": rows, "action": np.zeros(LANES, np.int64), "reward": numbers, "next_obs": rows}
    return named | {"terminated": flags, "truncated": flags} | others


def make_rollout_step(**others: Any) -> dict[str, Any]:
    named = {name: value for name, value in make_step().items() if name != "next_obs"}
    return named | {"value": np.ones(LANES, np.float32), "log_prob": np.ones(LANES, np.float32)} | others


@pytest.fixture
def memory() -> Any:
    with ReplayMemory(VECTOR, BUTTONS, 40, LANES, seed=0, sampler=Prioritized()) as made:
        for _ in range(6):
            made.add(**make_step())
        yield made


@pytest.fixture
def rollout() -> Any:
    with RolloutMemory(VECTOR, BUTTONS, 4, LANES, seed=0) as made:
        made.add(**make_rollout_step())
        made.finish(np.zeros(LANES, np.float32))
        yield made


def assert_refused(argument: str, act: Callable[..., Any], *given: Any, **named: Any) -> None:
    with pytest.raises(HoldallError) as refusal:
        act(*given, **named)
    assert re.match(rf"{argument}\b", str(refusal.value)), str(refusal.value)


def list_cases(table: dict[str, tuple[Any, ...]]) -> Any:
    """Return one test case for every argument and every value that it must refuse."""
    return [
        pytest.param(argument, value, id=f"{argument}={str(value).split(' at 0x')[0][:30]!r}")
        for argument, values in table.items()
        for value in values
    ]


@pytest.mark.parametrize(
    ("argument", "value"),
    list_cases(
        {
            "observation_space": BAD_SPACES,
            "action_space": BAD_SPACES,
            "capacity": BAD_COUNTS,
            "num_envs": BAD_COUNTS,
            "budget": (-1, True, "x", 1.5, NAN, [], {}, b"x", np.zeros(3)),
            "prefer": BAD_TEXTS,
            "spill_dir": BAD_PATHS,
            "device": BAD_DEVICES,
            "store_device": BAD_DEVICES,
            "seed": (-1, True, "x", 1.5, NAN, {}, b"x"),
            "extras": (5, "x", [], {"a": 1}, BUTTONS),
            "sampler": BAD_SAMPLERS,
        }
    ),
)
def test_a_replay_memory_refuses_a_wrong_argument(argument: str, value: Any) -> None:
    given = {"observation_space": VECTOR, "action_space": BUTTONS, "capacity": 40, "num_envs": LANES, argument: value}
    device = "device" if argument == "store_device" else argument  # The delivery checks the device of a store.
    assert_refused(f"({argument}|{device})", ReplayMemory, **given)


@pytest.mark.parametrize("capacity", [*BAD_COUNTS, 0, LANES - 1, 2**61], ids=repr)
def test_a_memory_made_of_a_schema_checks_its_capacity(memory: Any, capacity: Any) -> None:
    assert_refused("capacity", ReplayMemory, memory.schema, None, capacity)


def make_space(leaves: int) -> spaces.Dict:
    return spaces.Dict({str(i): VECTOR for i in range(leaves)})


TOO_LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "too many lanes": ("num_envs", {"num_envs": 2**24, "capacity": 2**40}),
    "too many transitions": ("capacity", {"capacity": 2**61}),
    "too many arrays": ("observation_space", {"observation_space": make_space(300)}),
    "too many extras": ("observation_space, action_space and extras", {"extras": dict(make_space(253))}),
    "too many axes": ("observation_space", {"observation_space": spaces.Box(0, 1, (1,) * 17)}),
    "too many axes of an extra": ("extras", {"extras": {"more": spaces.Box(0, 1, (1,) * 17)}}),
    "too many axes of a reward": ("reward_shape", {"reward_shape": (1,) * 17}),
    "too large an array": ("action_space", {"action_space": spaces.MultiBinary(2**30 + 1)}),
    "too large a reward": ("reward_shape", {"reward_shape": (2**28,)}),
}


@pytest.mark.parametrize(("argument", "options"), TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_replay_memory_refuses_a_size_that_it_could_not_save(argument: str, options: dict[str, Any]) -> None:
    given = {"observation_space": VECTOR, "action_space": BUTTONS, "capacity": 40, **options}
    assert_refused(argument, ReplayMemory, **given)


def test_a_memory_of_254_arrays_is_filled_and_read() -> None:
    space = make_space(253)
    with ReplayMemory(space, BUTTONS, 20) as memory:
        obs = {key: np.full(3, number, np.float32) for number, key in enumerate(space)}
        memory.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        assert_same_bits(memory.gather([0]).obs, {key: row[None] for key, row in obs.items()})


@pytest.mark.parametrize(
    ("argument", "value"),
    list_cases(
        {
            "observation_space": BAD_SPACES,
            "action_space": BAD_SPACES,
            "num_steps": BAD_COUNTS,
            "num_envs": BAD_COUNTS,
            "device": BAD_DEVICES,
            "compress": (5, True, "x", NAN, [], {}, b"x"),
            "seed": (-1, True, "x", 1.5, NAN, {}, b"x"),
            "extras": (5, "x", [], {"a": 1}, BUTTONS),
        }
    ),
)
def test_a_rollout_memory_refuses_a_wrong_argument(argument: str, value: Any) -> None:
    given = {"observation_space": VECTOR, "action_space": BUTTONS, "num_steps": 4, "num_envs": LANES, argument: value}
    assert_refused(argument, RolloutMemory, **given)


@pytest.mark.parametrize("num_steps", [2**62, 2**70])
@pytest.mark.parametrize("compress", [None, "speed"])
@pytest.mark.parametrize("side", [1, 84])
def test_a_rollout_memory_refuses_more_steps_than_fit_into_memory(
    num_steps: int, compress: str | None, side: int
) -> None:
    space = spaces.Box(0, 255, (side, side), np.uint8)
    assert_refused("num_steps", RolloutMemory, space, BUTTONS, num_steps, compress=compress)


SAMPLERS: dict[Any, dict[str, tuple[Any, ...]]] = {
    Prioritized: {"alpha": BAD_NUMBERS, "beta": BAD_NUMBERS, "floor": (0.0, *BAD_NUMBERS)},
    NStep: {"n": (0, *BAD_COUNTS), "gamma": (1.5, *BAD_NUMBERS), "by": BAD_SAMPLERS},
    Sequence: {
        "length": (0, *BAD_COUNTS),
        "burn_in": BAD_COUNTS,
        "stride": (0, *BAD_COUNTS),
        "crossing": BAD_FLAGS,
        "by": BAD_SAMPLERS,
    },
    Hindsight: {
        "strategy": ("x", *BAD_TEXTS),
        "k": BAD_NUMBERS,
        "reward_fn": (5, None, "x"),
        "achieved_key": BAD_TEXTS,
        "desired_key": BAD_TEXTS,
        "by": BAD_SAMPLERS,
    },
}
REQUIRED: dict[Any, dict[str, Any]] = {
    NStep: {"n": 2, "gamma": 0.9},
    Sequence: {"length": 2},
    Hindsight: {"strategy": "future", "k": 4, "reward_fn": len},
}


@pytest.mark.parametrize("kind", SAMPLERS, ids=lambda kind: kind.__name__)
def test_a_sampler_refuses_a_wrong_argument(kind: Any) -> None:
    for argument, values in SAMPLERS[kind].items():
        for value in values:
            given = REQUIRED.get(kind, {}) | {argument: value}
            assert_refused(argument, kind, **given)


CALLS: dict[str, tuple[str, Callable[[ReplayMemory, Any], Any], tuple[Any, ...]]] = {
    "sample": ("batch_size", lambda memory, value: memory.sample(value), (0, 1000, *BAD_COUNTS)),
    "draw": ("batch_size", lambda memory, value: memory.batch_source.draw(value), (0, *BAD_COUNTS)),
    "deliver": ("draw", lambda memory, value: memory.batch_source.deliver(value), (5, None, [0])),
    "gather": ("ids", lambda memory, value: memory.gather(value), (5, [[0]], *BAD_IDS)),
    "are_valid": ("ids", lambda memory, value: memory.are_valid(value), (5, [[0]], *BAD_IDS)),
    "update_priorities of ids": ("ids", lambda memory, value: memory.update_priorities(value, [1.0]), BAD_IDS),
    "update_priorities to": (
        "priorities",
        lambda memory, value: memory.update_priorities([0], value),
        ([NAN], META, [INFINITE], [-1.0], ["x"], [None], [True], 5, [1.0, 2.0], np.ma.array([1.0], mask=[True])),
    ),
    "set_flags of ids": ("ids", lambda memory, value: memory.set_flags(value, [True], [True]), BAD_IDS),
    "set_flags to": (
        "terminated",
        lambda memory, value: memory.set_flags([0], value, [True]),
        (5, None, "x", [1], [True, True], mask([True])),
    ),
    "set_flags to cut": ("truncated", lambda memory, value: memory.set_flags([0], [True], value), (5, None, [1])),
    "update of ids": ("ids", lambda memory, value: memory.update(value, nothing=[1.0]), BAD_IDS[:6]),
    "loader": ("batch_size", lambda memory, value: memory.loader(value), (0, *BAD_COUNTS)),
    "loader ahead": ("prefetch", lambda memory, value: memory.loader(2, prefetch=value), BAD_COUNTS),
    "loader to": ("device", lambda memory, value: memory.loader(2, device=value), BAD_DEVICES),
    "relieve": ("nbytes", lambda memory, value: memory.relieve(value), BAD_COUNTS),
    "save": ("url", lambda memory, value: memory.save(value), (None, *BAD_PATHS)),
    "save keeping": ("keep", lambda memory, value: memory.save("nowhere", keep=value), (0, *BAD_COUNTS)),
    "save with": ("attach", lambda memory, value: memory.save("nowhere", attach=value), (5, "x", [1], {"a": 5})),
    "save and mirror": ("mirror", lambda memory, value: memory.save("nowhere", mirror=value), ("x", *BAD_PATHS)),
    "save and show": ("progress", lambda memory, value: memory.save("nowhere", progress=value), (5, "x", [])),
    "save_every": ("url", lambda memory, value: memory.save_every(value, 9.0), (None, *BAD_PATHS)),
    "save_every so long": (
        "seconds",
        lambda memory, value: memory.save_every("nowhere", value),
        (0, -1, True, "x", NAN, [], b"x"),
    ),
    "save_every so many": (
        "transitions",
        lambda memory, value: memory.save_every("nowhere", transitions=value),
        (0, -1, True, "x", 1.5),
    ),
    "save_every keeping": ("keep", lambda memory, value: memory.save_every("nowhere", 9, keep=value), (0, *BAD_COUNTS)),
    "save_every and mirror": ("mirror", lambda memory, value: memory.save_every("nowhere", 9, mirror=value), ("x", 5)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_refuses_a_wrong_argument_and_changes_nothing(call: str, memory: ReplayMemory, tmp_path: Path) -> None:
    """The rows, the state of the generator and the folder are the same as before."""
    argument, act, values = CALLS[call]
    held = memory.gather(np.arange(12))
    state = memory.batch_source.generator.bit_generator.state
    priorities = memory.sampler.state()
    for value in values:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            assert_refused(argument, act, memory, value)
    assert_same_bits(memory.gather(np.arange(12)), held)
    assert memory.batch_source.generator.bit_generator.state == state
    if call.startswith("update_priorities"):
        memory.update_priorities([], [])
        priorities["scaled"] = memory.sampler.state()["scaled"]
        assert np.unique(priorities["scaled"][:12]).size == 1
    assert not list(tmp_path.iterdir())
    memory.add(**make_step())
    assert len(memory) == 14


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("wrong", [NAN, INFINITE, -INFINITE, -1.0])
def test_infinite_and_negative_priorities_are_refused_for_every_alpha(alpha: float, wrong: float) -> None:
    """Any number to the power of 0 is 1, NaN too."""
    with ReplayMemory(VECTOR, BUTTONS, 40, LANES, sampler=Prioritized(alpha)) as memory:
        memory.add(**make_step())
        assert_refused("priorities holds", memory.update_priorities, [0, 1], np.array([1.0, wrong]))


def list_wrong_arrays(fitting: Any) -> tuple[Any, ...]:
    """Return values that `add` must refuse in place of the array `fitting`."""
    return (
        5,
        "x",
        [[]],
        mask(fitting),
        META,
        fitting.astype(np.complex64),
        fitting.astype(object),
        fitting[:1],
    )


WRONG_EXTRAS: tuple[Any, ...] = (5, "x", [1], {"a": 1})


@pytest.mark.parametrize("name", [*make_step(), "valid", "extras"])
def test_add_refuses_a_wrong_argument_and_adds_nothing(name: str, memory: ReplayMemory) -> None:
    fitting: Any = make_step().get(name, np.ones(LANES, np.bool_))
    wrong = list_wrong_arrays(fitting)
    if name == "extras":
        wrong = (*WRONG_EXTRAS, fitting)
    elif name != "valid":
        wrong = (*wrong, None)
    for value in wrong:
        assert_refused(name, memory.add, **make_step(**{name: value}))
    assert memory.next_id == 12


@pytest.mark.parametrize("name", [*make_rollout_step(), "valid", "extras"])
def test_a_rollout_refuses_a_wrong_argument_and_adds_nothing(name: str, rollout: RolloutMemory) -> None:
    fitting: Any = make_rollout_step().get(name, np.ones(LANES, np.bool_))
    wrong = WRONG_EXTRAS if name == "extras" else list_wrong_arrays(fitting)
    for value in wrong:
        assert_refused(name, rollout.add, **make_rollout_step(**{name: value}))
    assert len(rollout) == LANES


@pytest.mark.parametrize(
    ("argument", "value"),
    list_cases(
        {
            "last_values": (5, None, "x", [1.0], mask(np.zeros(LANES, np.float32)), np.zeros(LANES)),
            "gamma": (1.5, *BAD_NUMBERS),
            "gae_lambda": (1.5, *BAD_NUMBERS),
            "final_values": (5, "x", np.zeros(3, np.float32)),
        }
    ),
)
def test_finish_refuses_a_wrong_argument(argument: str, value: Any, rollout: RolloutMemory) -> None:
    before = next(rollout.minibatches(10)).advantage
    given = {"last_values": np.ones(LANES, np.float32), argument: value}
    assert_refused(argument, rollout.finish, **given)
    assert_same_bits(np.sort(next(rollout.minibatches(10)).advantage), np.sort(before))


@pytest.mark.parametrize("argument", ["batch_size", "epochs", "length"])
@pytest.mark.parametrize("value", [0, *(value for value in BAD_COUNTS if value is not None)], ids=str)
def test_minibatches_and_sequences_refuse_a_wrong_argument(argument: str, value: Any, rollout: RolloutMemory) -> None:
    given = {"batch_size": 2, argument: value}
    assert_refused(argument, rollout.sequences, **given)
    if argument != "length":
        assert_refused(argument, rollout.minibatches, **given)


@pytest.mark.parametrize(
    ("argument", "value"),
    list_cases(
        {
            "capacity": (0, -1, True, "x", 1.5, [], b"x"),
            "device": BAD_DEVICES,
            "budget": (-1, True, "x", 1.5, []),
            "prefer": BAD_TEXTS,
            "spill_dir": BAD_PATHS,
            "sampler": BAD_SAMPLERS,
            "recover": BAD_FLAGS,
            "num_envs": (0, -1, True, "x", 1.5, [], b"x"),
            "url": (None, *BAD_PATHS),
            "timeout": BAD_NUMBERS,
        }
    ),
)
def test_load_refuses_a_wrong_argument(argument: str, value: Any, saved: Path) -> None:
    given = {"url": saved, "sampler": Prioritized(), argument: value}
    assert_refused(argument, ReplayMemory.load, **given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with ReplayMemory(VECTOR, BUTTONS, 40, LANES, sampler=Prioritized()) as memory:
        memory.add(**make_step())
        memory.save(folder).result()
    return folder


def test_shared_observations_refuse_a_wrong_argument() -> None:
    for value in BAD_COUNTS:
        assert_refused("num_envs", holdall.SharedObservations, VECTOR, value)
    for value in (5, "x", []):
        assert_refused("context", holdall.SharedObservations, VECTOR, 2, value)
    shared = holdall.SharedObservations(VECTOR, 2)
    for value in (2, *BAD_COUNTS):
        assert_refused("lane", shared.lane, value)
        assert_refused("lane", shared.write, value, np.ones(3, np.float32))
    for value in (5, None, mask(np.ones(3, np.float32)), np.ones(3)):
        assert_refused("obs", shared.write, 0, value)

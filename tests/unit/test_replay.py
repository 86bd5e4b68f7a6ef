"""ReplayMemory through its public methods: accepted arguments, refused arguments, and returned rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from holdall import (
    ArgumentError,
    Batch,
    ClosedError,
    HoldallError,
    ReplayMemory,
    TransitionIdError,
)
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.oracle import map_leaves
from holdall.testing.strategies import DTYPES, box

LANES = 2
CAPACITY = 12
CAMERA = spaces.Dict(image=box((4, 36, 36), "u1"), state=box((3,), "f4"))
VECTOR = box((3,), "f4")


def make_stream(space: spaces.Space[Any] = CAMERA, **options: Any) -> Stream:
    chosen: dict[str, Any] = {"num_envs": LANES, "plans": [LeafPlan(axis=0)] if space is CAMERA else [], **options}
    return Stream(space, spaces.Discrete(4), chosen.pop("num_envs"), **chosen)


def make_memory(stream: Stream, capacity: int = CAPACITY, **options: Any) -> ReplayMemory:
    return ReplayMemory(
        stream.observation_space, stream.action_space, capacity, stream.num_envs, extras=stream.extras, **options
    )


def add_to_both(stream: Stream, ticks: int, memory: ReplayMemory, oracle: OracleMemory) -> None:
    """Add the next ticks of the stream to the memory and the oracle."""
    for _ in range(ticks):
        tick = stream.tick().arguments()
        memory.add(**tick)
        oracle.add(**tick)


def read_everything(memory: ReplayMemory) -> tuple[int, int, int, Batch]:
    """Return length, ids and rows of a memory without invalid entries."""
    first = memory.first_id
    following = memory.next_id
    return len(memory), first, following, memory.gather(np.arange(first, following))


def assert_unchanged(memory: ReplayMemory, before: tuple[int, int, int, Batch]) -> None:
    after = read_everything(memory)
    assert after[:3] == before[:3]
    assert_same_bits(after[3], before[3])


# ---------------------------------------------------------------- refused arguments change nothing


def replace_arguments(**changes: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: {**given, **{name: change(given[name]) for name, change in changes.items()}}


def remove_state(observation: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in observation.items() if key != "state"}


def change_leaf(key: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda observation: {**observation, key: change(observation[key])}


BAD_ARGUMENTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], list[str]]] = {
    # The mistake: how it is made, and the words of the message for argument, value, rule and remedy.
    "shape": (
        replace_arguments(obs=change_leaf("image", lambda a: a[:, 1:])),
        ["obs['image']", "(2, 3, 36, 36)", "expected (2, 4, 36, 36)", "pass an array of that shape"],
    ),
    "shape of the last argument checked": (
        replace_arguments(truncated=lambda a: a[:, None]),
        ["truncated", "(2, 1)", "expected (2,)", "pass an array of that shape"],
    ),
    "dtype": (
        replace_arguments(next_obs=change_leaf("state", lambda a: np.zeros(a.shape))),
        ["next_obs['state']", "float64", "float32", "holdall never casts. Pass np.asarray"],
    ),
    "dtype of actions": (
        replace_arguments(action=lambda a: a.astype("f4")),
        ["action", "float32", "int64", "holdall never casts. A cast would drop fractions"],
    ),
    "dtype of rewards": (
        replace_arguments(reward=lambda a: np.zeros(a.shape)),
        ["reward", "float64", "the first add had dtype float32", "Pass np.asarray"],
    ),
    "dtype of flags": (
        replace_arguments(terminated=lambda a: a.astype("i8")),
        ["terminated", "int64", "flags are bool", "pass np.asarray"],
    ),
    "too many lanes": (
        replace_arguments(obs=change_leaf("state", lambda a: np.concatenate([a, a]))),
        ["obs['state']", "(4, 3)", "num_envs=2 lanes", "pass an array of that shape"],
    ),
    "too few lanes": (
        replace_arguments(reward=lambda a: a[:1]),
        ["reward", "(1,)", "num_envs=2 lanes", "pass an array of that shape"],
    ),
    "missing key": (
        replace_arguments(next_obs=remove_state),
        ["next_obs", "['image']", "missing ['state']", "pass exactly the space's keys"],
    ),
    "unknown key": (
        replace_arguments(obs=lambda o: {**o, "sound": 1}),
        ["obs", "unknown ['sound']", "pass exactly the space's keys"],
    ),
    "no mapping": (
        replace_arguments(obs=lambda o: o["image"]),
        ["obs is a ndarray", "the space is a Dict", "pass a mapping"],
    ),
    "valid of a wrong dtype": (
        lambda given: {**given, "valid": np.ones(2, "i8")},
        ["valid", "int64", "flags are bool", "pass np.asarray"],
    ),
    "valid of a wrong shape": (
        lambda given: {**given, "valid": np.ones(3, np.bool_)},
        ["valid", "(3,)", "expected (2,)", "pass an array of that shape"],
    ),
    "extras missing": (
        lambda given: {**given, "extras": None},
        ["extras", "missing ['log_prob']", "pass exactly the space's keys"],
    ),
    "extras of a wrong shape": (
        replace_arguments(extras=change_leaf("log_prob", lambda a: a[:, None])),
        ["extras['log_prob']", "(2, 1)", "expected (2,)", "pass an array of that shape"],
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_add_refuses_an_array_that_does_not_fit_and_changes_nothing(
    spoil: Callable[[dict[str, Any]], dict[str, Any]], words: list[str]
) -> None:
    """The message names argument, value, rule and remedy. Every row is as it was, and the next `add` works."""
    stream = make_stream(extras={"log_prob": box((), "f4")})
    memory = make_memory(stream)
    memory.extend(**stream.ticks(9).arguments())
    before = read_everything(memory)
    good = stream.tick().arguments()
    with pytest.raises(ArgumentError) as refusal:
        memory.add(**spoil(good))
    for word in words:
        assert word in str(refusal.value)
    assert_unchanged(memory, before)
    memory.add(**good)
    assert memory.next_id == before[2] + LANES


@pytest.mark.parametrize("at", [0, 2, 4])
def test_extend_refuses_all_steps_if_one_array_does_not_fit(at: int) -> None:
    """Everything is checked before the first step is written."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(3).arguments())
    before = read_everything(memory)
    names = ("obs", "action", "reward", "next_obs", "terminated", "truncated")
    good = stream.ticks(4).arguments()
    bad = {**good, names[at]: map_leaves(lambda a: a[:, :1], good[names[at]])}
    with pytest.raises(ArgumentError, match=rf"^{names[at]}.* 4 steps of num_envs=2 lanes"):
        memory.extend(**bad)
    assert_unchanged(memory, before)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (1.0, r"^reward is a scalar\. extend takes arrays with a leading time axis"),
        ([[1.0], [1.0, 2.0]], r"^reward is a list that NumPy cannot read .*; pass an array"),
    ],
    ids=["scalar", "ragged"],
)
def test_extend_refuses_rewards_without_a_length(reward: Any, message: str) -> None:
    """The number of steps is read from the rewards."""
    stream = make_stream()
    with pytest.raises(ArgumentError, match=message):
        make_memory(stream).extend(**{**stream.ticks(2).arguments(), "reward": reward})


@pytest.mark.parametrize("bad", [-1, -(2**40), 14, 2**62], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        lambda memory, ids: memory.gather(ids),
        lambda memory, ids: memory.set_flags(ids, [True, True], [True, True]),
    ],
    ids=["gather", "set_flags"],
)
def test_ids_that_are_not_held_are_refused(bad: int, use: Callable[[ReplayMemory, list[int]], Any]) -> None:
    """The message names the id, the ids that are held, and the reason why others are not."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(7).arguments())
    before = read_everything(memory)
    with pytest.raises(TransitionIdError) as refusal:
        use(memory, [5, bad])
    message = str(refusal.value)
    assert f"ids holds {bad}" in message
    assert "first_id (2)" in message
    assert "next_id (14)" in message
    assert "evicted" in message
    assert message.endswith("Pass ids that are held.")
    assert_unchanged(memory, before)


@pytest.mark.parametrize("evicted", [0, 1])
def test_evicted_ids_are_refused(evicted: int) -> None:
    """An id is never reused, and an evicted transition is never returned."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(6).arguments())
    memory.gather([evicted])
    memory.add(**stream.tick().arguments())
    with pytest.raises(TransitionIdError, match=rf"ids holds {evicted}\b"):
        memory.gather([evicted])
    memory.gather([evicted + LANES])


@pytest.mark.parametrize(
    "ids",
    [3, [[1, 2]], [1.0], [True], ["a"], None, [[1], [1, 2]], [2**70], np.empty((0, 2), int)],
    ids=["scalar", "two axes", "floats", "flags", "text", "None", "ragged", "too large", "empty with two axes"],
)
def test_ids_are_a_flat_array_of_integers(ids: Any) -> None:
    """Other values are refused. They are never rounded or read as a mask."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(4).arguments())
    with pytest.raises(ArgumentError, match=r"(?i)^ids .*[;.] pass "):
        memory.gather(ids)


def test_ids_beyond_sixty_three_bits_are_refused_by_their_own_name() -> None:
    """An unsigned id does not wrap around into a negative one."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.add(**stream.tick().arguments())
    with pytest.raises(TransitionIdError, match=r"^ids holds 9223372036854775809, .* Pass ids below next_id"):
        memory.gather(np.array([2**63 + 1], np.uint64))


@pytest.mark.parametrize("ids", [[], np.empty(0, np.int64), np.empty(0), ()], ids=["list", "ints", "floats", "tuple"])
def test_no_ids_give_an_empty_batch(ids: Any) -> None:
    """An empty list of ids is accepted, and the batch has the usual shapes and dtypes."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(4).arguments())
    batch = memory.gather(ids)
    assert len(batch) == 0
    assert_same_bits(batch, select_rows(memory.gather([0, 1]), slice(0, 0)))


def test_an_empty_memory_gives_an_empty_batch_and_nothing_else() -> None:
    """Before the first add there is nothing to gather and nothing to draw."""
    memory = make_memory(make_stream())
    assert len(memory) == memory.first_id == memory.next_id == 0
    assert memory.gather([]).obs["image"].shape == (0, 4, 36, 36)
    with pytest.raises(TransitionIdError, match="ids holds 0"):
        memory.gather([0])
    with pytest.raises(ArgumentError, match=r"^batch_size \(1\) is more than the 0 transitions held. Add more first"):
        memory.sample(1)
    assert memory.report().transitions == 0


def test_a_batch_larger_than_the_memory_is_refused() -> None:
    """The message names both sizes and what to do. Invalid entries do not count."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(3).arguments(), valid=np.array([[True, True], [True, False], [True, True]]))
    assert len(memory.sample(5)) == 5
    with pytest.raises(
        ArgumentError, match=r"^batch_size \(6\) is more than the 5 transitions held. Add more first, or"
    ):
        memory.sample(6)


@pytest.mark.parametrize("size", [0, -3, 2.0, True, None, "4"], ids=str)
def test_a_batch_size_is_a_whole_number_of_at_least_one(size: Any) -> None:
    """Anything else is refused by name and value."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(4).arguments())
    with pytest.raises(ArgumentError) as refusal:
        memory.sample(size)
    assert str(refusal.value) == f"batch_size ({size!r}) must be a whole number of at least 1"


@pytest.mark.parametrize("flags", ["terminated", "truncated"])
@pytest.mark.parametrize("bad", [[True], [[True, False]], [1, 0]], ids=["too few", "two axes", "integers"])
def test_set_flags_takes_one_flag_per_id(flags: str, bad: Any) -> None:
    """Both arguments are checked before either is written."""
    stream = make_stream(mishaps=Mishaps(ends=0.0))
    memory = make_memory(stream)
    memory.extend(**stream.ticks(4).arguments())
    before = read_everything(memory)
    given: dict[str, Any] = {"terminated": [True, True], "truncated": [True, True], flags: bad}
    with pytest.raises(ArgumentError, match=rf"^{flags} has .*; pass "):
        memory.set_flags([2, 3], **given)
    assert_unchanged(memory, before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 1}, ["capacity (1)", "at least 2", "num_envs"]),
        ({"capacity": 0}, ["capacity (0)", "at least 2"]),
        ({"capacity": 1e6 + 0.5}, ["capacity (1000000.5)", "whole number"]),
        ({"capacity": True}, ["capacity (True)", "whole number"]),
        ({"capacity": 10**25}, ["capacity (10000000000000000000000000)", "at most", "pass a smaller number"]),
        ({"num_envs": 0}, ["num_envs (0)", "at least 1"]),
        ({"num_envs": None}, ["num_envs (None)", "whole number"]),
        ({"seed": -1}, ["seed (-1)", "non-negative", "Pass None or an integer"]),
        ({"seed": "x"}, ["seed ('x')", "Pass None or an integer"]),
        ({"extras": [1]}, ["extras ([1])", "must map names to spaces", "pass a dict"]),
        ({"observation_space": spaces.Text(3)}, ["observation_space", "Text", "holdall stores", "Encode it"]),
        ({"action_space": "left or right"}, ["action_space", "str", "holdall stores", "Encode it"]),
    ],
    ids=str,
)
def test_the_constructor_refuses_by_argument_value_rule_and_remedy(options: dict[str, Any], words: list[str]) -> None:
    """The refusal comes before the memory exists."""
    with pytest.raises(HoldallError) as refusal:
        ReplayMemory(
            **{"observation_space": VECTOR, "action_space": VECTOR, "capacity": 10, "num_envs": LANES, **options}
        )
    for word in words:
        assert word in str(refusal.value)


USES: dict[str, Callable[[ReplayMemory, dict[str, Any]], Any]] = {
    "add": lambda memory, given: memory.add(**given),
    "extend": lambda memory, given: memory.extend(**map_leaves(lambda a: a[None], given)),
    "sample": lambda memory, _: memory.sample(1),
    "gather": lambda memory, _: memory.gather([2]),
    "set_flags": lambda memory, _: memory.set_flags([2], [True], [False]),
    "update": lambda memory, _: memory.update([2], hidden=np.zeros(1)),
    "len": lambda memory, _: len(memory),
    "first_id": lambda memory, _: memory.first_id,
    "next_id": lambda memory, _: memory.next_id,
    "report": lambda memory, _: memory.report(),
    "pickle": lambda memory, _: pickle.dumps(memory),
    "with": lambda memory, given: memory.__enter__().add(**given),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("space", [CAMERA, VECTOR], ids=["camera", "vector"])
def test_nothing_can_be_done_after_close(use: Callable[[ReplayMemory, dict[str, Any]], Any], space: Any) -> None:
    """The error says that the memory was closed, and what to do. A second `close` does nothing."""
    stream = make_stream(space)
    memory = make_memory(stream)
    memory.extend(**stream.ticks(20).arguments())
    memory.close()
    with pytest.raises(ClosedError, match=r"^The memory was closed\. Make a new ReplayMemory\.$"):
        use(memory, stream.tick().arguments())
    memory.close()


def test_leaving_a_with_block_closes() -> None:
    """It also closes after an error, which is raised again."""
    stream = make_stream()
    with make_memory(stream) as memory:
        memory.add(**stream.tick().arguments())
    with pytest.raises(ClosedError):
        len(memory)
    with pytest.raises(ZeroDivisionError), make_memory(stream) as memory:
        raise ZeroDivisionError
    with pytest.raises(ClosedError):
        len(memory)


# ---------------------------------------------------------------- accepted arguments and returned rows


def select_rows(batch: Batch, rows: Any) -> Batch:
    names = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras", "ids", "weights")
    return Batch(**{name: map_leaves(lambda leaf: leaf[rows], getattr(batch, name)) for name in names})


@pytest.mark.parametrize("capacity", [2, 3, 12, 13])
def test_capacity_is_rounded_down_to_whole_ticks(capacity: int) -> None:
    """All lanes of a tick are added and evicted together."""
    stream = make_stream(VECTOR)
    memory = make_memory(stream, capacity)
    memory.extend(**stream.ticks(20).arguments())
    assert memory.capacity == len(memory) == capacity // LANES * LANES
    assert memory.first_id == 40 - memory.capacity


def test_ids_count_ticks_times_lanes_plus_lane() -> None:
    """An id names one lane of one tick, and is never reused."""
    stream = make_stream(VECTOR, num_envs=3)
    memory = make_memory(stream, 9)
    steps = stream.ticks(5)
    memory.extend(**steps.arguments())
    assert (memory.first_id, memory.next_id, memory.num_envs) == (6, 15, 3)
    assert_same_bits(memory.gather([2 * 3 + 1, 4 * 3 + 2]).obs, np.stack([steps.obs[2, 1], steps.obs[4, 2]]))


@pytest.mark.parametrize("space", [CAMERA, VECTOR, spaces.Discrete(5)], ids=["camera", "vector", "discrete"])
def test_extend_stores_the_rows_that_add_stores(space: spaces.Space[Any]) -> None:
    """Both ways of adding give the same rows."""
    one = make_stream(space)
    other = make_stream(space)
    added = make_memory(one)
    extended = make_memory(other)
    for _ in range(11):
        added.add(**one.tick().arguments())
    extended.extend(**other.ticks(4).arguments())
    extended.extend(**other.ticks(7).arguments())
    assert_same_bits(extended.gather(np.arange(10, 22)), added.gather(np.arange(10, 22)))


def test_extending_by_nothing_changes_nothing() -> None:
    """Zero steps are accepted, also before the first `add`."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(0).arguments())
    assert memory.next_id == 0
    memory.add(**stream.tick().arguments())
    assert memory.next_id == LANES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (5,), (3, 40, 50)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """The rule holds for observations, actions and extras, with NaN payloads and negative zeros."""
    stream = Stream(box(shape, dtype), box(shape, dtype), LANES, extras={"more": box(shape, dtype)}, seed=5)
    memory = make_memory(stream)
    oracle = OracleMemory(CAPACITY, LANES)
    add_to_both(stream, 9, memory, oracle)
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "u1", "?"])
def test_rewards_keep_the_dtype_of_the_first_add(dtype: str) -> None:
    """Rewards have one axis, as flags have."""
    stream = make_stream(VECTOR, reward_dtype=dtype)
    memory = make_memory(stream)
    memory.add(**stream.tick().arguments())
    batch = memory.sample(2)
    assert batch.reward.dtype == np.dtype(dtype)
    assert batch.reward.shape == batch.terminated.shape == batch.truncated.shape == batch.weights.shape == (2,)


C_INTEGERS = [(a, b) for a in "ilqILQ" for b in "ilqILQ" if a != b and np.dtype(a) == np.dtype(b)]
"""Different integer types of C that have the same size, such as long and long long on Linux."""


@pytest.mark.parametrize(("own", "given"), C_INTEGERS)
def test_integer_types_of_c_that_have_the_same_size_are_one_dtype(own: str, given: str) -> None:
    """The rule holds for observations, actions, rewards and extras, in `add`, `extend` and `update`."""
    space = box((3,), own)
    stream = Stream(space, box((), own), LANES, extras={"more": space}, reward_dtype="l", seed=5)
    memory = make_memory(stream)
    oracle = OracleMemory(CAPACITY, LANES)

    def retype(array: Any) -> Any:
        return array.view(given) if array.dtype == np.dtype(given) else array

    for _ in range(2):
        step = stream.tick().arguments()
        memory.add(**map_leaves(retype, step))
        oracle.add(**step)
        memory.add(**step)
        oracle.add(**step)
    steps = stream.ticks(2).arguments()
    memory.extend(**map_leaves(retype, steps))
    oracle.extend(**steps)
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))
    rows = np.arange(3 * len(oracle.ids)).reshape(-1, 3).astype(given)
    memory.update(oracle.ids, more=rows)
    assert_same_bits(memory.gather(oracle.ids).extras["more"], rows.astype(own))


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim > 1 else np.repeat(a, 2)[::2],
    "backwards": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "Fortran's": np.asfortranarray,
    "not aligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "a list": lambda a: a.tolist() if a.dtype in {np.dtype("f8"), np.dtype("i8"), np.dtype("?")} else a,
    "a tensor": lambda a: torch.from_numpy(a.copy()),
}


@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("space", [CAMERA, VECTOR, box((3,), "f8")], ids=["camera", "vector", "doubles"])
def test_the_layout_of_an_array_does_not_matter(space: spaces.Space[Any], lay_out: Callable[[Any], Any]) -> None:
    """Values are copied from transposed, strided, reversed and unaligned arrays."""
    stream = make_stream(space)
    memory = make_memory(stream, 100)
    oracle = OracleMemory(100, LANES)
    for _ in range(12):
        given = stream.tick().arguments()
        oracle.add(**given)
        memory.add(**map_leaves(lay_out, given))
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


def test_images_that_arrive_transposed_have_their_windows_found() -> None:
    """The stacks have channels first, and are views of images with channels last."""
    stream = Stream(box((4, 36, 36), "u1"), spaces.Discrete(2), plans=[LeafPlan(axis=0)], mishaps=Mishaps(ends=0.0))
    memory = make_memory(stream, 1000)
    for _ in range(50):
        given = stream.tick().arguments()
        for name in ("obs", "next_obs"):
            given[name] = np.ascontiguousarray(given[name].transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
            assert not given[name].flags.c_contiguous
        memory.add(**given)
    assert memory.report().fields[0].finding.startswith("window of 4 along axis 0")


@pytest.mark.parametrize("space", [CAMERA, VECTOR, box((4, 16, 16), "u1")], ids=["camera", "vector", "between"])
def test_read_only_arrays_are_accepted(space: spaces.Space[Any]) -> None:
    """`add` writes to none of its arguments."""
    stream = make_stream(space)
    memory = make_memory(stream)
    oracle = OracleMemory(CAPACITY, LANES)
    for _ in range(10):
        given = stream.tick().arguments()
        map_leaves(lambda array: array.setflags(write=False), given)
        memory.add(**given)
        oracle.add(**given)
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


@pytest.mark.parametrize("space", [CAMERA, VECTOR, box((4, 16, 16), "u1")], ids=["camera", "vector", "between"])
def test_arrays_may_be_overwritten_after_add(space: spaces.Space[Any]) -> None:
    """Some environments write every observation into one array. Added rows do not change with it."""
    stream = make_stream(space)
    memory = make_memory(stream, 100)
    oracle = OracleMemory(100, LANES)
    reused = map_leaves(np.array, stream.tick().arguments())
    for _ in range(40):
        given = stream.tick().arguments()
        oracle.add(**given)
        _copy_into(reused, given)
        memory.add(**reused)
        map_leaves(lambda array: array.fill(1), reused)
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


def _copy_into(target: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in value:
            _copy_into(target[key], value[key])
    else:
        target[...] = value


def test_one_array_may_be_obs_and_next_obs() -> None:
    """An environment whose observation did not change passes one array for both."""
    stream = make_stream(VECTOR)
    memory = make_memory(stream)
    for _ in range(4):
        given = stream.tick().arguments()
        memory.add(**{**given, "next_obs": given["obs"]})
    batch = memory.gather(np.arange(8))
    assert_same_bits(batch.obs, batch.next_obs)


def test_ids_may_be_asked_for_in_any_order_and_twice() -> None:
    """A batch has the order of its ids."""
    stream = make_stream()
    memory = make_memory(stream)
    memory.extend(**stream.ticks(6).arguments())
    all_rows = memory.gather(np.arange(12))
    ids = np.array([11, 0, 3, 3, 11, 7], np.int16)
    assert_same_bits(memory.gather(ids), select_rows(all_rows, ids))


def test_the_true_final_observation_is_kept_at_both_kinds_of_ending() -> None:
    """Where an episode ends, `next_obs` is its last observation, and not the first one of the next episode."""
    stream = make_stream(mishaps=Mishaps(ends=0.3))
    memory = make_memory(stream, 1000)
    steps = stream.ticks(200)
    memory.extend(**steps.arguments())
    ended = np.flatnonzero((steps.terminated | steps.truncated).reshape(-1))
    assert steps.terminated.any()
    assert steps.truncated.any()
    batch = memory.gather(ended)
    for key in ("image", "state"):
        flat = steps.next_obs[key].reshape(-1, *steps.next_obs[key].shape[2:])
        assert_same_bits(batch.next_obs[key], flat[ended])
    assert_same_bits(batch.terminated, steps.terminated.reshape(-1)[ended])


def test_invalid_entries_are_not_counted_and_not_returned() -> None:
    """With Gymnasium's next-step autoreset, such a lane has an id, but no transition."""
    stream = make_stream(num_envs=3)
    memory = make_memory(stream, 9)
    masks = np.array([[True, False, True], [True, True, True], [False, False, False], [True, True, False]])
    for mask in masks:
        memory.add(**stream.tick().arguments(), valid=mask)
    assert len(memory) == 5
    for number in (6, 7, 8, 11):
        with pytest.raises(TransitionIdError, match=rf"ids holds {number}, .*valid=False.* Leave that id out"):
            memory.gather([number])
    memory.gather([3, 4, 5, 9, 10])
    memory.add(**stream.tick().arguments())
    assert len(memory) == 5


def test_len_counts_the_valid_entries_at_every_tick() -> None:
    """`len` is exact while ticks with and without a mask are added and evicted."""
    stream = make_stream(VECTOR, num_envs=4)
    generator = np.random.default_rng(0)
    memory = make_memory(stream, 28)
    oracle = OracleMemory(28, 4)
    for tick in range(120):
        given = stream.tick().arguments()
        if 10 <= tick < 80 and tick % 3:
            given["valid"] = generator.random(4) < 0.6
        memory.add(**given)
        oracle.add(**given)
        assert len(memory) == len(oracle)
    assert len(memory) == 28


def test_set_flags_changes_the_flags_of_its_ids_and_nothing_else() -> None:
    """Some frameworks mark the end of the last episode after they added it."""
    stream = make_stream(mishaps=Mishaps(ends=0.2))
    memory = make_memory(stream)
    oracle = OracleMemory(CAPACITY, LANES)
    add_to_both(stream, 9, memory, oracle)
    memory.set_flags([16, 17], [True, False], [False, True])
    oracle.set_flags([16, 17], [True, False], [False, True])
    assert_same_bits(memory.gather(oracle.ids), oracle.gather(oracle.ids))


@pytest.mark.parametrize("space", [CAMERA, VECTOR, box((4, 16, 16), "u1")], ids=["camera", "vector", "between"])
@pytest.mark.parametrize("ticks", [0, 1, 5, 9, 50])
@pytest.mark.parametrize(
    "again",
    [lambda memory: pickle.loads(pickle.dumps(memory)), copy.deepcopy, copy.copy],
    ids=["pickle", "deep copy", "copy"],
)
def test_a_copy_of_a_memory_has_its_rows_and_its_next_draws(space: spaces.Space[Any], ticks: int, again: Any) -> None:
    """Steps can be added to the copy, and the original does not change."""
    stream = make_stream(space)
    memory = make_memory(stream, 24, seed=3)
    oracle = OracleMemory(24, LANES)
    add_to_both(stream, ticks, memory, oracle)
    other = again(memory)
    original = None if ticks == 0 else read_everything(memory)
    for tick in range(20):
        if ticks + tick:
            assert_same_bits(other.gather(oracle.ids), oracle.gather(oracle.ids))
        given = stream.tick().arguments()
        other.add(**given)
        oracle.add(**given)
    if original is not None:
        assert_unchanged(memory, original)
        fresh = again(memory)
        assert fresh.sample(2).ids.tolist() == memory.sample(2).ids.tolist()


def test_len_is_right_if_the_first_invalid_entry_follows_an_eviction() -> None:
    """Ticks that were evicted before the first invalid entry do not count."""
    space = spaces.Box(-1, 1, (3,), np.float32)
    memory = ReplayMemory(space, spaces.Discrete(2), 20, 2)
    obs = np.zeros((2, 3), np.float32)
    flags = np.zeros(2, np.bool_)
    for _ in range(57):
        memory.add(obs, np.zeros(2, np.int64), np.zeros(2), obs, flags, flags)
    memory.add(obs, np.zeros(2, np.int64), np.zeros(2), obs, flags, flags, valid=np.array([True, False]))
    assert len(memory) == 19
    for _ in range(9):
        memory.add(obs, np.zeros(2, np.int64), np.zeros(2), obs, flags, flags)
        assert len(memory) == 19
    memory.add(obs, np.zeros(2, np.int64), np.zeros(2), obs, flags, flags)
    assert len(memory) == 20

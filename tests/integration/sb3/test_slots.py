"""Reads and writes of the buffer's arrays, as in code around Stable-Baselines3."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.errors import HoldallError

from .environments import VECTOR, make_dict_space
from .pair import Case, Pair, assert_same_bits

SLOTS = np.array([3, 0, 16, 3])
LANES = np.array([1, 2, 0, 3])
KEYS: dict[str, Any] = {
    "a slot": 4,
    "the last slot": -1,
    "a NumPy integer": np.int64(7),
    "all": slice(None),
    "an ellipsis": ...,
    "a range": slice(2, 9),
    "every third, backwards": slice(None, None, -3),
    "an empty range": slice(5, 5),
    "slots": SLOTS,
    "a list": [1, 5],
    "a table of slots": SLOTS.reshape(2, 2),
    "a mask": np.arange(17) % 2 == 0,
    "slot and lane": (6, 2),
    "last slot and lane": (-1, -1),
    "a range and a lane": (slice(1, 8), 3),
    "a slot and all lanes": (2, slice(None)),
    "two ranges": (slice(0, 4), slice(1, 3)),
    "pairs": (SLOTS, LANES),
    "slots of one lane": (SLOTS, 1),
    "slots and a range of lanes": (SLOTS, slice(0, 2)),
}
INNER_KEYS: dict[str, Any] = {
    "pairs, whole rows": (SLOTS, LANES, slice(None)),
    "pairs and an element": (SLOTS, LANES, 0),
    "an element": (3, 1, 2),
    "a range of elements": (slice(0, 5), 1, slice(1, 3)),
    "the last element": (4, 1, -1),
    "everything, one element": (slice(None), slice(None), 1),
}
CASES = [
    Case(VECTOR, lanes=4),
    Case(spaces.Box(0, 255, (4, 36, 36), np.uint8), lanes=4, stacked=True),
    Case(make_dict_space((3, 40, 40)), lanes=4, transposed=True),
]


@pytest.fixture(params=[9, 17, 40], ids=["filling", "just full", "wrapped"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Return a pair of buffers with seventeen slots of four lanes, after some ticks."""
    pair = Pair(CASES[0])
    pair.feed(request.param)
    return pair


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("ticks", [9, 40])
def test_every_array_reads_as_sb3s(case: Case, ticks: int) -> None:
    """The rule holds for every kind of key. Unused slots are read as zeros."""
    pair = Pair(case)
    pair.feed(ticks)
    for name, theirs, ours in pair.list_arrays():
        for described, key in KEYS.items():
            assert_same_bits(theirs[key], ours[key], f"{name} at {described}")
        if theirs.ndim > 2 and "gear" not in name:
            for described, key in INNER_KEYS.items():
                if name != "actions" or described != "an element":  # Actions have only two elements.
                    assert_same_bits(theirs[key], ours[key], f"{name} at {described}")


def test_every_array_has_the_shape_and_dtype_of_sb3s(pair: Pair) -> None:
    """The test compares shape, dtype, number of axes and length."""
    for _, theirs, ours in pair.list_arrays():
        assert (ours.shape, ours.dtype, ours.ndim, len(ours)) == (theirs.shape, theirs.dtype, theirs.ndim, len(theirs))


def test_a_slot_out_of_range_is_an_index_error(pair: Pair) -> None:
    for name, theirs, ours in pair.list_arrays():
        for key in (17, -18, (0, 4), [0, 17]):
            with pytest.raises(IndexError):
                theirs[key]
            with pytest.raises(IndexError):
                ours[key]
            assert name


def test_the_last_step_may_be_marked_as_an_end(pair: Pair) -> None:
    """`_setup_learn` writes `dones[pos] = True`: all lanes of the newest slot."""
    last = (pair.ours.pos - 1) % pair.ours.buffer_size
    for buffer in (pair.plain, pair.ours):
        buffer.dones[last] = True
    pair.assert_same_arrays()
    pair.assert_same_samples(batch=200)


def test_the_last_step_may_be_marked_as_a_time_limit(pair: Pair) -> None:
    """`truncate_last_trajectory` writes `dones[pos - 1]`, then `timeouts[pos - 1]`. -1 is the last slot."""
    for buffer in (pair.plain, pair.ours):
        buffer.dones[buffer.pos - 1] = True
        buffer.timeouts[buffer.pos - 1] = True
    pair.assert_same_arrays()
    pair.assert_same_samples(batch=200)


def test_flags_may_be_set_and_cleared_in_any_order(pair: Pair) -> None:
    """Each array has the values that were written to it last."""
    newest = pair.ours.pos - 1
    writes = [("timeouts", True), ("dones", True), ("dones", False), ("timeouts", False), ("dones", True)]
    for name, value in writes:
        for buffer in (pair.plain, pair.ours):
            getattr(buffer, name)[newest] = value
        pair.assert_same_arrays()
        pair.assert_same_samples(batch=200)


def test_flags_of_one_lane_or_several_slots_may_be_written(pair: Pair) -> None:
    """The value is one flag, or one flag for each transition."""
    for buffer in (pair.plain, pair.ours):
        buffer.dones[3, 1] = True
        buffer.timeouts[np.array([0, 2, 5]), np.array([0, 0, 3])] = np.array([1.0, 0.0, 1.0])
        buffer.dones[4:7] = np.array([True, False, True, False])
        buffer.dones[1:9, 2] = 1
    pair.assert_same_arrays()
    pair.assert_same_samples(batch=200)


def test_a_time_limit_without_an_end_is_stored_as_given() -> None:
    """An environment may report a time limit without being done. Stable-Baselines3 stores both as they are."""
    pair = Pair(Case(VECTOR))
    for buffer in (pair.plain, pair.ours):
        one = np.ones((1, 5), np.float32)
        flags = (np.zeros(1, np.float32), np.array([False]), [{"TimeLimit.truncated": True}])
        buffer.add(one, one, one[:, :2], *flags)
    pair.assert_same_arrays()


TIME_LIMITS: dict[str, list[Any]] = {
    "an array of one": [np.array([1.0])],
    "an array of no axis": [np.array(True)],
    "NumPy's bools": [np.True_],
    "whole numbers": [1],
    "numbers": [1.0],
    "no time limit": [np.array([0.0])],
}


@pytest.mark.parametrize("given", TIME_LIMITS)
@pytest.mark.parametrize("done", [True, False])
def test_time_limits_may_have_any_type(given: str, done: bool) -> None:
    """Arrays of another buffer may be passed to `extend`, for example."""
    pair = Pair(Case(VECTOR))
    one = np.ones((1, 5), np.float32)
    for buffer in (pair.plain, pair.ours):
        infos = [{"TimeLimit.truncated": TIME_LIMITS[given][0]}]
        buffer.add(one, one, one[:, :2], np.zeros(1, np.float32), np.array([done]), infos)
        buffer.extend([one], [one], [one[:, :2]], [np.zeros(1)], [np.array([float(done)])], [infos])
    pair.assert_same_arrays()
    pair.assert_same_samples()


def test_time_limits_of_several_environments_may_have_any_type() -> None:
    """They are given for some environments, in different types, or once for all."""
    pair = Pair(Case(VECTOR, lanes=3))
    one = np.ones((3, 5), np.float32)
    given_infos: list[list[dict[str, Any]]] = [
        [{"TimeLimit.truncated": np.True_}, {}, {"TimeLimit.truncated": 0}],
        [{"TimeLimit.truncated": 1}],
    ]
    for infos in given_infos:
        for buffer in (pair.plain, pair.ours):
            buffer.add(one, one, one[:, :2], np.zeros(3, np.float32), np.array([1.0, 0.0, 1.0]), infos)
    pair.assert_same_arrays()
    # Stable-Baselines3 refuses None, which says nothing.
    pair.ours.add(
        one,
        one,
        one[:, :2],
        np.zeros(3),
        np.ones(3),
        [{"TimeLimit.truncated": None}, {"TimeLimit.truncated": True}, {}],
    )
    assert pair.ours.timeouts[2].tolist() == [0, 1, 0]


@pytest.mark.parametrize("given", [0.5, 2, float("nan"), -1])
def test_a_time_limit_that_is_not_a_flag_is_refused(given: float) -> None:
    pair = Pair(Case(VECTOR))
    one = np.ones((1, 5), np.float32)
    with pytest.raises(HoldallError, match=r"TimeLimit\.truncated"):
        pair.ours.add(one, one, one[:, :2], np.zeros(1), np.ones(1), [{"TimeLimit.truncated": given}])
    assert pair.ours.pos == 0


def test_unused_slots_of_a_buffer_marked_as_full_are_zeros() -> None:
    """Stable-Baselines3's own tests of dtypes draw such slots."""
    for case in CASES:
        pair = Pair(case)
        pair.plain.full = pair.ours.full = True
        pair.assert_same_samples()


@pytest.mark.parametrize("name", ["rewards", "observations", "mean", "max", "iteration"])
def test_reading_an_array_takes_little_additional_memory(name: str) -> None:
    """The arrays of images have 30 MB each. They are read in pieces, and no buffer of that size remains."""
    read_as: dict[str, Any] = {
        "mean": lambda buffer: buffer.observations.mean(),
        "max": lambda buffer: np.max(buffer.observations),
        "iteration": lambda buffer: np.array([image.sum() for image in buffer.observations]),
    }
    pair = Pair(Case(spaces.Box(0, 255, (3, 100, 100), np.uint8)), buffer_size=1_000)
    for _ in range(20):
        step = next(pair.steps)
        for _ in range(50):
            pair.ours.add(*step)
    pair.ours.memory.store.wait_idle()  # Choosing a codec takes memory, too.

    def read_all() -> Any:
        return read_as[name](pair.ours) if name in read_as else np.asarray(getattr(pair.ours, name))

    read_all()  # Threads allocate memory for the longest unit once.
    tracemalloc.start()
    read = read_all()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak - read.nbytes < 20_000_000
    assert pair.ours.report().staging_bytes < 20_000_000


@pytest.mark.parametrize("name", ["observations", "next_observations", "actions", "rewards"])
def test_observations_actions_and_rewards_cannot_be_written_to(name: str) -> None:
    """Without the error, the write would have no effect."""
    pair = Pair(CASES[0])
    pair.feed(5)
    with pytest.raises(HoldallError, match=name):
        getattr(pair.ours, name)[0] = 0
    pair.assert_same_arrays()


@pytest.mark.parametrize("key", [None, (..., 0, 0), (0, 1, [0, 2]), (slice(3), SLOTS % 4, 0)], ids=str)
def test_keys_with_elements_of_rows_read_as_sb3s(pair: Pair, key: Any) -> None:
    """The keys have new axes, leading ellipses, arrays of elements, and arrays whose axes NumPy moves to the front."""
    assert_same_bits(pair.plain.observations[key], pair.ours.observations[key], str(key))

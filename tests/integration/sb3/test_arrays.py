"""The arrays of holdall's buffers can be read like NumPy arrays. The results are those of SB3's arrays."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from holdall.errors import ArgumentError

from .environments import VECTOR, make_dict_space
from .pair import Case, Pair, assert_same_bits

CASES = [
    Case(VECTOR, lanes=3),
    Case(spaces.Box(0, 255, (4, 6, 5), np.uint8), lanes=2, stacked=True),
    Case(make_dict_space((3, 40, 40)), lanes=2, transposed=True),
]
NAMES = ["observations", "next_observations", "actions", "rewards", "dones", "timeouts"]
READS: dict[str, Callable[[Any], Any]] = {
    "mean": lambda a: a.mean(),
    "mean of each slot": lambda a: a.mean(axis=1),
    "np.mean": np.mean,
    "sum": lambda a: a.sum(),
    "np.sum over environments": lambda a: np.sum(a, axis=1, keepdims=True),
    "least and most": lambda a: [a.min(), a.max(), np.min(a), np.max(a)],
    "any and all": lambda a: [a.any(), a.all(), np.any(a), np.all(a)],
    "std": lambda a: a.std(),
    "copy": lambda a: a.copy(),
    "np.array": np.array,
    "np.asarray in float64": lambda a: np.asarray(a, np.float64),
    "astype": lambda a: a.astype(np.float16),
    "reshape": lambda a: a.reshape(-1),
    "np.reshape": lambda a: np.reshape(a, (a.shape[0], -1)),
    "flatten": lambda a: a.flatten(),
    "swapaxes": lambda a: a.swapaxes(0, 1),
    "transposed": lambda a: a.T,
    "bytes": lambda a: [a.nbytes, a.size, a.ndim, a.itemsize, a.shape, a.dtype, len(a)],
    "equal": lambda a: a == 0.5,
    "more, from the left": lambda a: 1 - a,
    "greater": lambda a: a > 0.25,
    "arithmetic": lambda a: (a - 1) * 2 / 3 + a,
    "negative": lambda a: np.negative(a.astype(np.float32)),
    "ufunc": lambda a: np.sqrt(np.abs(a.astype(np.float64))),
    "reduce": lambda a: np.add.reduce(a, axis=0),
    "into another array": lambda a: np.add(a, 1, out=np.empty(a.shape, np.float64)),
    "concatenate": lambda a: np.concatenate([a, a]),
    "where": lambda a: np.where(a > 0, a, 0),
    "iteration": list,
    "list": lambda a: a.tolist(),
    "in": lambda a: [0 in a, 12345 in a],
    "mask of elements": lambda a: a[a > 0.25],
    "torch": lambda a: torch.as_tensor(a).numpy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda a: pickle.loads(pickle.dumps(a)),
}


@cache
def make_pair(number: int, ticks: int) -> Pair:
    pair = Pair(CASES[number], buffer_size=14 * CASES[number].lanes)
    pair.feed(ticks)
    return pair


def assert_same(theirs: Any, ours: Any, name: str) -> None:
    if isinstance(theirs, list):
        assert isinstance(ours, list)
        assert len(ours) == len(theirs)
        for one, other in zip(theirs, ours, strict=True):
            assert_same(one, other, name)
    elif isinstance(theirs, np.ndarray | np.generic):
        assert isinstance(ours, np.ndarray if isinstance(theirs, np.ndarray) else np.generic), name
        assert_same_bits(theirs, ours, name)
    else:
        assert theirs == ours, name


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("ticks", [9, 33], ids=["filling", "wrapped"])
def test_every_read_of_an_array_gives_the_result_of_sb3s_array(number: int, ticks: int) -> None:
    """The reads are methods, NumPy's functions, operators, iteration, copies and torch."""
    for name, theirs, ours in make_pair(number, ticks).list_arrays():
        for described, read in READS.items():
            assert_same(read(theirs), read(ours), f"{described} of {name}")


@pytest.mark.parametrize("compare", [operator.eq, operator.lt, operator.add, operator.mul])
def test_two_arrays_of_a_buffer_can_be_combined(compare: Callable[[Any, Any], Any]) -> None:
    pair = make_pair(0, 33)
    assert_same(
        compare(pair.plain.rewards, pair.plain.dones), compare(pair.ours.rewards, pair.ours.dones), compare.__name__
    )
    # One of both may be a plain array.
    assert_same(compare(pair.plain.rewards, pair.plain.dones), compare(pair.plain.rewards, pair.ours.dones), "left")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_swap_and_flatten_is_sb3s(number: int) -> None:
    pair = make_pair(number, 33)
    for name, theirs, ours in pair.list_arrays():
        assert_same_bits(pair.plain.swap_and_flatten(theirs), pair.ours.swap_and_flatten(ours), name)


@st.composite
def keys(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """Draw any key that NumPy accepts, and some that it refuses."""
    basic = npst.basic_indices(shape, allow_newaxis=True, max_dims=len(shape) + 2)
    length = draw(st.integers(1, 4))
    part = st.one_of(
        st.integers(-3, 3),
        st.integers(-3, 3).map(np.int64),
        st.slices(shape[0]),
        st.none(),
        st.just(...),
        st.booleans(),
        st.lists(st.integers(-2, 1), min_size=length, max_size=length),
        npst.arrays(np.int64, st.sampled_from([(length,), (2, length), ()]), elements=st.integers(-2, 1)),
        st.sampled_from(shape).flatmap(lambda size: npst.arrays(np.bool_, size)),
        npst.arrays(np.bool_, shape[:2]),
        npst.arrays(np.bool_, shape[1:]),
    )
    mixed = st.lists(part, min_size=1, max_size=len(shape) + 1).map(tuple)
    masks = st.integers(1, len(shape)).flatmap(lambda axes: npst.arrays(np.bool_, shape[:axes]))
    return draw(st.one_of(basic, mixed, mixed, masks, part))


@settings(max_examples=max(400, settings().max_examples))
@given(data=st.data())
def test_any_key_gives_the_result_of_the_plain_array(data: Any) -> None:
    """If NumPy refuses a key, holdall refuses it with the same kind of error."""
    number = data.draw(st.sampled_from([0, 1]), "case")
    pair = make_pair(number, data.draw(st.sampled_from([9, 33]), "ticks"))
    name = data.draw(st.sampled_from(NAMES), "name")
    theirs = getattr(pair.plain, name)
    ours = getattr(pair.ours, name)
    assert_same_key(theirs, ours, data.draw(keys(theirs.shape), "key"))


def assert_same_key(theirs: Any, ours: Any, key: Any) -> None:
    try:
        expected = theirs[key]
    except (IndexError, ValueError) as error:
        with pytest.raises(type(error)):
            ours[key]
        return
    got = ours[key]
    assert_same(expected, got, repr(key))
    if isinstance(expected, np.ndarray) and expected.size:
        # NumPy returns a view here, which can change the buffer. holdall's result is read-only instead.
        assert got.flags.writeable == (not np.shares_memory(expected, theirs)), repr(key)


@pytest.mark.parametrize(
    "key",
    [
        (..., 0),
        (..., 0, 0, 0, 0, 0),
        (0, 0, 0, 0, 0),
        (..., slice(0, 2)),
        (..., None),
        (0, ..., -1),
        (slice(None), [0, 1], slice(None), 0),
        True,
        (True, 1),
        [],
    ],
    ids=str,
)
def test_keys_of_earlier_mistakes_are_read_right(key: Any) -> None:
    pair = make_pair(1, 33)
    assert_same_key(pair.plain.observations, pair.ours.observations, key)


@settings(max_examples=max(60, settings().max_examples // 3))
@given(data=st.data())
@example(data=None)
def test_flags_are_written_under_any_key(data: Any) -> None:
    """`dones` and `timeouts` are equal afterwards, or both writes raise the same kind of error."""
    pair = Pair(CASES[0], buffer_size=24)
    pair.feed(15)
    for _ in range(3):
        name = "dones" if data is None else data.draw(st.sampled_from(["dones", "timeouts"]), "name")
        key = (..., 0) if data is None else data.draw(keys((8, 3)), "key")
        value = 1 if data is None else data.draw(st.sampled_from([0, 1, True, [1, 0, 1], [[1], [0]]]), "value")
        try:
            getattr(pair.plain, name)[key] = value
        except (IndexError, ValueError, TypeError) as error:
            with pytest.raises(type(error)):
                getattr(pair.ours, name)[key] = value
        else:
            getattr(pair.ours, name)[key] = value
        assert_same_bits(getattr(pair.plain, name), getattr(pair.ours, name), f"{name}[{key!r}]")
    pair.assert_same_samples()


def test_flags_are_assigned_and_changed_in_place() -> None:
    pair = Pair(CASES[0], buffer_size=24)
    pair.feed(15)
    for buffer in (pair.plain, pair.ours):
        buffer.dones = np.ones((8, 3), np.float32)
        buffer.timeouts *= 0
        buffer.timeouts[2:4] = buffer.dones[2:4]
        np.multiply(buffer.dones, [1, 0, 1], out=buffer.dones)
    pair.assert_same_arrays()
    pair.assert_same_samples()


@pytest.mark.parametrize("name", ["observations", "next_observations", "actions", "rewards"])
@pytest.mark.parametrize("number", [0, 2])
def test_other_arrays_cannot_be_written_to(name: str, number: int) -> None:
    """The error of an assignment or a write names the array. Views of it are read-only."""
    pair = Pair(CASES[number], buffer_size=24)
    pair.feed(15)
    with pytest.raises(ArgumentError, match=name):
        setattr(pair.ours, name, getattr(pair.plain, name))
    array = getattr(pair.ours, name)
    for one in array.values() if isinstance(array, dict) else [array]:
        with pytest.raises(ArgumentError, match=name):
            one[3] = 0
        with pytest.raises(ArgumentError, match=name):
            one += 1  # noqa: PLW2901  The test tries this.
        with pytest.raises(ValueError, match="read-only"):
            one[3][0] = 0
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(one)[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            one.fill(0)
    pair.assert_same_arrays()


def test_flags_that_cannot_be_stored_are_refused() -> None:
    """Stable-Baselines3's array would store half an end, and an end in an unused slot."""
    pair = Pair(CASES[0], buffer_size=24)
    pair.feed(3)
    with pytest.raises(ArgumentError, match=r"dones.*0 or 1"):
        pair.ours.dones[0] = 0.5
    with pytest.raises(ArgumentError, match=r"dones.*have no transition"):
        pair.ours.dones[5] = 1

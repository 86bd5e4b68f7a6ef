"""The oracle and its comparison. The comparison finds every difference of one bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from holdall import ArgumentError, TransitionIdError
from holdall.testing import OracleMemory, Stream, assert_same_bits
from holdall.testing.strategies import box

SPACE = spaces.Dict(image=box((2, 3), "f4"), pair=spaces.Tuple([spaces.Discrete(3), box((), "f8")]))


def fill(ticks: int, capacity: int = 6, lanes: int = 2, **options: Any) -> tuple[OracleMemory, Stream]:
    stream = Stream(SPACE, spaces.Discrete(3), lanes)
    oracle = OracleMemory(capacity, lanes)
    for _ in range(ticks):
        oracle.add(**stream.tick().arguments(), **options)
    return oracle, stream


def test_the_oracle_holds_whole_ticks_and_counts_ids() -> None:
    """An id is tick times lanes plus lane. The oldest tick is evicted."""
    oracle, _ = fill(5, capacity=7)
    assert (len(oracle), oracle.first_id, oracle.next_id) == (6, 4, 10)
    assert oracle.ids.tolist() == [4, 5, 6, 7, 8, 9]


def test_the_oracle_returns_the_rows_that_were_added() -> None:
    """Rows have the nesting of the space."""
    oracle = OracleMemory(20, 2)
    stream = Stream(SPACE, spaces.Discrete(3), 2)
    steps = stream.ticks(4)
    oracle.extend(**steps.arguments())
    batch = oracle.gather([5, 0])
    assert batch.obs["image"].tobytes() == steps.obs["image"][2, 1].tobytes() + steps.obs["image"][0, 0].tobytes()
    assert batch.next_obs["pair"][0].tolist() == [steps.next_obs["pair"][0][2, 1], steps.next_obs["pair"][0][0, 0]]
    assert batch.ids.tolist() == [5, 0]
    assert batch.weights.tolist() == [1, 1]


def test_the_oracle_keeps_copies() -> None:
    """Later changes of an added or a returned array do not change the oracle."""
    oracle, stream = fill(0)
    given = stream.tick().arguments()
    expected = given["obs"]["image"].copy()
    oracle.add(**given)
    given["obs"]["image"][:] = 0
    oracle.gather([0]).obs["image"][:] = 1
    assert_same_bits(oracle.gather([0, 1]).obs["image"], expected)


def test_the_oracle_neither_counts_nor_returns_invalid_entries() -> None:
    oracle, _ = fill(2, valid=np.array([True, False]))
    assert len(oracle) == 2
    assert oracle.ids.tolist() == [0, 2]
    with pytest.raises(TransitionIdError, match=r"ids holds 3, .*valid=False"):
        oracle.gather([0, 3])


@pytest.mark.parametrize("bad", [-1, 3, 10], ids=["negative", "evicted", "not added"])
def test_the_oracle_refuses_ids_that_are_not_held(bad: int) -> None:
    oracle, _ = fill(5)
    with pytest.raises(TransitionIdError, match=f"ids holds {bad}, but 4 to 9 are held"):
        oracle.gather([4, bad])


def test_an_empty_oracle_refuses_to_gather() -> None:
    """It has no space, so it does not know the shapes of an empty batch."""
    with pytest.raises(ArgumentError, match="Add a tick first"):
        OracleMemory(4).gather([])
    oracle, _ = fill(1)
    assert oracle.gather([]).obs["image"].shape == (0, 2, 3)


def test_set_flags_changes_flags_in_the_oracle() -> None:
    oracle, _ = fill(3)
    oracle.set_flags([4], [True], [True])
    batch = oracle.gather([4, 5])
    assert batch.terminated.tolist()[0]
    assert batch.truncated.tolist()[0]


# ---------------------------------------------------------------- comparing


def make_two_batches() -> tuple[Any, Any]:
    oracle, _ = fill(3)
    return oracle.gather(oracle.ids), oracle.gather(oracle.ids)


def test_equal_batches_are_the_same() -> None:
    """Copies are equal, also where they contain NaNs."""
    assert_same_bits(*make_two_batches())


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (np.array([0.0]), np.array([-0.0])),
        (np.array([0x7FC00001], "u4").view("f4"), np.array([0x7FC00002], "u4").view("f4")),
        (np.array([1], "i4"), np.array([1], "i8")),
        (np.array([1], "i4"), np.array([1], "u4")),
        (np.array([[1]]), np.array([1])),
        (np.zeros((0, 3)), np.zeros((0, 2))),
        ({"a": np.zeros(1)}, {"b": np.zeros(1)}),
        ({"a": np.zeros(1), "b": np.zeros(1)}, {"b": np.zeros(1), "a": np.zeros(1)}),
        ((np.zeros(1),), (np.zeros(1), np.zeros(1))),
        ([np.zeros(1)], (np.zeros(1),)),
        (np.zeros(1), {"a": np.zeros(1)}),
    ],
    ids=[
        *("sign of zero", "payload of a NaN", "width", "sign of a dtype", "an axis more", "shape of nothing"),
        *("keys", "order of keys", "length of a tuple", "kind of nest", "no nest"),
    ],
)
def test_any_difference_is_found(got: Any, expected: Any) -> None:
    """NumPy says that some of these values are equal, but their bits differ."""
    with pytest.raises(AssertionError):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("field", ["obs", "action", "reward", "next_obs", "terminated", "truncated", "ids", "weights"])
def test_every_field_of_a_batch_is_compared(field: str) -> None:
    """One bit in one field is enough, and the message says where."""
    batch, expected = make_two_batches()
    value = getattr(batch, field)
    leaf = value["image"] if isinstance(value, dict) else value
    leaf.reshape(-1)[-1:].view(np.uint8)[0] ^= 1
    with pytest.raises(AssertionError, match=rf"^{field}.* differs in 1 of 6 rows; row 5"):
        assert_same_bits(batch, expected)


def test_extras_are_compared() -> None:
    """Extras are compared like other fields."""
    batch, expected = make_two_batches()
    with pytest.raises(AssertionError, match="extras"):
        assert_same_bits(batch, replace(expected, extras={"more": np.zeros(6)}))


def test_tensors_are_compared_as_arrays() -> None:
    assert_same_bits(torch.tensor([1.0, float("nan")]), np.array([1.0, np.nan], "f4"))
    with pytest.raises(AssertionError):
        assert_same_bits(torch.tensor([1.0, -0.0]), np.array([1.0, 0.0], "f4"))

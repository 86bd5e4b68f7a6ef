"""SumTree finds slots in proportion to their numbers, and its sums depend on the numbers only."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from holdall._native import SumTree


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 9, 64, 65, 1000])
def test_a_point_is_found_in_the_slot_that_a_running_sum_gives(slots: int) -> None:
    """The numbers are small integers, so that all sums are exact."""
    generator = np.random.default_rng(slots)
    numbers = generator.integers(0, 5, slots).astype(float)
    numbers[generator.integers(slots)] = 7.0
    tree = SumTree(slots)
    tree.put(np.arange(slots), numbers)
    assert tree.total == numbers.sum()
    points = np.arange(0, numbers.sum(), 0.5)
    expected = np.searchsorted(np.cumsum(numbers), points, side="right")
    found, shares = tree.find((points + 0.25) / numbers.sum())
    assert found.tolist() == expected.tolist()
    assert shares.tolist() == (numbers[expected].min() / numbers[expected]).astype(np.float32).tolist()


@pytest.mark.parametrize("changes", [1, 30, 900])
def test_a_tree_depends_on_its_numbers_only(changes: int) -> None:
    """The order of changes does not matter, to the last bit."""
    generator = np.random.default_rng(changes)
    grown = SumTree(5000)
    for _ in range(20):
        grown.put(generator.integers(0, 5000, changes), generator.random(changes))
        grown.update(generator.integers(0, 5000, changes), generator.random(changes) + 0.1, 0, 5000, 2.0)
    built = SumTree(5000)
    built.put(np.arange(5000), grown.values(np.arange(5000)))
    assert built.total.hex() == grown.total.hex()
    points = generator.random(20_000)
    assert built.find(points)[0].tobytes() == grown.find(points)[0].tobytes()


def test_slots_that_are_zero_are_never_found() -> None:
    """The rule also holds for a point that rounding has moved beyond the last number."""
    tree = SumTree(100)
    tree.put(np.arange(0, 90, 3), np.random.default_rng(0).random(30) * 1e-3)
    points = np.append(np.random.default_rng(1).random(1000), [0.0, 1.0, np.nextafter(1.0, 2.0)])
    found, _ = tree.find(points)
    assert (tree.values(found) > 0).all()
    assert (found % 3 == 0).all()


def test_the_last_number_of_a_slot_counts() -> None:
    """A slot may occur twice in one call, and one number may be given for all slots."""
    tree = SumTree(8)
    tree.put(np.array([3, 3]), np.array([5.0, 2.0]))
    assert tree.total == 2.0
    tree.put(np.array([3, 4]), 1.0)
    assert tree.total == 2.0


def test_numbers_are_set_by_id_and_evicted_ids_are_ignored() -> None:
    """Ids below `first_id` change neither slots nor `highest`."""
    tree = SumTree(10, 3.0)
    tree.update(np.array([12, 3, 12]), np.array([1.0, 7.0, 4.0]), 8, 18, 9.0)
    assert tree.values(np.arange(10)).tolist() == [0, 0, 4.0, 0, 0, 0, 0, 0, 0, 0]
    assert tree.highest == 4.0
    tree.raise_highest(2.0)
    assert tree.highest == 4.0
    tree.raise_highest(5.0)
    assert tree.highest == 5.0


@pytest.mark.parametrize(
    ("ids", "values", "error"),
    [
        ([13, 18], [1.0, 1.0], IndexError),
        ([13, 14], [8.0, 0.0], ValueError),
        ([13, 14], [8.0, np.nan], ValueError),
        ([13], [9.5], ValueError),
        ([13, 14], [1.0], ValueError),
    ],
)
def test_a_refused_update_changes_nothing(ids: list[int], values: list[float], error: type[Exception]) -> None:
    """Arguments are checked before the first number is set."""
    tree = SumTree(10, 3.0)
    with pytest.raises(error):
        tree.update(np.array(ids), np.array(values), 8, 18, 9.0)
    assert tree.total == 0.0
    assert tree.highest == 3.0


@pytest.mark.parametrize(
    ("slots", "values", "error"),
    [
        ([0, 10], [1.0, 1.0], IndexError),
        ([0, -1], [1.0, 1.0], IndexError),
        ([0], [-1.0], ValueError),
        ([0], [np.inf], ValueError),
        ([0, 1], [1.0], ValueError),
    ],
)
def test_a_refused_put_changes_nothing(slots: list[int], values: list[float], error: type[Exception]) -> None:
    """A slot that does not exist would be outside of the tree's memory."""
    tree = SumTree(10)
    with pytest.raises(error):
        tree.put(np.array(slots), np.array(values))
    assert tree.total == 0.0
    with pytest.raises(IndexError):
        tree.values(np.array([10]))


def test_a_pickled_tree_has_the_same_numbers_sums_and_highest() -> None:
    tree = SumTree(100, 7.0)
    tree.put(np.arange(100), np.random.default_rng(0).random(100))
    copy = pickle.loads(pickle.dumps(tree))
    assert copy.total.hex() == tree.total.hex()
    assert copy.highest == 7.0
    out = np.empty(30)
    copy.copy_to(out)
    assert out.tolist() == tree.values(np.arange(30)).tolist()


def test_a_tree_has_at_least_one_slot() -> None:
    """A tree that is too large for the memory is refused, too."""
    with pytest.raises(ValueError, match="slots is 0"):
        SumTree(0)
    with pytest.raises(ValueError, match="from 1 to"):
        SumTree(1 << 49)
    with pytest.raises((MemoryError, ValueError)):
        SumTree(1 << 47)


def test_numbers_are_copied_to_a_contiguous_array_only() -> None:
    tree = SumTree(8)
    tree.put(np.arange(8), 3.0)
    refused: list[Any] = [np.zeros(8)[::2], np.zeros((2, 2)), np.zeros(4, np.float32)]
    for out in refused:
        with pytest.raises(TypeError, match="contiguous and writable one-dimensional float64"):
            tree.copy_to(out)
        assert not out.any()
    copied = np.zeros(4)
    tree.copy_to(copied)
    assert copied.tolist() == [3.0] * 4

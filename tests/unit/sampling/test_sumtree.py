"""The sum tree: draws in proportion, and depends on its leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from holdall.sampling.prioritized import SumTree


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 9, 64, 65, 1000])
def test_a_point_falls_on_the_slot_whose_numbers_it_lies_between(slots: int) -> None:
    """As in a running sum, for numbers that add up without rounding."""
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
def test_a_tree_depends_on_its_leaves_alone(changes: int) -> None:
    """However many changes led there, the sums have the bits of a tree that was built at once."""
    generator = np.random.default_rng(changes)
    grown = SumTree(5000)
    for _ in range(40):
        grown.put(generator.integers(0, 5000, changes), generator.random(changes))
        assert grown.total > 0
    built = SumTree(5000)
    built.put(np.arange(5000), grown.values(np.arange(5000)))
    assert built.total.hex() == grown.total.hex()
    assert built._nodes.tobytes() == grown._nodes.tobytes()


def test_nothing_is_found_that_holds_nothing() -> None:
    """Not even by a point that rounding put beyond the last number."""
    tree = SumTree(100)
    tree.put(np.arange(0, 90, 3), np.random.default_rng(0).random(30) * 1e-3)
    points = np.append(np.random.default_rng(1).random(1000), [0.0, 1.0, np.nextafter(1.0, 2.0)])
    found, _ = tree.find(points)
    assert (tree.values(found) > 0).all()
    assert (found % 3 == 0).all()


def test_of_equal_slots_the_last_number_counts() -> None:
    """Also when they are set in one go."""
    tree = SumTree(8)
    tree.put(np.array([3, 3]), np.array([5.0, 2.0]))
    assert tree.total == 2.0


def test_numbers_are_set_by_id_and_evicted_ids_are_skipped() -> None:
    """Slots are ids modulo the capacity; what is refused changes nothing."""
    tree = SumTree(10)
    assert tree.update(np.array([12, 3, 12]), np.array([1.0, 7.0, 4.0]), (8, 18, 10), 9.0) == 4.0
    assert tree.values(np.arange(10)).tolist() == [0, 0, 4.0, 0, 0, 0, 0, 0, 0, 0]
    for ids, values in (([13, 18], [1.0, 1.0]), ([13, 14], [1.0, 0.0]), ([13, 14], [1.0, np.nan]), ([13], [9.5])):
        assert tree.update(np.array(ids), np.array(values), (8, 18, 10), 9.0) is None
    assert tree.total == 4.0

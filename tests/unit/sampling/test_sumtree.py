"""The sum tree: draws in proportion, and depends on its leaves alone."""

from __future__ import annotations

import numpy as np
import pytest

from holdall.native import compiled_library
from holdall.sampling.prioritized import SumTree


@pytest.fixture(params=["compiled", "portable"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either of the two ways, where both are there."""
    if request.param == "compiled" and compiled_library() is None:
        pytest.skip("the compiled loops were not built")
    monkeypatch.setenv("HOLDALL_KERNELS", "" if request.param == "compiled" else "portable")
    return str(request.param)


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


def test_both_ways_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums, slots and numbers, after changes of every size."""
    if compiled_library() is None:
        pytest.skip("the compiled loops were not built")
    monkeypatch.setenv("HOLDALL_KERNELS", "")
    compiled = SumTree(3000)
    monkeypatch.setenv("HOLDALL_KERNELS", "portable")
    portable = SumTree(3000)
    assert compiled._library is not None
    assert portable._library is None
    generator = np.random.default_rng(0)
    for count in [1, 2, 17, 100, 256, 1000] * 3:
        slots = generator.integers(0, 3000, count)
        values = generator.random(count) if count % 2 else float(generator.random())
        points = generator.random(500)
        for tree in (compiled, portable):
            tree.put(slots, values)
        assert compiled._nodes.tobytes() == portable._nodes.tobytes()
        slots_found, shares = compiled.find(points)
        expected_slots, expected_shares = portable.find(points)
        assert slots_found.tolist() == expected_slots.tolist()
        assert shares.tobytes() == expected_shares.tobytes()
        given = (slots, np.atleast_1d(values).repeat(1 if count % 2 else count), (0, 3000, 3000), 10.0)
        assert compiled.update(*given) == portable.update(*given)
        assert compiled._nodes.tobytes() == portable._nodes.tobytes()


def test_numbers_are_set_by_id_and_evicted_ids_are_skipped() -> None:
    """Slots are ids modulo the capacity; what is refused changes nothing."""
    tree = SumTree(10)
    assert tree.update(np.array([12, 3, 12]), np.array([1.0, 7.0, 4.0]), (8, 18, 10), 9.0) == 4.0
    assert tree.values(np.arange(10)).tolist() == [0, 0, 4.0, 0, 0, 0, 0, 0, 0, 0]
    for ids, values in (([13, 18], [1.0, 1.0]), ([13, 14], [1.0, 0.0]), ([13, 14], [1.0, np.nan]), ([13], [9.5])):
        assert tree.update(np.array(ids), np.array(values), (8, 18, 10), 9.0) is None
    assert tree.total == 4.0

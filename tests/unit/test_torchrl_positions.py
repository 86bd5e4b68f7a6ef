"""`PositionMap`: which transitions the positions of a storage have."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torchrl")

from holdall.torchrl.positions import PositionMap


def make_map() -> PositionMap:
    """Return 5 positions of 2 cells, of which three were written: 3 first, then 1, then 0."""
    positions = PositionMap((5, 2))
    positions.record(np.array([3, 1]), first_id=10)
    positions.record(np.array([0]), first_id=14)
    return positions


def test_cells_of_a_position_have_ids_that_follow_each_other() -> None:
    positions = make_map()
    assert positions.find_ids([0, 3, 1]).tolist() == [[14, 15], [10, 11], [12, 13]]
    assert positions.find_ids((1, 1)).tolist() == 13
    assert positions.find_ids_of_cells(np.array([7, 0])).tolist() == [11, 14]


def test_a_position_that_was_not_written_has_no_ids() -> None:
    positions = make_map()
    assert positions.is_written([0, 1, 3])
    assert not positions.is_written([0, 2])
    with pytest.raises(IndexError, match="2 positions that were not written yet"):
        positions.find_ids([0, 2])


def test_an_index_selects_from_the_given_number_of_positions() -> None:
    positions = make_map()
    assert positions.find_ids(-1, positions=2).tolist() == [12, 13]
    with pytest.raises(IndexError):
        positions.find_ids(3, positions=2)


def test_positions_are_listed_by_age() -> None:
    positions = make_map()
    assert positions.list_by_age().tolist() == [3, 1, 0]
    assert positions.list_by_age(max_ids=4).tolist() == [3, 1]
    assert PositionMap((5,)).list_by_age(max_ids=4).tolist() == []
    given = np.array([0, 3, 2])
    assert given[positions.order_by_age(given)].tolist() == [2, 3, 0]


def test_ids_before_another_are_found_also_after_the_oldest_was_replaced() -> None:
    positions = make_map()
    assert not positions.has_id_before(10)
    assert positions.has_id_before(11)
    positions.record(np.array([3]), first_id=16)
    assert not positions.has_id_before(12)
    assert positions.has_id_before(13)
    assert not PositionMap((5,)).has_id_before(99)


@pytest.mark.parametrize(("first_id", "next_id", "is_within"), [(10, 16, True), (11, 16, False), (10, 15, False)])
def test_a_packed_map_is_restored_and_compared_with_the_ids_of_a_memory(
    first_id: int, next_id: int, is_within: bool
) -> None:
    restored = PositionMap.unpack(make_map().pack(), (5, 2))
    assert restored.find_ids([0, 3, 1]).tolist() == [[14, 15], [10, 11], [12, 13]]
    assert restored.has_only_ids_within(first_id, next_id) == is_within


@pytest.mark.parametrize("shape", [(4, 2), (6, 2)], ids=["fewer positions", "more positions"])
def test_a_packed_map_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        PositionMap.unpack(make_map().pack(), shape)

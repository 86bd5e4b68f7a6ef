"""Thinning: peaks and troughs are never lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdall.tools.report.page import choose_positions


@given(st.lists(st.floats(-1e12, 1e12), max_size=3_000), st.integers(4, 200))
def test_both_ends_the_smallest_and_the_largest_are_kept(values: list[float], most: int) -> None:
    array = np.array(values)
    chosen = choose_positions(array, most)
    assert (np.diff(chosen) > 0).all()
    assert len(chosen) <= max(most, 4)
    if values:
        assert (chosen[0], chosen[-1]) == (0, len(values) - 1)
        assert array[chosen].min() == array.min()
        assert array[chosen].max() == array.max()


def test_every_part_of_a_series_keeps_its_peak() -> None:
    values = np.zeros(10_000)
    values[[17, 3_333, 9_000]] = (1, 2, 3)
    assert {17, 3_333, 9_000} <= set(choose_positions(values, 600).tolist())


def test_a_short_series_is_not_thinned() -> None:
    assert choose_positions(np.arange(5.0), 600).tolist() == [0, 1, 2, 3, 4]

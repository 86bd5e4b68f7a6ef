"""Scales: round values, named units, and an end at or above the largest value."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdall.tools.report.charts import bytes_scale, limited_scale, number, number_scale, seconds_scale
from holdall.units import format_seconds

GIB = 2**30


@given(st.floats(0, 1e18))
def test_a_scale_holds_the_largest_value_and_has_few_ticks(largest: float) -> None:
    for make in (bytes_scale, number_scale, seconds_scale):
        scale = make(largest)
        assert scale.end >= largest * (1 - 1e-9)
        assert 0 <= len(scale.ticks) <= 10
        assert all(0 <= scale.share(tick) <= 1 for tick in scale.ticks)
        assert scale.share(2 * scale.end) == 1


def test_bytes_are_written_in_round_binary_units() -> None:
    scale = bytes_scale(6.2 * GIB)
    assert [scale.text(tick) for tick in scale.ticks] == ["0", "2 GiB", "4 GiB", "6 GiB", "8 GiB"]
    small = bytes_scale(323 * 2**20)
    assert [small.text(tick) for tick in small.ticks] == ["0", "128 MiB", "256 MiB", "384 MiB"]


def test_a_limit_is_drawn_unless_it_would_flatten_the_rest() -> None:
    assert limited_scale(300.0, 700.0).end >= 700
    assert limited_scale(300.0, 1_250.0).end < 1_250
    assert limited_scale(300.0, 1_250.0, sight=6.0).end >= 1_250
    assert limited_scale(300.0, 200.0).end >= 300


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.0654, "65.4 ms"), (1.25, "1.25 s"), (59, "59 s"), (90, "1 min 30 s"), (900, "15 min"),
     (3_600, "1 h"), (5_400, "1 h 30 min"), (86_400, "1 d"), (90_000, "1 d 1 h")],
)  # fmt: skip
def test_times_are_written_as_people_say_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (50, "50"), (1351.2, "1,351"), (52.46, "52.5"), (0.1234, "0.123")]
)
def test_numbers_have_the_digits_that_are_of_use(value: float, text: str) -> None:
    assert number(value) == text

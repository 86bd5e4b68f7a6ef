"""Durations as pages and tables show them."""

from __future__ import annotations

import pytest

from holdall.units import format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0654, "65.4 ms"),
        (1.25, "1.25 s"),
        (59, "59 s"),
        (90, "1 min 30 s"),
        (900, "15 min"),
        (3_600, "1 h"),
        (5_400, "1 h 30 min"),
        (86_400, "1 d"),
        (90_000, "1 d 1 h"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

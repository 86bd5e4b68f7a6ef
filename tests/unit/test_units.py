"""Sizes in bytes as text, choices among words, and numbers within bounds."""

import math
import re
from typing import Any

import pytest

from holdall.checks import require_choice, require_number
from holdall.errors import ArgumentError
from holdall.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (16 * 2**20, "16.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (3000 * 2**30, "3000.0 GiB"),
    ],
)
def test_bytes_are_written_with_binary_units(count: int, text: str) -> None:
    """A unit has 1024 of the unit below it."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("12 B", 12),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("1.5MiB", 1_572_864),
        ("500 MB", 500_000_000),
        ("2kB", 2_000),
        ("1TiB", 2**40),
    ],
)
def test_a_size_is_read_by_the_unit_that_it_names(size: str | int, count: int) -> None:
    """GB and GiB differ by 7 per cent."""
    assert parse_bytes(size) == count


@pytest.mark.parametrize("size", ["", "GiB", "8G", "8 apples", "-1GiB", "1e3", -1, 1.5, True, None, "8GiB 4"])
def test_a_wrong_size_is_refused_by_name(size: object) -> None:
    """The message names the argument and has an example of a right value."""
    with pytest.raises(ArgumentError, match=r"budget \(.*8GiB"):
        parse_bytes(size, "budget")


@pytest.mark.parametrize("wrong", ["third", None, ["first"]])
def test_a_value_outside_of_the_choices_is_refused(wrong: object) -> None:
    require_choice("turn", "first", ("first", "second"))
    with pytest.raises(ArgumentError, match=r"^turn \(.*\) must be one of first, second; pass one of these$"):
        require_choice("turn", wrong, ("first", "second"))


@pytest.mark.parametrize(
    ("value", "most", "rule"),
    [
        (0.5, 9.0, "must be a number from 1 to 9"),
        (0, math.inf, "must be a number of at least 1"),
        (True, math.inf, "must be a number of at least 1"),
        ("3", math.inf, "must be a number of at least 1"),
        (math.inf, math.inf, "must be finite; pass a finite number"),
        (10**400, math.inf, "is beyond the range of a float; pass a number closer to 0"),
        (-(10**400), 9.0, "is beyond the range of a float; pass a number closer to 0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_number_outside_of_the_bounds_is_refused(value: Any, most: float, rule: str) -> None:
    assert require_number("share", 2, 1, most) == 2.0
    with pytest.raises(ArgumentError, match=rf"^share \(.*\) {re.escape(rule)}$"):
        require_number("share", value, 1, most)

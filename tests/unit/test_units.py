"""Bytes in words."""

import pytest

from holdall.units import format_bytes


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
    """A unit is named for what it is: 1024 of the one below."""
    assert format_bytes(count) == text

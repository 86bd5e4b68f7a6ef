"""draw_slots: the ids that Stable-Baselines3 draws with a RandomState."""

from __future__ import annotations

import numpy as np
import pytest

from holdall._native import draw_slots


@pytest.mark.parametrize(
    ("filled", "slots", "newest", "lanes"),
    [
        (1, 1, 0, 1),
        (5, 10, 4, 1),
        (10, 10, 23, 3),
        (64, 64, 64, 8),
        ((1 << 32) - 1, (1 << 32) - 1, 1 << 33, 4),
        (1 << 32, 1 << 32, 1 << 32, 1 << 30),
        ((1 << 33) + 5, 1 << 40, 1 << 34, 7),
    ],
)
def test_ids_are_those_of_two_calls_of_randint(filled: int, slots: int, newest: int, lanes: int) -> None:
    """The generator continues as after those calls."""
    generator = np.random.MT19937(7)
    ids = draw_slots(generator, 1000, filled, slots, newest, lanes)
    expected_from = np.random.RandomState(np.random.MT19937(7))
    ticks = newest - (newest - expected_from.randint(0, filled, size=1000)) % slots
    assert ids.tolist() == (ticks * lanes + expected_from.randint(0, high=lanes, size=1000)).tolist()
    assert np.random.RandomState(generator).random_sample() == expected_from.random_sample()


@pytest.mark.parametrize(
    "arguments", [(-1, 5, 10, 4, 1), (3, 0, 10, 4, 1), (3, 11, 10, 4, 1), (3, 5, 10, -1, 1), (3, 5, 10, 4, 0)]
)
def test_impossible_numbers_are_refused(arguments: tuple[int, int, int, int, int]) -> None:
    """A refused call draws nothing."""
    generator = np.random.MT19937(7)
    with pytest.raises(ValueError, match="must be"):
        draw_slots(generator, *arguments)
    assert generator.random_raw() == np.random.MT19937(7).random_raw()


def test_a_generator_that_is_not_a_bit_generator_is_refused() -> None:
    """The message names the missing attribute."""
    with pytest.raises(AttributeError, match="capsule"):
        draw_slots(np.random.default_rng(), 1, 1, 1, 0, 1)  # type: ignore[arg-type]

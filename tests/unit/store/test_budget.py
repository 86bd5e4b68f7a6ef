"""Budgets: what users name, and what the store may do with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.errors import ArgumentError
from holdall.schema import Schema
from holdall.store.budget import Budget, count_tick_bytes
from holdall.store.tuning import Tuning

SCHEMA = Schema.of(spaces.Box(0, 255, (10, 10), np.uint8), spaces.Discrete(4), {}, 2, ())


def test_a_limit_that_is_too_small_is_refused_with_the_least_that_works() -> None:
    tuning = Tuning(segments_per_limit=4)
    with pytest.raises(ArgumentError, match=r"^budget \(799 B\) is too small.*at least 800 bytes"):
        Budget.limited(799, can_spill=False, tick_bytes=100, tuning=tuning)
    assert Budget.limited(800, can_spill=False, tick_bytes=100, tuning=tuning).max_segment_bytes == 200


def test_budgets_share_out_memory_as_the_tuning_says() -> None:
    tuning = Tuning(block_bytes=10, auto_raw_divisor=4, auto_resident_divisor=2, queue_divisor=8, max_queued_bytes=60)
    automatic = Budget.automatic(400, can_spill=True, tuning=tuning)
    assert (automatic.max_raw_bytes, automatic.max_resident_bytes, automatic.max_queued_bytes) == (100, 200, 50)
    least = Budget.least(4000, can_spill=False, tuning=tuning)
    assert (least.max_raw_bytes, least.max_resident_bytes, least.max_queued_bytes) == (0, None, 60)


@pytest.mark.parametrize(
    ("budget", "max_bytes", "max_raw_bytes"),
    [("auto", None, 1000), (None, None, 0), ("1MiB", 2**20, 2**20), (2_000_000, 2_000_000, 2_000_000)],
)
def test_what_users_name_becomes_a_budget(budget: Any, max_bytes: int | None, max_raw_bytes: int) -> None:
    made = Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=Tuning(available_bytes=4000))
    assert made.max_bytes == max_bytes
    assert made.max_raw_bytes == max_raw_bytes
    assert not made.can_spill


@pytest.mark.parametrize("budget", ["8G", "much", 1.5, -1, True])
def test_what_is_no_size_is_refused(budget: Any) -> None:
    with pytest.raises(ArgumentError, match="budget"):
        Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=Tuning())


def test_only_an_automatic_budget_follows_the_available_memory() -> None:
    now = Tuning(available_bytes=4000)
    later = Tuning(available_bytes=400)
    automatic = Budget.from_settings("auto", SCHEMA, can_spill=False, tuning=now)
    assert automatic.measure_again(later).max_raw_bytes == 100
    limited = Budget.from_settings("1MiB", SCHEMA, can_spill=False, tuning=now)
    assert limited.measure_again(later) is limited


def test_a_tick_counts_observations_twice_and_every_lane() -> None:
    assert count_tick_bytes(SCHEMA) == 2 * (2 * 100 + 8 + 8 + 1)

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
def test_every_setting_of_a_user_becomes_a_budget(budget: Any, max_bytes: int | None, max_raw_bytes: int) -> None:
    made = Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=Tuning(available_bytes=4000))
    assert made.max_bytes == max_bytes
    assert made.max_raw_bytes == max_raw_bytes
    assert not made.can_spill


@pytest.mark.parametrize("budget", ["8G", "much", 1.5, -1, True])
def test_a_budget_that_is_not_a_size_is_refused(budget: Any) -> None:
    with pytest.raises(ArgumentError, match="budget"):
        Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=Tuning())


def test_an_automatic_budget_is_measured_again_once_when_the_first_segment_is_full() -> None:
    later = Tuning(available_bytes=400)
    made = Budget.from_settings("auto", SCHEMA, can_spill=False, tuning=Tuning(available_bytes=4000))
    assert made.settle(made.max_segment_bytes - 1, later) is made
    settled = made.settle(made.max_segment_bytes, later)
    assert settled.max_raw_bytes == 100
    assert settled.settle(made.max_segment_bytes, Tuning(available_bytes=40)) is settled


@pytest.mark.parametrize("budget", [None, "1MiB"])
def test_every_other_budget_is_measured_only_when_it_is_made(budget: str | None) -> None:
    made = Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=Tuning(available_bytes=4000))
    assert made.settle(made.max_segment_bytes, Tuning(available_bytes=400)) is made


@pytest.mark.parametrize(
    ("budget", "held_bytes", "should_pack"),
    [("1MiB", 0, True), (None, 0, True), ("auto", 999, False), ("auto", 1000, True)],
)
def test_small_observations_are_packed_when_raw_data_does_not_fit(
    budget: str | None, held_bytes: int, should_pack: bool
) -> None:
    made = Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=Tuning(available_bytes=4000))
    assert made.should_pack(held_bytes) is should_pack


@pytest.mark.parametrize(("budget", "expected"), [("1MiB", 10), (None, 10), ("auto", 2000)])
def test_segments_that_are_always_packed_have_fewer_rows(budget: str | None, expected: int) -> None:
    tuning = Tuning(available_bytes=4000, block_bytes=2000, packed_segment_bytes=10)
    assert Budget.from_settings(budget, SCHEMA, can_spill=False, tuning=tuning).max_rows_bytes(tuning) == expected


@pytest.mark.parametrize(
    ("can_spill", "nbytes", "max_raw_bytes", "max_resident_bytes"),
    [(False, 200, 300, None), (True, 200, 300, 700), (True, 5000, 0, 0), (True, 0, 500, 900)],
)
def test_lowering_a_budget_compresses_and_spills_what_is_held_now(
    can_spill: bool, nbytes: int, max_raw_bytes: int, max_resident_bytes: int | None
) -> None:
    made = Budget.from_settings("auto", SCHEMA, can_spill=can_spill, tuning=Tuning(available_bytes=4000))
    lowered = made.lower(nbytes, raw_bytes=500, held_bytes=900)
    assert (lowered.max_raw_bytes, lowered.max_resident_bytes) == (max_raw_bytes, max_resident_bytes)


def test_lowering_never_raises_a_limit_and_is_final() -> None:
    made = Budget.from_settings("auto", SCHEMA, can_spill=True, tuning=Tuning(available_bytes=4000))
    lowered = made.lower(1, raw_bytes=10**6, held_bytes=10**6)
    assert (lowered.max_raw_bytes, lowered.max_resident_bytes) == (1000, 2000)
    assert lowered.settle(10**9, Tuning(available_bytes=400)) is lowered


def test_a_tick_counts_observations_twice_and_every_lane() -> None:
    assert count_tick_bytes(SCHEMA) == 2 * (2 * 100 + 8 + 8 + 1)

"""Placement compresses before it moves to disk, moves to disk before it evicts, and does no more than needed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from holdall.store.budget import Budget
from holdall.store.placement import BlockState, Form, Holdings, PlacementPlan, count_ticks_that_fit, plan

UNLIMITED = Budget(
    max_bytes=None,
    max_raw_bytes=1000,
    max_resident_bytes=None,
    max_queued_bytes=0,
    max_segment_bytes=100,
    reserved_bytes=0,
    can_spill=False,
)
LIMITED = replace(UNLIMITED, max_bytes=400)
SPILLING = replace(UNLIMITED, max_resident_bytes=100, can_spill=True)
LIMITED_SPILLING = replace(LIMITED, can_spill=True)

OPEN = BlockState(Form.OPEN, 100, 100)
RAW = BlockState(Form.RAW, 100, 100)
KEPT = BlockState(Form.KEPT, 100, 100)
CODED = BlockState(Form.CODED, 100, 50)
MOVING = BlockState(Form.MOVING, 100, 50)
COMPRESSING = BlockState(Form.COMPRESSING, 100, 100)
FILED = BlockState(Form.FILED, 100, 0, 50)


def hold(states: list[BlockState | int]) -> Holdings[int]:
    """Return segments of ten ticks. Each has one block, or the given number of bytes of rows."""
    holdings: Holdings[int] = Holdings()
    for number, state in enumerate(states):
        if isinstance(state, int):
            holdings.add_segment(10 * number + 10, 10, state, {})
        else:
            holdings.add_segment(10 * number + 10, 10, 0, {number: state})
    return holdings


def filed(file: int) -> BlockState:
    return replace(FILED, file=file)


PLANS: list[tuple[str, list[BlockState | int], Budget, int | None, PlacementPlan[int]]] = [
    ("nothing held", [], LIMITED, None, PlacementPlan()),
    ("everything fits", [CODED, RAW], LIMITED, None, PlacementPlan()),
    ("no limit", [RAW, CODED, FILED], UNLIMITED, None, PlacementPlan()),
    # Compression.
    ("no raw block allowed", [RAW, RAW], replace(UNLIMITED, max_raw_bytes=0), None, PlacementPlan((0, 1))),
    ("oldest are compressed", [RAW, RAW, RAW], replace(UNLIMITED, max_raw_bytes=100), None, PlacementPlan((0, 1))),
    ("open stays raw", [OPEN], replace(UNLIMITED, max_raw_bytes=0), None, PlacementPlan()),
    ("tried once", [KEPT], replace(UNLIMITED, max_raw_bytes=0), None, PlacementPlan()),
    ("rows stay rows", [100], replace(UNLIMITED, max_raw_bytes=0), None, PlacementPlan()),
    ("the first block is measured", [RAW, RAW], LIMITED, None, PlacementPlan((0,))),
    ("a limit compresses", [CODED, RAW, RAW, RAW, RAW], LIMITED, None, PlacementPlan((1,))),
    ("rows count", [CODED, RAW, RAW, 200], LIMITED, None, PlacementPlan((1,))),
    ("reserved counts", [CODED, RAW, RAW, RAW], replace(LIMITED, reserved_bytes=100), None, PlacementPlan((1,))),
    # The disk.
    ("oldest move to disk", [CODED, CODED, CODED, CODED], SPILLING, None, PlacementPlan((), (0, 1))),
    ("nothing too much", [CODED, CODED], SPILLING, None, PlacementPlan()),
    ("disk before eviction", [CODED] * 10, LIMITED_SPILLING, None, PlacementPlan((), (0, 1))),
    ("as much as fits on disk", [CODED] * 4, SPILLING, 60, PlacementPlan((), (0,))),
    ("moved blocks use the disk", [MOVING, CODED, CODED, CODED], SPILLING, 60, PlacementPlan()),
    ("moved blocks count as moved", [MOVING, CODED, CODED], SPILLING, None, PlacementPlan()),
    ("compressed ones count as half", [COMPRESSING, CODED, CODED], SPILLING, None, PlacementPlan((), (1,))),
    ("full disk, no limit", [CODED, CODED, CODED], SPILLING, 0, PlacementPlan()),
    # Eviction.
    ("oldest are evicted", [CODED] * 10, LIMITED, None, PlacementPlan((), (), 20)),
    ("rows are evicted", [100] * 5, LIMITED, None, PlacementPlan((), (), 10)),
    ("rows are evicted from a disk tier", [100] * 5, LIMITED_SPILLING, None, PlacementPlan((), (), 10)),
    ("untried are not evicted", [RAW] * 8, LIMITED, None, PlacementPlan(tuple(range(8)))),
    ("what is compressed is not evicted", [COMPRESSING] * 8, LIMITED, None, PlacementPlan()),
    ("incompressible are evicted", [KEPT] * 5, LIMITED, None, PlacementPlan((), (), 10)),
    ("open is never evicted", [OPEN], replace(LIMITED, reserved_bytes=400), None, PlacementPlan()),
    ("full disk", [CODED] * 10, LIMITED_SPILLING, 0, PlacementPlan((), (), 20)),
    ("a full disk whose files stay", [filed(1), *[CODED] * 8], LIMITED_SPILLING, 0, PlacementPlan()),
    ("evicted files make room", [filed(1), *[CODED] * 9], LIMITED_SPILLING, 0, PlacementPlan((), (1,), 10, 50)),
    ("evicted is not compressed", [RAW, 100, 100, 100, 100, 100], LIMITED, None, PlacementPlan((), (), 20)),
]


@pytest.mark.parametrize(
    ("states", "budget", "disk_room_bytes", "expected"), [case[1:] for case in PLANS], ids=[case[0] for case in PLANS]
)
def test_a_plan_is_the_least_work_that_meets_the_budget(
    states: list[BlockState | int], budget: Budget, disk_room_bytes: int | None, expected: PlacementPlan[int]
) -> None:
    holdings = hold(states)
    assert plan(holdings, budget, disk_room_bytes) == expected
    assert plan(holdings, budget, disk_room_bytes) == expected


def test_disk_space_counts_as_free_only_when_a_whole_file_is_evicted() -> None:
    apart = plan(hold([filed(1), filed(2), *[CODED] * 9]), LIMITED_SPILLING, 0)
    together = plan(hold([filed(1), filed(1), *[CODED] * 9]), LIMITED_SPILLING, 0)
    assert apart.evict_before_tick == 10
    assert together.evict_before_tick == 20
    assert apart.to_spill == together.to_spill == (2,)


def test_nothing_is_evicted_if_the_caller_forbids_it() -> None:
    assert plan(hold([CODED] * 10), LIMITED, can_evict=False) == PlacementPlan()


def test_a_block_that_two_segments_share_is_held_until_both_are_evicted() -> None:
    holdings: Holdings[str] = Holdings()
    holdings.add_segment(10, 10, 5, {"block": OPEN})
    holdings.add_segment(20, 10, 5, {"block": RAW})
    assert holdings.memory_bytes == 110
    assert holdings.evict(10) == []
    assert holdings.memory_bytes == 105
    assert holdings.evict(20) == ["block"]
    assert holdings.memory_bytes == 0


def test_sums_stay_exact_while_blocks_change_and_are_evicted() -> None:
    rng = random.Random(0)
    holdings: Holdings[int] = Holdings()
    states: dict[int, BlockState] = {}
    rows: dict[int, int] = {}
    for number in range(300):
        rows[number] = rng.randrange(50)
        states[number] = RAW
        holdings.add_segment(10 * number + 10, 10, rows[number], {number: RAW})
        changed = rng.choice(list(states))
        states[changed] = rng.choice([RAW, KEPT, CODED, filed(changed // 7)])
        holdings.change_block(changed, states[changed])
        if number % 5 == 4:
            first = min(states) + rng.randrange(4)
            gone = [key for key in states if key < first]
            assert sorted(holdings.evict(10 * first)) == gone
            for key in gone:
                del states[key], rows[key]
        assert holdings.memory_bytes == sum(rows.values()) + sum(state.memory_bytes for state in states.values())
        assert holdings.raw_bytes == 100 * len(states)
        for form in (Form.RAW, Form.KEPT, Form.CODED, Form.FILED):
            assert set(holdings.list_blocks(form)) == {key for key, state in states.items() if state.form is form}


def test_the_ticks_that_fit_are_known_when_every_field_was_compressed_once() -> None:
    holdings: Holdings[int] = Holdings()
    holdings.add_segment(10, 10, 20, {0: RAW, 1: replace(RAW, field=1)})
    assert count_ticks_that_fit(holdings, LIMITED) is None
    holdings.change_block(0, CODED)
    assert count_ticks_that_fit(holdings, LIMITED) is None
    holdings.change_block(1, replace(CODED, field=1))
    assert count_ticks_that_fit(holdings, LIMITED) == 33  # 400 bytes, 12 per tick.
    assert count_ticks_that_fit(holdings, UNLIMITED) is None
    assert count_ticks_that_fit(holdings, LIMITED_SPILLING) is None

"""Placement compresses before it moves to disk, moves to disk before it evicts, and does no more than needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.errors import ArgumentError
from holdall.store.placement import BlockState, Budget, Form, Plan, plan
from holdall.store.tuning import Tuning

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


def raw(number: int, **changes: object) -> BlockState:
    """Return a raw block of 100 bytes, of ten ticks."""
    return replace(BlockState(10 * number, 10 * number + 10, 100), **changes)  # type: ignore[arg-type]


def coded(number: int, nbytes: int = 50) -> BlockState:
    return raw(number, coded_bytes=nbytes, form=Form.CODED)


def kept_raw(number: int) -> BlockState:
    return raw(number, coded_bytes=100)


def filed(number: int, file: int | None = None) -> BlockState:
    return raw(number, coded_bytes=50, form=Form.FILED, file=file)


def rows(number: int) -> BlockState:
    return raw(number, form=Form.ROWS)


PLANS = [
    ("nothing held", [], 0, LIMITED, None, Plan()),
    ("everything fits", [raw(0), raw(1)], 0, LIMITED, None, Plan()),
    ("no limit", [raw(0), coded(1), filed(2)], 10**9, UNLIMITED, None, Plan()),
    # Compression.
    ("no raw block allowed", [raw(0), raw(1)], 0, replace(UNLIMITED, max_raw_bytes=0), None, Plan((0, 1))),
    ("oldest are compressed", [raw(2), raw(0), raw(1)], 0, replace(UNLIMITED, max_raw_bytes=100), None, Plan((1, 2))),
    ("open stays raw", [raw(0, is_open=True)], 0, replace(UNLIMITED, max_raw_bytes=0), None, Plan()),
    ("tried once", [kept_raw(0)], 0, replace(UNLIMITED, max_raw_bytes=0), None, Plan()),
    ("rows stay rows", [rows(0)], 0, replace(UNLIMITED, max_raw_bytes=0), None, Plan()),
    ("a limit compresses", [raw(0), raw(1), raw(2), raw(3), raw(4)], 0, LIMITED, None, Plan((0, 1))),
    ("other bytes count", [raw(0), raw(1), raw(2)], 150, LIMITED, None, Plan((0,))),
    ("reserved counts", [raw(0), raw(1), raw(2)], 0, replace(LIMITED, reserved_bytes=150), None, Plan((0,))),
    # The disk.
    ("oldest move to disk", [coded(0), coded(1), coded(2), coded(3)], 0, SPILLING, None, Plan((), (0, 1))),
    ("nothing too much", [coded(0), coded(1)], 0, SPILLING, None, Plan()),
    ("disk before eviction", [coded(number) for number in range(10)], 0, LIMITED_SPILLING, None, Plan((), (0, 1))),
    ("as much as fits on disk", [coded(0), coded(1), coded(2), coded(3)], 0, SPILLING, 60, Plan((), (0,))),
    ("full disk, no limit", [coded(0), coded(1), coded(2)], 0, SPILLING, 0, Plan()),
    # Eviction.
    ("oldest are evicted", [coded(number) for number in range(10)], 0, LIMITED, None, Plan((), (), 20)),
    ("rows are evicted", [rows(number) for number in range(5)], 0, LIMITED, None, Plan((), (), 10)),
    ("untried are not evicted", [raw(number) for number in range(8)], 0, LIMITED, None, Plan(tuple(range(8)))),
    ("incompressible are evicted", [kept_raw(number) for number in range(5)], 0, LIMITED, None, Plan((), (), 10)),
    ("open is never evicted", [raw(0, is_open=True)], 500, LIMITED, None, Plan()),
    ("full disk", [coded(number) for number in range(10)], 0, LIMITED_SPILLING, 0, Plan((), (), 20, is_disk_full=True)),
]


@pytest.mark.parametrize(
    ("blocks", "other_bytes", "budget", "disk_room_bytes", "expected"), [case[1:] for case in PLANS],
    ids=[case[0] for case in PLANS],
)  # fmt: skip
def test_a_plan_is_the_least_work_that_meets_the_budget(
    blocks: list[BlockState], other_bytes: int, budget: Budget, disk_room_bytes: int | None, expected: Plan
) -> None:
    assert plan(blocks, other_bytes, budget, disk_room_bytes) == expected


def test_disk_space_counts_as_free_only_when_a_whole_file_is_evicted() -> None:
    held = [coded(number) for number in range(2, 11)]
    apart = plan([filed(0, file=1), filed(1, file=2), *held], 0, LIMITED_SPILLING, 0)
    together = plan([filed(0, file=1), filed(1, file=1), *held], 0, LIMITED_SPILLING, 0)
    assert apart.evict_before_tick == 10
    assert together.evict_before_tick == 20
    assert apart.to_spill == together.to_spill[:1] == (2,)


def test_an_evicted_block_is_not_compressed() -> None:
    decided = plan([raw(0), *(rows(number) for number in range(1, 6))], 0, LIMITED)
    assert decided.evict_before_tick == 20
    assert decided.to_compress == ()


def test_planning_again_gives_the_same_plan() -> None:
    blocks = [coded(0), coded(1), raw(2), raw(3), raw(4), raw(5)]
    assert plan(blocks, 50, LIMITED_SPILLING) == plan(blocks, 50, LIMITED_SPILLING)


def test_a_limit_that_is_too_small_is_refused_with_the_least_that_works() -> None:
    tuning = Tuning(segments_per_limit=4)
    with pytest.raises(ArgumentError, match="at least 800 bytes"):
        Budget.limited(799, can_spill=False, tick_bytes=100, tuning=tuning)
    assert Budget.limited(800, can_spill=False, tick_bytes=100, tuning=tuning).max_segment_bytes == 200


def test_budgets_share_out_memory_as_the_tuning_says() -> None:
    tuning = Tuning(block_bytes=10, auto_raw_divisor=4, auto_resident_divisor=2, queue_divisor=8, max_queued_bytes=60)
    automatic = Budget.automatic(400, can_spill=True, tuning=tuning)
    assert (automatic.max_raw_bytes, automatic.max_resident_bytes, automatic.max_queued_bytes) == (100, 200, 50)
    least = Budget.least(4000, can_spill=False, tuning=tuning)
    assert (least.max_raw_bytes, least.max_resident_bytes, least.max_queued_bytes) == (0, None, 60)

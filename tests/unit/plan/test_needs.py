"""The arithmetic of a plan: parts add up, and bounds hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdall.tools.plan.needs import (
    MARGIN,
    ROOM_BYTES,
    Experience,
    FitVerdict,
    HoldallUse,
    RunNeeds,
    largest_count,
)

from .runs import GIB, MIB, NEEDS, REPLAY, STORED, limit_memory


def test_every_part_that_is_not_exact_has_the_same_margin() -> None:
    assert NEEDS.need_bytes() == 450 * MIB + 400_000 * 42_628
    assert (
        NEEDS.most_bytes()
        == int(300 * MIB * (1 + MARGIN))
        + int(100 * MIB * (1 + MARGIN))
        + int(50 * MIB * (1 + MARGIN))
        + ROOM_BYTES
        + 400_000 * 42_628
    )


def test_the_verdict_compares_need_and_bound_with_the_limit() -> None:
    assert NEEDS.verdict(limit_memory(NEEDS.most_bytes())) is FitVerdict.FITS
    assert NEEDS.verdict(limit_memory(NEEDS.need_bytes())) is FitVerdict.TIGHT
    assert NEEDS.verdict(limit_memory(NEEDS.need_bytes() - 1)) is FitVerdict.DOES_NOT_FIT


def test_a_buffer_that_never_fills_takes_the_bytes_of_its_filled_rows() -> None:
    short = replace(NEEDS, experience=replace(REPLAY, max_rows=1000))
    assert NEEDS.need_bytes() - short.need_bytes() == 399_000 * 42_628


def test_a_rollout_of_several_environments_is_copied_once() -> None:
    rollout = Experience("r", "SB3", 1000, 4, row_bytes=4e6, copied_row_bytes=3.9e6, is_rollout=True)
    needs = replace(NEEDS, experience=rollout)
    assert needs.need_bytes() == 350 * MIB + round(1000 * (4e6 + 3.9e6))
    assert "copy" not in " ".join(part.name for part in needs.with_holdall_buffer().parts())


def test_a_budget_bounds_holdalls_memory() -> None:
    unlimited = NEEDS.with_holdall_buffer().buffer_bytes()
    assert 400_000 * 2_000 < unlimited < 400_000 * 2_200 + 30 * MIB + 64 * MIB
    spilling = NEEDS.with_holdall_buffer(HoldallUse(budget_bytes=200 * MIB, spill_dir="disk"))
    assert spilling.buffer_bytes() == 200 * MIB
    assert spilling.disk_bytes() > 0
    assert spilling.held_transitions() == 400_000
    assert NEEDS.with_holdall_buffer(HoldallUse(budget_bytes=200 * MIB)).held_transitions() < 110_000


def test_transitions_stay_raw_while_they_fit_into_a_budget() -> None:
    """A run under 128 MiB was planned with its compressed size, 49 MiB below the truth."""
    raw = round(400_000 * STORED.raw_bytes)
    too_small = NEEDS.with_holdall_buffer(HoldallUse(budget_bytes=raw - MIB))
    assert too_small.buffer_bytes() == raw - MIB
    large_enough = NEEDS.with_holdall_buffer(HoldallUse(budget_bytes=2 * raw))
    assert large_enough.buffer_bytes() == raw + STORED.working_bytes


def test_auto_keeps_a_quarter_of_the_free_memory_raw() -> None:
    assert NEEDS.with_holdall_buffer(HoldallUse(is_auto=True)).buffer_bytes() > 2 * GIB


def test_a_run_keeps_its_own_settings_of_holdall_unless_others_are_given() -> None:
    bounded = NEEDS.with_holdall_buffer(HoldallUse(budget_bytes=GIB))
    assert bounded.with_holdall_buffer() == bounded
    assert bounded.with_holdall_buffer(HoldallUse()).holdall == HoldallUse()
    assert bounded.with_library_buffer() == NEEDS


@pytest.mark.parametrize("run", [NEEDS.with_library_buffer(), NEEDS.with_holdall_buffer()], ids=["library", "holdall"])
def test_the_largest_size_fits_and_the_next_does_not(run: RunNeeds) -> None:
    limits = limit_memory(8 * GIB)
    size = run.largest_size(limits)
    assert run.resized(size).verdict(limits) is FitVerdict.FITS
    assert run.resized(size + 1).verdict(limits) is not FitVerdict.FITS


def test_more_environments_keep_the_capacity() -> None:
    four = NEEDS.with_envs(4)
    assert four.experience.transitions == 400_000
    assert four.need_bytes() == NEEDS.need_bytes()


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 17, 64, 1000])
def test_largest_count_finds_the_bound(bound: int) -> None:
    assert largest_count(lambda count: count <= bound) == bound


def test_environments_in_the_same_process_cost_memory_of_their_own() -> None:
    needs = replace(NEEDS, environment_bytes=MIB, measured_envs=4, experience=replace(REPLAY, n_envs=4))
    more = needs.with_envs(1004)
    assert more.need_bytes() - needs.need_bytes() == pytest.approx(1000 * MIB, abs=20 * MIB)
    assert ("1,000 further environments", "estimate") in {(part.name, part.source) for part in more.parts()}
    fewer = needs.with_envs(1)
    assert needs.need_bytes() - fewer.need_bytes() == pytest.approx(3 * MIB, abs=MIB)

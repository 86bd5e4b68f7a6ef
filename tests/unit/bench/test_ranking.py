"""What is ranked, and what is refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from holdall.tools.bench.run import rank_runs
from holdall.tools.report.results import Interval, TrainingRun, summarize_seeds


def run(profile: str, buffer: str = "sb3", seed: int = 0, **changes: Any) -> TrainingRun:
    values: dict[str, Any] = {
        "status": "done",
        "size": 1_000,
        "batch_size": 32,
        "steps": 100,
        "filled": 1.0,
        "steps_per_second": 50.0,
        "peaks": {"train": 1_000_000},
        "rewards": (0.0, 1.0),
    }
    return TrainingRun(profile, buffer, seed, **values | changes)


def by(name: str, runs: list[TrainingRun]) -> Any:
    return next(ranking for ranking in rank_runs(runs) if ranking.by == name)


def test_memory_is_ranked_by_the_median_peak_over_all_phases() -> None:
    runs = [
        run("fast", peaks={"train": 5, "save": 900}),
        run("fast", seed=1, peaks={"train": 800, "save": 1}),
        run("fast", seed=2, peaks={"train": 10_000}),
        run("balanced", peaks={"collect": 500}),
    ]
    assert by("memory", runs).order == (("balanced", "sb3"), ("fast", "sb3"))
    assert by("memory", runs).refused is None


def test_memory_that_was_not_filled_is_not_ranked_and_the_reason_says_how_full_it_was() -> None:
    runs = [run("fast"), run("quality", "holdall", filled=0.25, size=40_000)]
    told = by("memory", runs)
    assert told.order == ()
    assert told.refused.startswith("quality with holdall held 10,000 of 40,000 transitions when it was measured")


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_memory_is_not_ranked_while_a_run_is_missing(status: str) -> None:
    assert status in by("memory", [run("fast"), run("balanced", status=status)]).refused


def test_what_does_not_fit_leaves_the_rest_ranked() -> None:
    told = by("memory", [run("fast"), run("balanced", status="does not fit")])
    assert (told.order, told.refused) == ((("fast", "sb3"),), None)


def test_peaks_that_differ_by_a_heaps_holes_are_said_to_be_the_same() -> None:
    runs = [run("fast", peaks={"a": 1_000}), run("balanced", peaks={"a": 1_020}), run("quality", peaks={"a": 2_000})]
    assert by("memory", runs).same == ((("fast", "sb3"), ("balanced", "sb3")),)


def test_peaks_that_are_the_same_are_in_the_same_order_in_every_bench() -> None:
    for first, second in ((1_000, 1_020), (1_020, 1_000)):
        runs = [run("fast", peaks={"a": first}), run("balanced", peaks={"a": second}), run("least", peaks={"a": 500})]
        assert by("memory", runs).order == (("least", "sb3"), ("fast", "sb3"), ("balanced", "sb3"))


def test_speed_is_ranked_where_the_intervals_are_apart() -> None:
    runs = [run("fast", seed=seed, steps_per_second=100 + seed) for seed in range(3)]
    runs += [run("balanced", seed=seed, steps_per_second=50 + seed) for seed in range(3)]
    assert by("speed", runs).order == (("fast", "sb3"), ("balanced", "sb3"))


def test_speed_is_not_ranked_where_all_intervals_overlap_or_one_seed_was_run() -> None:
    runs = [run("fast", seed=seed, steps_per_second=100 + 20 * seed) for seed in range(3)]
    runs += [run("balanced", seed=seed, steps_per_second=101 + 20 * seed) for seed in range(3)]
    assert "overlap" in by("speed", runs).refused
    assert "one seed" in by("speed", [run("fast"), run("balanced")]).refused


def test_reward_is_the_mean_of_the_later_half_of_the_episodes() -> None:
    (summary,) = summarize_seeds([run("fast", rewards=(0.0, 0.0, 4.0, 6.0)), run("fast", seed=1, rewards=(9.0, 7.0))])
    assert summary.reward is not None
    assert summary.reward.mean == 6.0


def test_nothing_is_ranked_while_runs_are_missing() -> None:
    assert [ranking.refused for ranking in rank_runs([run("fast")], missing=3)] == [
        "3 runs are missing. --resume makes them"
    ] * 3


def test_nothing_at_all_is_refused_without_a_fault() -> None:
    assert all(ranking.refused for ranking in rank_runs([]))


def test_the_interval_is_students() -> None:
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half == pytest.approx(4.303 / 3**0.5)
    assert Interval.of([1.0]).half is None
    assert Interval.of([float(number) for number in range(40)]).half == pytest.approx(1.96 * 11.690452 / 40**0.5)

"""Rankings of runs, and the reasons why nothing is ranked."""

from __future__ import annotations

from typing import Any

import pytest

from holdall.tools.bench.run import rank_runs
from holdall.tools.report.results import Interval, TrainingRun, summarize_seeds


def make_run(profile: str, buffer: str = "sb3", seed: int = 0, **changes: Any) -> TrainingRun:
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


def rank_by(name: str, runs: list[TrainingRun]) -> Any:
    return next(one for one in rank_runs(runs) if one.by == name)


def test_memory_is_ranked_by_the_median_peak_over_all_phases() -> None:
    runs = [
        make_run("fast", peaks={"train": 5, "save": 900}),
        make_run("fast", seed=1, peaks={"train": 800, "save": 1}),
        make_run("fast", seed=2, peaks={"train": 10_000}),
        make_run("balanced", peaks={"collect": 500}),
    ]
    assert rank_by("memory", runs).order == (("balanced", "sb3"), ("fast", "sb3"))
    assert rank_by("memory", runs).refused is None


def test_a_buffer_that_was_not_full_is_not_ranked_by_memory() -> None:
    runs = [make_run("fast"), make_run("quality", "holdall", filled=0.25, size=40_000)]
    ranking = rank_by("memory", runs)
    assert ranking.order == ()
    assert ranking.refused.startswith("quality with holdall held 10,000 of 40,000 transitions when it was measured")


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_memory_is_not_ranked_while_a_run_is_missing(status: str) -> None:
    assert status in rank_by("memory", [make_run("fast"), make_run("balanced", status=status)]).refused


def test_a_run_that_does_not_fit_does_not_prevent_a_ranking() -> None:
    ranking = rank_by("memory", [make_run("fast"), make_run("balanced", status="does not fit")])
    assert (ranking.order, ranking.refused) == ((("fast", "sb3"),), None)


def test_nearly_equal_peaks_are_reported_as_the_same() -> None:
    runs = [
        make_run("fast", peaks={"a": 1_000}),
        make_run("balanced", peaks={"a": 1_020}),
        make_run("quality", peaks={"a": 2_000}),
    ]
    assert rank_by("memory", runs).same == ((("fast", "sb3"), ("balanced", "sb3")),)


def test_equal_peaks_keep_the_order_of_the_profiles() -> None:
    for first, second in ((1_000, 1_020), (1_020, 1_000)):
        runs = [
            make_run("fast", peaks={"a": first}),
            make_run("balanced", peaks={"a": second}),
            make_run("least", peaks={"a": 500}),
        ]
        assert rank_by("memory", runs).order == (("least", "sb3"), ("fast", "sb3"), ("balanced", "sb3"))


def test_speed_is_ranked_if_the_intervals_do_not_overlap() -> None:
    runs = [make_run("fast", seed=seed, steps_per_second=100 + seed) for seed in range(3)]
    runs += [make_run("balanced", seed=seed, steps_per_second=50 + seed) for seed in range(3)]
    assert rank_by("speed", runs).order == (("fast", "sb3"), ("balanced", "sb3"))


def test_speed_is_not_ranked_if_all_intervals_overlap_or_there_is_one_seed() -> None:
    runs = [make_run("fast", seed=seed, steps_per_second=100 + 20 * seed) for seed in range(3)]
    runs += [make_run("balanced", seed=seed, steps_per_second=101 + 20 * seed) for seed in range(3)]
    assert "overlap" in rank_by("speed", runs).refused
    assert "one seed" in rank_by("speed", [make_run("fast"), make_run("balanced")]).refused


def test_reward_is_the_mean_of_the_later_half_of_the_episodes() -> None:
    (summary,) = summarize_seeds(
        [make_run("fast", rewards=(0.0, 0.0, 4.0, 6.0)), make_run("fast", seed=1, rewards=(9.0, 7.0))]
    )
    assert summary.reward is not None
    assert summary.reward.mean == 6.0


def test_nothing_is_ranked_while_runs_are_missing() -> None:
    assert [ranking.refused for ranking in rank_runs([make_run("fast")], missing=3)] == [
        "3 runs are missing. --resume makes them"
    ] * 3


def test_a_bench_without_results_is_not_ranked() -> None:
    assert all(ranking.refused for ranking in rank_runs([]))


def test_the_interval_is_students() -> None:
    interval = Interval.of([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.half == pytest.approx(4.303 / 3**0.5)
    assert Interval.of([1.0]).half is None
    assert Interval.of([float(number) for number in range(40)]).half == pytest.approx(1.96 * 11.690452 / 40**0.5)

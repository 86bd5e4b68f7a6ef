"""The runs of a bench: their order, their sizes and their predicted times."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from holdall.errors import ArgumentError
from holdall.tools.bench import SaveFigures
from holdall.tools.bench.run import plan_runs, predict_seconds
from holdall.tools.bench.settings import BenchSettings, Calibration, ProfileSize, Trial, compute_size, make_settings
from holdall.tools.bench.task import TrainingFigures
from holdall.tools.report.results import TrainingRun

SIZE = ProfileSize(0.5, 10**9, 32, 1_000, 2_000, ("sb3", "holdall"))


def make_bench_settings(**changes: Any) -> BenchSettings:
    given: dict[str, Any] = {"profiles": ["fast", "balanced"], "buffers": ["sb3", "holdall"], "limit": "1GiB"}
    return make_settings("demo", "sac", timesteps=100, seeds=3, **given | changes)


def test_every_run_is_planned_once_and_the_first_one_of_a_seed_changes() -> None:
    order = plan_runs(make_bench_settings())
    assert len(order) == len(set(order)) == 12
    firsts = [next(run for run in order if run.seed == seed) for seed in range(3)]
    assert len({(run.profile, run.buffer) for run in firsts}) == 3


def test_finished_runs_are_not_in_the_predicted_time() -> None:
    seconds = {f"{profile}/{buffer}": 10.0 for profile in ("fast", "balanced") for buffer in ("sb3", "holdall")}
    calibration = Calibration({"fast": SIZE, "balanced": SIZE}, seconds)
    done = [TrainingRun("fast", "sb3", 0, "done", 1, 1), TrainingRun("fast", "sb3", 1, "failed", 1, 1)]
    assert predict_seconds(make_bench_settings(), calibration) == 120.0
    assert predict_seconds(make_bench_settings(), calibration, done) == 110.0


def make_trial(fill_per_second: float | None = 100.0, saved_bytes: int = 4 * 10**8, **changes: Any) -> Trial:
    figures = TrainingFigures(
        steps=120,
        buffer_bytes=500 * 1000,
        filled=1.0,
        steps_per_second=20.0,
        fill_per_second=fill_per_second,
        bytes_per_transition=None,
        rewards=[],
        checkpoint=SaveFigures(1.0, saved_bytes, None),
        peaks={},
        seconds=17.0,
    )
    given: dict[str, Any] = {"size": 500, "buffer_bytes": 500 * 1000, "peak_bytes": 200_500_000, "figures": figures}
    return Trial(**given | {"whole_seconds": 5 + 5 + 6 + 1.0} | changes)


def test_the_predicted_time_has_start_filling_steps_and_saving() -> None:
    assert make_trial().predict_seconds(1_000, 400, fills=True) == pytest.approx(5 + 10 + 20 + 2)
    assert make_trial().predict_seconds(1_000, 400, fills=False) == pytest.approx(5 + 20 + 2)
    # A small file takes mostly a fixed time.
    assert make_trial(saved_bytes=10**5).predict_seconds(1_000, 400, fills=False) == pytest.approx(5 + 20 + 1, rel=1e-3)
    on_policy = make_trial(None, whole_seconds=5 + 6 + 1.0)
    assert on_policy.predict_seconds(1_000, 1_400, fills=True) == pytest.approx(5 + 2_000 / 20 + 1)  # Whole rollouts.


def test_a_profile_has_the_largest_size_of_stable_baselines3s_buffer_in_its_share() -> None:
    """A share of 40 % of 1 GiB holds the process, 200 MB, and as many transitions of 1,000 or 250 bytes as fit."""
    share = int(0.4 * 2**30)
    small = make_trial(buffer_bytes=500 * 250, peak_bytes=200_000_000 + 500 * 250)
    size = compute_size(make_bench_settings(), "fast", 32, {"sb3": make_trial(), "holdall": small})
    assert size.size == pytest.approx((share - 200_000_000) / 1_000, abs=1)
    assert size.holdall_size == pytest.approx((share - 200_000_000) / 250, abs=1)
    assert make_trial().predict_peak(size.size) <= share
    assert size.fits == ("sb3", "holdall")
    too_large = make_trial(peak_bytes=2**30)
    assert compute_size(make_bench_settings(buffers=["sb3"]), "fast", 32, {"sb3": too_large}).fits == ()


def test_settings_are_read_as_they_were_written() -> None:
    given = make_bench_settings(profiles=["all"])
    assert len(given.profiles) == 5
    assert BenchSettings.from_dict(asdict(given)) == given
    calibration = Calibration({"fast": SIZE}, {"fast/sb3": 1.0})
    assert Calibration.from_dict(asdict(calibration)) == calibration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profiles": ["slow"]}, r"profiles \(slow\) must be among"),
        ({"buffers": ["reverb"]}, r"buffers \(reverb\) must be among sb3, holdall"),
        ({"limit": "900TiB"}, r"limit \(900TiB\) is more than"),
        ({"limit": "much"}, r"limit \('much'\) is not a size"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_bench_settings(**changes)


def test_the_shipped_environment_is_scaled_down_and_says_so() -> None:
    assert make_bench_settings(limit=None).limit_bytes == 2 * 2**30
    assert "default of this environment" in make_bench_settings(limit=None).limit_source

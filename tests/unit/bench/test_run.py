"""Which runs are made, in which order, and what they are said to take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from holdall.errors import ArgumentError
from holdall.tools.bench.run import expected_seconds, planned_runs
from holdall.tools.bench.settings import BenchSettings, Calibration, ProfileSize, run_seconds, settings_of
from holdall.tools.report.results import TrainingRun

SIZE = ProfileSize(0.5, 10**9, 32, 1_000, 2_000, ("sb3", "holdall"))


def settings(**changes: Any) -> BenchSettings:
    given: dict[str, Any] = {"profiles": ["fast", "balanced"], "buffers": ["sb3", "holdall"], "limit": "1GiB"}
    return settings_of("demo", "sac", timesteps=100, seeds=3, **given | changes)


def test_every_profile_buffer_and_seed_has_one_turn_and_the_first_one_changes() -> None:
    order = planned_runs(settings())
    assert len(order) == len(set(order)) == 12
    firsts = [next(turn for turn in order if turn.seed == seed) for seed in range(3)]
    assert len({(turn.profile, turn.buffer) for turn in firsts}) == 3


def test_what_is_done_is_not_announced_again() -> None:
    seconds = {f"{profile}/{buffer}": 10.0 for profile in ("fast", "balanced") for buffer in ("sb3", "holdall")}
    calibration = Calibration({"fast": SIZE, "balanced": SIZE}, seconds)
    done = [TrainingRun("fast", "sb3", 0, "done", 1, 1), TrainingRun("fast", "sb3", 1, "failed", 1, 1)]
    assert expected_seconds(settings(), calibration) == 120.0
    assert expected_seconds(settings(), calibration, done) == 110.0


def test_a_run_takes_its_start_its_filling_its_steps_and_its_saving() -> None:
    trial: dict[str, Any] = {"size": 500, "steps": 120, "fill_per_second": 100.0, "steps_per_second": 20.0}
    trial |= {"checkpoint": {"seconds": 1.0, "bytes": 10**6}, "bytes_each": 2_000.0, "whole_seconds": 5 + 5 + 6 + 1.0}
    assert run_seconds(trial, SIZE, 400, fills=True) == pytest.approx(5 + 10 + 20 + 2)
    assert run_seconds(trial, SIZE, 400, fills=False) == pytest.approx(5 + 20 + 2)
    on_policy = trial | {"fill_per_second": None, "bytes_each": 0.0, "whole_seconds": 5 + 6 + 1.0}
    assert run_seconds(on_policy, SIZE, 1_400, fills=True) == pytest.approx(5 + 2_000 / 20)  # whole rollouts


def test_settings_survive_the_file() -> None:
    given = settings(profiles=["all"])
    assert len(given.profiles) == 5
    assert BenchSettings.from_dict(asdict(given)) == given
    calibration = Calibration({"fast": SIZE}, {"fast/sb3": 1.0})
    assert Calibration.from_dict(asdict(calibration)) == calibration


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"profiles": ["slow"]}, r"profiles \(slow\) must be among"),
        ({"buffers": ["reverb"]}, r"buffers \(reverb\) must be among sb3, holdall"),
        ({"limit": "900TiB"}, r"limit \(900TiB\) is more than"),
        ({"limit": "much"}, r"limit \('much'\) is no size"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        settings(**changes)


def test_the_shipped_environment_is_scaled_down_and_says_so() -> None:
    assert settings(limit=None).limit_bytes == 2 * 2**30
    assert "scaled down" in settings(limit=None).limit_said

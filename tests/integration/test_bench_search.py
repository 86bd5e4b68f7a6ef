"""`holdall bench search`: a study of real trainings, at toy size."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdall.cli import app
from holdall.tools.bench import SaveFigures
from holdall.tools.bench.child import ChildProgress
from holdall.tools.bench.search import Search, SearchSpace, TrialStopped, require_room
from holdall.tools.bench.settings import Trial, make_settings
from holdall.tools.bench.task import Task, TrainingFigures

pytest.importorskip("optuna", reason="needs the extra [search]")

SETTINGS = make_settings("demo", "sac", ["balanced"], 60, 1, ["holdall"], "1GiB", threads=1)
SMALL = SearchSpace((400, 500), (16,), (1, 2), (1,))


def nothing(what: str, share: float) -> None:
    """Show no progress."""


@pytest.mark.nightly
@pytest.mark.timeout(900)  # processes that import torch, on whatever machine
def test_a_search_continues_and_does_not_start_trials_that_cannot_fit(tmp_path: Path) -> None:
    storage = tmp_path / "study.journal"
    first = Search(SETTINGS, storage, SMALL)
    (one,) = first.run(1, nothing)
    assert one.state == "complete", one.reason
    assert one.is_best
    assert one.samples_per_second == pytest.approx(16 * (one.steps_per_second or 0.0))
    assert 400 <= one.capacity <= 500
    assert (one.peak_bytes or 0) < 2**30
    assert "replay_buffer_class=ReplayBuffer" in first.write_code(one)
    assert f"buffer_size={one.capacity:_}" in first.write_code(one)

    again = Search(SETTINGS, storage, SearchSpace((90_000_000, 90_000_001), (16,), (1, 2), (1,)), first.trial)
    assert [found.number for found in again.list_trials()] == [one.number], "the storage remembers"
    (other,) = again.run(2, nothing)
    assert other.state == "pruned"
    assert other.reason.startswith("not started: it would take ")


def test_a_trial_is_stopped_before_it_exceeds_the_limit() -> None:
    filling = ChildProgress(30, 100, "fill", resident_bytes=400 * 2**20)
    require_room(filling, 380 * 2**20, 2**29)
    with pytest.raises(TrialStopped, match=r"400\.0 MiB: it would take 633\.3 MiB, and the limit is 512\.0 MiB"):
        require_room(filling, 300 * 2**20, 2**29)
    with pytest.raises(TrialStopped, match=r"600\.0 MiB"):
        require_room(ChildProgress(30, 100, "train", resident_bytes=600 * 2**20), 300 * 2**20, 2**29)


def test_a_trial_above_the_limit_is_pruned(tmp_path: Path) -> None:
    """A peak between two readings is seen only at the end."""
    figures = TrainingFigures(
        steps=120,
        buffer_bytes=10**6,
        filled=1.0,
        steps_per_second=20.0,
        fill_per_second=100.0,
        bytes_per_transition=None,
        rewards=[],
        checkpoint=SaveFigures(1.0, 1, None),
        peaks={"train": 600 * 2**20, "save": 2**30 + 1},
        seconds=10.0,
    )

    def run_task(_: Task) -> Generator[TrainingFigures, None, None]:
        yield figures

    trial = Trial(1_000, 10**6, 300 * 2**20, figures, 10.0)
    (one,) = Search(SETTINGS, tmp_path / "study.journal", SMALL, trial, run_task).run(1, nothing)
    assert one.state == "pruned"
    assert one.reason == "took 1.0 GiB at its peak, and the limit is 1.0 GiB"
    assert not one.is_best


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algo", "ppo"], "algo (ppo) has no replay buffer"),
        (["--buffer", "reverb"], "buffers (reverb) must be among sb3, holdall"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "search", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1

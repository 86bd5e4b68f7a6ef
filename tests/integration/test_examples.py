"""The examples run unchanged, at toy size, so a copy of them works."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = {
    "ape_x": 20,
    "data_parallel": 20,
    "dqn_atari": 60,
    "dqn_own_loop": 600,
    "dqn_torchrl": 128,
    "her_bit_flipping": 120,
    "market_windows": 160,
    "ppo_stacked_frames": 64,
    "r2d2": 20,
    "r2d2_t_maze": 1200,
    "recurrent_sequences": 240,
    "resume_after_a_crash": 120,
    "sac_camera_dict": 104,
}
ELSEWHERE = {"checkpoint_to_s3"}  # needs a server: tests/crash
APART = {"ape_x", "data_parallel", "r2d2", "resume_after_a_crash"}  # those with Ray, and one that is run twice
OVER_SHARDS = ("ape_x", "r2d2", "data_parallel")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
NEEDS = {"dqn_atari": "ale_py", "dqn_torchrl": "torchrl", "ppo_stacked_frames": "ale_py"}


def run(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(STEPS[name])])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_run_somewhere() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*STEPS, *ELSEWHERE}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_three_lines_of_an_example_are_holdalls(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert [number for number in (1, 2, 3, 4) if f"  # {number}" in text] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3 on progress, and on what it wraps
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(set(STEPS) - APART))
def test_an_example_runs_and_says_what_its_memory_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    run(name, monkeypatch, tmp_path)
    assert "times smaller" in capsys.readouterr().out or name == "ppo_stacked_frames"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_maze_that_needs_a_memory_is_solved_with_stored_states_alone() -> None:
    """Without a state every turn is a guess, whatever is learned."""
    maze = runpy.run_path(str(EXAMPLES / "r2d2_t_maze.py"))
    solved = {recurrent: maze["success"](maze["train"](recurrent, 3_000)[0]) for recurrent in (False, True)}
    assert solved[True] >= 0.95
    assert solved[False] <= 0.65


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OVER_SHARDS)
def test_actors_and_shards_train_an_agent(name: str, tmp_path: Path) -> None:
    """With a cluster of their own. By day one of them has that of the tests: tests/shards/test_example.py.

    That they learn, and go on after kill -9, is shown in tests/shards/chaos/test_examples_after_kills.py.
    """
    pytest.importorskip("ray", reason="ray is not installed")
    script = [sys.executable, str(EXAMPLES / f"{name}.py"), str(STEPS[name])]
    ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True, env=ONE_THREAD)
    assert "times smaller" in ran.stdout
    assert name != "data_parallel" or "2 ranks, weights alike, 0 rows" in ran.stdout


@pytest.mark.nightly  # in make test, sb3/test_resume.py kills a training
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_training_that_can_crash_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run has nothing of the first one but its files."""
    said = []
    for _ in range(2):
        run("resume_after_a_crash", monkeypatch, tmp_path)
        said.append(capsys.readouterr().out)
    assert "done at step 120" in said[0]
    assert "resumed at step 120, with 120 transitions" in said[1]
    assert "done at step 240" in said[1]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing TorchRL's collectors warns of its own classes
def test_dqn_learns_the_same_from_torchrls_storage_and_from_holdalls() -> None:
    """With one seed the weights agree to the last bit, and most balls are caught."""
    data = pytest.importorskip("torchrl.data")
    from holdall.torchrl import HoldallStorage

    game = runpy.run_path(str(EXAMPLES / "dqn_torchrl.py"))
    trained = [game["train"](storage, 29_952) for storage in (data.LazyTensorStorage(20_000), HoldallStorage(20_000))]
    weights = [list(network.parameters()) for network, _ in trained]
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*weights, strict=True))
    assert trained[1][1] >= 0.8

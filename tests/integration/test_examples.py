"""The examples run unchanged, with few steps."""

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
TESTED_ELSEWHERE = {"checkpoint_to_s3"}  # It needs a server: tests/crash/test_example.py.
IN_OTHER_TESTS = {"ape_x", "data_parallel", "r2d2", "resume_after_a_crash"}  # Three need Ray, and one runs twice.
OVER_SHARDS = ("ape_x", "r2d2", "data_parallel")
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}
NEEDED_PACKAGES = {"dqn_atari": "ale_py", "dqn_torchrl": "torchrl", "ppo_stacked_frames": "ale_py"}


def run_example(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(STEPS[name])])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_run_somewhere() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*STEPS, *TESTED_ELSEWHERE}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_an_example_marks_three_lines_that_use_holdall(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert [number for number in (1, 2, 3, 4) if f"  # {number}" in text] == [1, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Stable-Baselines3 warns about progress bars and wrappers.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(set(STEPS) - IN_OTHER_TESTS))
def test_an_example_runs_and_prints_the_report_of_its_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in NEEDED_PACKAGES and importlib.util.find_spec(NEEDED_PACKAGES[name]) is None:
        pytest.skip(f"{NEEDED_PACKAGES[name]} is not installed")
    run_example(name, monkeypatch, tmp_path)
    assert "times smaller" in capsys.readouterr().out or name == "ppo_stacked_frames"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_only_the_recurrent_network_solves_the_maze() -> None:
    """Without a recurrent state, every turn is a guess."""
    maze = runpy.run_path(str(EXAMPLES / "r2d2_t_maze.py"))
    solved = {recurrent: maze["measure_success"](maze["train"](recurrent, 3_000)[0]) for recurrent in (False, True)}
    assert solved[True] >= 0.95
    assert solved[False] <= 0.65


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OVER_SHARDS)
def test_actors_and_shards_train_an_agent(name: str, tmp_path: Path) -> None:
    """Each example starts its own Ray cluster. tests/shards/test_example.py runs one of them with the tests' cluster.

    tests/shards/chaos/test_examples_after_kills.py checks that they learn, and that they continue after kill -9.
    """
    pytest.importorskip("ray", reason="ray is not installed")
    script = [sys.executable, str(EXAMPLES / f"{name}.py"), str(STEPS[name])]
    ran = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True, env=ONE_THREAD)
    assert "times smaller" in ran.stdout
    assert name != "data_parallel" or "2 ranks, weights alike, 0 rows" in ran.stdout


@pytest.mark.nightly  # In `make test`, sb3/test_resume.py kills a training.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_second_run_of_resume_after_a_crash_continues_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run has only the files of the first one."""
    outputs = []
    for _ in range(2):
        run_example("resume_after_a_crash", monkeypatch, tmp_path)
        outputs.append(capsys.readouterr().out)
    assert "done at step 120" in outputs[0]
    assert "resumed at step 120, with 120 transitions" in outputs[1]
    assert "done at step 240" in outputs[1]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Importing TorchRL's collectors causes such warnings.
def test_dqn_learns_the_same_from_torchrls_storage_and_from_holdalls() -> None:
    """With one seed the weights agree to the last bit, and most balls are caught."""
    data = pytest.importorskip("torchrl.data")
    from holdall.torchrl import HoldallStorage

    game = runpy.run_path(str(EXAMPLES / "dqn_torchrl.py"))
    trained = [game["train"](storage, 29_952) for storage in (data.LazyTensorStorage(20_000), HoldallStorage(20_000))]
    weights = [list(network.parameters()) for network, _ in trained]
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*weights, strict=True))
    assert trained[1][1] >= 0.8

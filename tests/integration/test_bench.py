"""`holdall bench profiles`, run as its users run it, at toy size: real processes, real trainings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdall.cli import app
from holdall.tools.bench.run import make_results_header, read_results, write_line
from holdall.tools.bench.settings import Calibration, ProfileSize, calibrate, make_settings

PAGE = Path(__file__).parents[2] / "docs" / "bench.md"
BENCH = [sys.executable, "-m", "holdall", "bench", "profiles"]
# Calibration counts the resident pages of shared libraries, and the page cache decides how many of them are resident.
# A process that had only built a PPO model took 325 to 429 MiB in the same environment. The profile "fast" gets 40 % of
# this limit. With the pinned CPU build of torch, that is enough even if all 560 MiB of mapped libraries are resident.
ROOMY_LIMIT = "3GiB"


def write_begun_bench(
    path: Path, size: int, *, env: str = "demo", algo: str = "sac", fills: bool = True, **changes: Any
) -> None:
    """Write the results of a bench with one small profile and no runs yet."""
    given: dict[str, Any] = {"buffers": ["sb3", "holdall"], "seeds": 1} | changes
    settings = make_settings(env, algo, ["fast"], timesteps=60, limit="1GiB", fills=fills, threads=1, **given)
    sizes = {"fast": ProfileSize(0.4, 2**29, 16, size, None, ("sb3", "holdall"))}
    calibration = Calibration(sizes, {"fast/sb3": 5.0, "fast/holdall": 5.0})
    with path.open("w") as file:
        write_line(file, make_results_header(settings, calibration, 10.0))


def resume_bench(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Make the remaining runs. Return the printed records, and stderr."""
    done = subprocess.run([*BENCH, "--resume", str(path), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


BOTH_BUFFERS = pytest.param(["sb3", "holdall"], marks=pytest.mark.nightly)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("buffers", [["holdall"], BOTH_BUFFERS])
def test_profiles_are_calibrated_trained_and_ranked(buffers: list[str], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith("# a quick look")]
    asked = line.partition("#")[0].split()[3:]
    command = [*BENCH, *asked, "--buffers", *buffers, "--threads", "1", "--out", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert kinds == ["header", *["run" for _ in buffers], "ranking", "ranking", "ranking"]
    first, runs = read_results(path)
    size = first.unchecked["calibration"]["sizes"]["fast"]
    assert size["fits"] == buffers
    assert [(run.profile, run.buffer, run.status) for run in runs] == [("fast", name, "done") for name in buffers]
    assert all(run.size == size["size"] > 0 for run in runs)
    assert all(max(run.peaks.values()) < 0.4 * 3 * 2**30 for run in runs), "the profile is 40 % of the limit"
    assert all((run.steps_per_second or 0.0) > 0 for run in runs)
    assert all(run.bytes_per_transition is None for run in runs), "the buffers were not filled"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("buffer", ["sb3", pytest.param("holdall", marks=pytest.mark.nightly)])
def test_profiles_of_rollouts_get_a_size_that_fits_their_share(buffer: str) -> None:
    settings = make_settings("CartPole-v1", "ppo", ["fast"], 60, 1, [buffer], ROOMY_LIMIT, threads=1)
    calibration = calibrate(settings, lambda what, share: None)
    size = calibration.sizes["fast"]
    assert size.fits == (buffer,)
    assert size.size > size.batch_size
    assert calibration.seconds[f"fast/{buffer}"] > 0


CAMERA = pytest.param("demo", "sac", 1_200, marks=pytest.mark.nightly)


@pytest.mark.nightly
@pytest.mark.timeout(900)  # three processes, on whatever machine
@pytest.mark.parametrize(("env", "algo", "size"), [("CartPole-v1", "dqn", 256), CAMERA])
def test_ctrl_c_keeps_finished_runs_and_resume_makes_the_others_once(
    env: str, algo: str, size: int, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    write_begun_bench(path, size, env=env, algo=algo)
    # A process in the background of a shell ignores interrupts, and its children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen([*BENCH, "--resume", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    while not read_results(path)[1] and child.poll() is None:
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGINT)
    _, message = child.communicate()
    assert child.returncode == 130, message
    assert "--resume" in message.replace("\n", " ")
    (first,) = read_results(path)[1]

    records, _ = resume_bench(path)
    runs = {run.buffer: run for run in read_results(path)[1]}
    assert runs["sb3"] == first, "what was done is not run again"
    assert [run.status for run in runs.values()] == ["done", "done"]
    assert all(run.filled == 1.0 for run in runs.values())
    assert runs["holdall"].rewards == runs["sb3"].rewards, "only the buffer differs"
    if env == "demo":  # large observations
        assert runs["holdall"].bytes_per_transition < 0.6 * runs["sb3"].bytes_per_transition  # type: ignore[operator]  # both were measured
        assert runs["holdall"].checkpoint["bytes"] < runs["sb3"].checkpoint["bytes"]  # type: ignore[index]  # both were saved
    ranking = next(record for record in records if record["kind"] == "ranking" and record["by"] == "memory")
    # The libraries take much more memory than buffers of this size, so either buffer may be first.
    assert (sorted(ranking["order"]), ranking["refused"]) == ([["fast", "holdall"], ["fast", "sb3"]], None)


@pytest.mark.nightly
def test_buffers_that_were_not_filled_are_not_ranked_by_memory(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write_begun_bench(path, 5_000, fills=False, buffers=["holdall"])
    records, _ = resume_bench(path)
    (run,) = read_results(path)[1]
    assert run.filled < 0.1
    ranking = next(record for record in records if record["kind"] == "ranking" and record["by"] == "memory")
    assert ranking["order"] == []
    assert "of 5,000 transitions when it was measured" in ranking["refused"]


@pytest.mark.nightly
@pytest.mark.parametrize(("algo", "env"), [("td3", "Pendulum-v1"), ("dqn", "CartPole-v1"), ("ppo", "CartPole-v1")])
def test_every_algorithm_runs_with_either_buffer(tmp_path: Path, algo: str, env: str) -> None:
    path = tmp_path / "results.jsonl"
    write_begun_bench(path, 256, env=env, algo=algo)
    resume_bench(path)
    runs = read_results(path)[1]
    assert [run.status for run in runs] == ["done", "done"]
    assert runs[0].rewards == runs[1].rewards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profiles", "fast", "slow"], "profiles (slow) must be among memory-efficient, fast"),
        (["--algo", "a3c"], "algo (a3c) must be among sac, td3, dqn, ppo"),
        (["--resume", "nowhere.jsonl"], "file (nowhere.jsonl) cannot be read"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "profiles", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1

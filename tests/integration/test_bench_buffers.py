"""`holdall bench buffers`, run as its users run it, on a made-up trace."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from holdall.cli import app
from holdall.tools.bench.trace import TraceRecorder

TRANSITIONS = 600


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Frames of noise in stacks of 4. Every second episode is truncated."""
    file = tmp_path_factory.mktemp("traces") / "noise.npz"
    rng = np.random.default_rng(0)
    recorder = TraceRecorder(stack=4)
    for episode in range(TRANSITIONS // 50):
        recorder.begin(rng.integers(0, 256, (24, 24), np.uint8))
        for step in range(50):
            ends = step == 49
            screen = rng.integers(0, 256, (24, 24), np.uint8)
            recorder.step(step % 3, rng.normal(), screen, ends and episode % 2 == 0, ends and episode % 2 == 1)
    recorder.save(file)
    return file


@pytest.mark.timeout(900)  # four processes, on whatever machine
def test_only_the_buffer_with_wrong_rows_is_reported_as_wrong(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    libraries = ["sb3 optimize_memory_usage", "holdall", "cpprb"]
    command = [sys.executable, "-m", "holdall", "bench", "buffers", "--trace", str(trace), "--rounds", "1"]
    done = subprocess.run(
        [*command, "--out", str(out), "--libraries", *libraries], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert records[0]["format"] == "holdall-bench-buffers-1"
    found = {record["library"]: record for record in records if record["kind"] == "buffer"}
    for name in ("holdall", "holdall compressed"):
        assert found[name]["exact"] is True
        assert found[name]["compared"] == found[name]["transitions"] == TRANSITIONS
        assert found[name]["bytes"] < found["sb3 optimize_memory_usage"]["bytes"] + 2**24
    # A row that ends an episode is followed by the next episode's first observation; the last of 12 is intact.
    shared = found["sb3 optimize_memory_usage"]
    assert (shared["exact"], shared["wrong"]) == (False, TRANSITIONS // 50 - 1)
    assert "next_obs wrong in 11 of 600 rows" in shared["note"]
    if importlib.util.find_spec("cpprb") is None:
        assert "cpprb next_of on noise was not measured: cpprb is not installed" in done.stdout.replace("\n", " ")


def test_an_environment_is_recorded_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdall.tools.bench.trace", "--env", "holdall.tools.demo:CameraRover"]
    file = tmp_path / "rover.npz"
    subprocess.run([*command, "--transitions", "130", "--out", str(file)], check=True, capture_output=True)
    with np.load(file) as arrays:
        assert arrays["f_camera"].shape == (130 + len(arrays["ep"]), 84, 84, 3)
        assert arrays["ep"][:, 1].sum() == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--libraries", "reverb"], "libraries ('reverb') must be among"),
        (["--case", "chess"], "case ('chess') must be one of atari, camera, vector"),
        (["--case", "camera", "--env", "CartPole-v1"], "Pass one of them"),
        (["--trace", "nowhere.npz", "--libraries", "holdall"], "trace (nowhere.npz) is not a file"),
        (["--case", "camera", "--out", "/no/such/folder/out"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "buffers", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1

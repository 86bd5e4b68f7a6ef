"""`benchmarks/gate.py` at toy size: it verifies rows, stores a table and compares with it. No times are judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gate.py"
TRANSITIONS = 300
FIGURES = ("add", "sample(1)", "sample(32)", "sample(256)", "bytes")
WRONG_REWARDS = """
import runpy, sys
from pathlib import Path
import holdall.sb3

class WrongBuffer(holdall.sb3.ReplayBuffer):
    def add(self, obs, next_obs, action, reward, done, infos):
        super().add(obs, next_obs, action, reward + 1, done, infos)

holdall.sb3.ReplayBuffer = WrongBuffer
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = pytest.mark.timeout(600)  # the machine may be busy


def run_gate(*arguments: str | Path, program: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ale_py")
    sizes = ["--transitions", str(TRANSITIONS), "--rounds", "2"]
    command = [sys.executable, *program, str(SCRIPT), *sizes, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def write_table(file: Path, **compressed: float) -> Path:
    """Write another processor's table of figures that no run exceeds, except for those that are named."""
    generous = dict.fromkeys(FIGURES, 1e9)
    stored = {
        "settings": {"clock": "cpu", "transitions": TRANSITIONS},
        "machine": {"processor": "another processor"},
        "checksums": {"vector": 0},
        "figures": {"vector raw": generous, "vector compressed": generous | compressed},
    }
    file.write_text(json.dumps({"another processor": stored}), encoding="utf-8")
    return file


def test_rows_of_every_workload_are_verified_before_the_table_is_stored(tmp_path: Path) -> None:
    done = run_gate("--store", "--table", tmp_path / "gate.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong rows of 6144" in done.stdout
    (stored,) = json.loads((tmp_path / "gate.json").read_text(encoding="utf-8")).values()
    rows = [f"{workload} {form}" for workload in ("atari", "camera", "vector") for form in ("raw", "compressed")]
    assert list(stored["figures"]) == rows
    for row in stored["figures"].values():
        assert set(row) == {*FIGURES, "sb3_bytes", "add_us"}
        assert all(value > 0 for value in row.values())
        assert row["bytes"] < row["sb3_bytes"]
    assert {"commit", "date", "machine", "versions", "settings", "checksums"} < set(stored)


def test_only_a_figure_that_is_worse_than_stored_fails_the_gate(tmp_path: Path) -> None:
    done = run_gate("--only", "vector", "--table", write_table(tmp_path / "gate.json", bytes=1.0, add=1e-9))
    assert done.returncode == 1, done.stdout + done.stderr
    worse = [line for line in done.stdout.splitlines() if line.startswith("WORSE")]
    assert len(worse) == 1
    assert worse[0].startswith("WORSE: vector compressed, bytes: ")
    assert "the observations of vector are not those of the table" in done.stdout
    assert "so only bytes were compared" in done.stdout


def test_a_wrong_row_fails_the_gate(tmp_path: Path) -> None:
    table = write_table(tmp_path / "gate.json")
    done = run_gate("--only", "vector", "--table", table, program=("-c", WRONG_REWARDS))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "WORSE" not in done.stdout
    assert "2048 wrong rows of 2048" in done.stdout

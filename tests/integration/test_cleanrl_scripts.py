"""CleanRL's published scripts, unchanged but for the import, give the same weights with holdall's buffer.

They are published as a repository alone: the newest release of the package `cleanrl` is of 2021 and has other scripts.
So HOLDALL_CLEANRL names a checkout, and HOLDALL_CLEANRL_PYTHON an interpreter with what the scripts need: gymnasium
0.29, which they were written for, torch, tyro, tensorboard, and more for some of them (see the benchmark).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "training" / "cleanrl_scripts.py"
RUNS = ["dqn", "c51", "dqn_jax", "ddpg", "td3", "sac", "td3_jax", "dqn_atari", "dqn_atari_cut"]


def test_all_scripts_of_the_benchmark_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert list(runpy.run_path(str(SCRIPT))["RUNS"]) == RUNS


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("script", RUNS)
def test_a_published_script_gives_the_same_weights(script: str) -> None:
    checkout = os.environ.get("HOLDALL_CLEANRL")
    if checkout is None:
        pytest.skip("HOLDALL_CLEANRL names no checkout of CleanRL, whose scripts no package registry has")
    python = os.environ.get("HOLDALL_CLEANRL_PYTHON", sys.executable)
    command = [python, str(SCRIPT), "--cleanrl", checkout, "--script", script, "--rounds", "1"]
    settings = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

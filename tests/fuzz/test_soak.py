"""Rows of every tier are right, while others add, save, fork, and are interrupted and killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .seeds import choose_seed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="children are forked")


def run_soak(rows: float, seed: int, *tiers: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--rows", str(rows), "--seed", str(seed)]
    command += ["--tier", *tiers] if tiers else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_no_row_of_a_short_soak_is_wrong() -> None:
    """The soak has two tiers and rollouts."""
    result = run_soak(20_000, 0, "vectors", "spilled")
    assert result["rows"] >= 20_000
    assert result["wrong_rows"] == 0
    assert min(result["done"][what] for what in ("saves", "loads", "forks", "kills", "rollouts")) > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_row_of_a_long_soak_is_wrong() -> None:
    """The soak has all tiers, and another seed every day."""
    result = run_soak(1e8, choose_seed())
    assert result["rows"] >= 1e8
    assert result["wrong_rows"] == 0
    assert sum(count for what, count in result["done"].items() if what.startswith("interrupts")) > 1_000

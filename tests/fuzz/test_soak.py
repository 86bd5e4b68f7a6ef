"""Rows of every tier, gathered while others add, save, fork, are interrupted and killed. All rows are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .seeds import rotating_seed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="children are forked")


def soak(rows: float, seed: int, *tiers: str) -> dict[str, Any]:
    command = [sys.executable, str(SCRIPT), "--rows", str(rows), "--seed", str(seed)]
    command += ["--tier", *tiers] if tiers else []
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_no_row_of_some_is_wrong() -> None:
    """A short one, of two tiers and of rollouts."""
    result = soak(20_000, 0, "vectors", "spilled")
    assert result["rows"] >= 20_000
    assert result["wrong_rows"] == 0
    assert min(result["done"][what] for what in ("saves", "loads", "forks", "kills", "rollouts")) > 0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_no_row_of_a_hundred_million_is_wrong() -> None:
    """All tiers, from another seed every day."""
    result = soak(1e8, rotating_seed())
    assert result["rows"] >= 1e8
    assert result["wrong_rows"] == 0
    assert sum(count for what, count in result["done"].items() if what.startswith("interrupts")) > 1_000

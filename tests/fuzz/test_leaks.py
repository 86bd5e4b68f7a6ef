"""No method of a native type leaks references or memory, neither when it works nor when it refuses its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "leaks.py"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("calls", [300, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_no_method_leaks(calls: int) -> None:
    """Every method and attribute has a case, so a new one without a case fails here."""
    command = [sys.executable, str(SCRIPT), "--calls", str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["fewest_calls_of_a_method"] >= calls

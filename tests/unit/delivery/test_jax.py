"""Batches for JAX, tested in another process: JAX starts threads, and a process with threads must not fork."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CASES = {"a memory": TESTS / "unit" / "delivery" / "jax_cases.py", "shards": TESTS / "shards" / "jax_answers.py"}


@pytest.mark.skipif(find_spec("jax") is None, reason="needs the extra jax")
@pytest.mark.parametrize("source", CASES)
def test_the_jax_cases_pass_in_another_process(source: str) -> None:
    if source == "shards":
        pytest.importorskip("ray", reason="holdall.ray needs ray: pip install 'holdall[ray]'")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:benchmark",
        str(CASES[source]),
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

"""Batches for JAX, in a process of their own: JAX starts threads, and a process that has them must not fork."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("jax") is None, reason="needs the extra jax")
def test_batches_for_jax() -> None:
    cases = Path(__file__).with_name("jax_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr

"""The tests of the native module pass in a build with sanitizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .sanitizer import ROOT, build_sanitized, copy_package

NATIVE_TESTS = (
    "tests/unit/store",
    "tests/unit/codec",
    "tests/unit/sampling/test_sumtree.py",
    "tests/unit/test_advantages.py",
    "tests/unit/test_array_pool.py",
    "tests/unit/test_draw_slots.py",
    "tests/unit/test_observation_log.py",
    "tests/unit/test_threads.py",
    "tests/property/test_rollout_against_lists.py",
)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_sanitizers_find_nothing_in_the_tests_of_the_native_module(tmp_path: Path) -> None:
    """A sanitizer ends the process with a report on stderr."""
    environment = {**os.environ, **build_sanitized(copy_package(tmp_path)), "HYPOTHESIS_PROFILE": "fast"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *NATIVE_TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]

"""The test suites of Stable-Baselines3 and sb3-contrib, run with holdall's buffers in the place of theirs.

Their tests are in their source distributions, which `make nightly` fetches; in_place.py exchanges the classes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
FETCHED = ROOT / ".cache" / "sb3-tests"
PLOTS = ROOT / ".cache" / "sb3" / "plots"

CANNOT_APPLY = {
    "stable_baselines3": {
        "tests/test_buffers.py::test_custom_rollout_buffer": "wants a DictRolloutBuffer to refuse Box observations; "
        "holdall has one class for both",
    },
    "sb3_contrib": {},
}
"""Tests of promises that holdall's classes do not make, with the reason."""
ELSEWHERE = {
    "stable_baselines3": {
        "tests/test_logger.py::test_set_logger": "needs tensorboard",
        "tests/test_logger.py::test_fps_logger[A2C]": "depends on the clock",
        "tests/test_logger.py::test_fps_logger[DQN]": "depends on the clock",
        "tests/test_vec_envs.py::test_video_recorder": "needs pygame",
    },
    "sb3_contrib": {},
}
"""Tests that also fail with Stable-Baselines3's own buffers here, with the reason."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]


def find_tests(project: str) -> Path:
    found = sorted(FETCHED.glob(f"{project}-*/tests"))
    if not found or not (FETCHED / ".stamp").exists():
        pytest.skip(f"needs the tests of {project}, which `make nightly` fetches where there is a network")
    return found[0].parent


def run_python(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, [ROOT / "src", ROOT, PLOTS]))
    surroundings = os.environ | {"PYTHONPATH": paths, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=surroundings, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("project", CANNOT_APPLY)
def test_their_own_tests_pass_with_holdalls_buffers(project: str, tmp_path: Path) -> None:
    """The tests that are listed above are left out. Each of them exists."""
    folder = find_tests(project)
    results = tmp_path / "results.xml"
    left_out = list(CANNOT_APPLY[project] | ELSEWHERE[project])
    plugin = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.integration.sb3.in_place"]
    done = run_python([*plugin, f"--junitxml={results}", *(f"--deselect={test}" for test in left_out), "tests"], folder)
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None, done.stdout[-6000:]
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    assert failed == [], done.stdout[-6000:]
    assert f"{len(left_out)} deselected" in done.stdout or not left_out, "a test that is left out does not exist"
    assert int(suite.get("tests", 0)) > 100

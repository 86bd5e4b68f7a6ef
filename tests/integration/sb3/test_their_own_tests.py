"""The test suites of Stable-Baselines3 and sb3-contrib, run with holdall's buffers in the place of theirs; and rl-zoo.

Their tests are in their source distributions, which `make nightly` fetches; in_place.py exchanges the classes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
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
"""Tests that say something of Stable-Baselines3's classes that holdall's do not promise, and why."""
ELSEWHERE = {
    "stable_baselines3": {
        "tests/test_logger.py::test_set_logger": "needs tensorboard",
    },
    "sb3_contrib": {},
}
"""Tests that fail with their own buffers, too, where this suite runs."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]


def fetched(project: str) -> Path:
    found = sorted(FETCHED.glob(f"{project}-*/tests"))
    if not found or not (FETCHED / ".stamp").exists():
        pytest.skip(f"needs the tests of {project}, which `make nightly` fetches where there is a network")
    return found[0].parent


def python(arguments: list[str], cwd: Path, *places: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, [ROOT / "src", ROOT, *places, PLOTS]))
    surroundings = os.environ | {"PYTHONPATH": paths, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=surroundings, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("project", CANNOT_APPLY)
def test_their_own_tests_pass_with_holdalls_buffers(project: str, tmp_path: Path) -> None:
    """All but those listed above, each of which exists."""
    folder, results = fetched(project), tmp_path / "results.xml"
    left_out = list(CANNOT_APPLY[project] | ELSEWHERE[project])
    plugin = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.integration.sb3.in_place"]
    done = python([*plugin, f"--junitxml={results}", *(f"--deselect={test}" for test in left_out), "tests"], folder)
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


def test_rl_zoo_trains_the_same_weights(tmp_path: Path) -> None:
    """With a Python file of hyperparameters, as docs/sb3.md has it, and with the class on the command line."""
    published = ROOT / ".cache" / "published"
    if not (FETCHED / "zoo" / "huggingface_sb3").is_dir() or not (published / "rl_zoo3").is_dir():
        pytest.skip("needs rl_zoo3 and what it imports, which `make nightly` fetches where there is a network")
    text = (ROOT / "docs" / "sb3.md").read_text()
    recipe = next(part.partition("```")[0] for part in text.split("```python\n")[1:] if "rl_zoo3" in part)
    (tmp_path / "with_holdall.py").write_text(recipe)
    line = next(row for row in text.splitlines() if "__import__" in row and "-params" in row)
    ways = {
        "plain": [],
        "file": ["--conf-file", "with_holdall.py"],
        "line": ["-params", line.partition("-params ")[2].strip().strip('"')],
    }
    common = [
        "--algo",
        "dqn",
        "--env",
        "CartPole-v1",
        "-n",
        "400",
        "--seed",
        "3",
        "--eval-freq",
        "-1",
        "--device",
        "cpu",
    ]
    weights = {}
    for name, options in ways.items():
        params = ["learning_starts:100", "buffer_size:1000", *(options[1:] if name == "line" else [])]
        own = options if name == "file" else []
        command = ["-m", "rl_zoo3.train", *common, "-f", name, *own, "-params", *params]
        done = python(command, tmp_path, published, FETCHED / "zoo")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert ("holdall" in done.stdout) == (name != "plain"), "what was trained with is printed"
        with zipfile.ZipFile(tmp_path / name / "dqn" / "CartPole-v1_1" / "CartPole-v1.zip") as model:
            weights[name] = model.read("policy.pth")
    assert weights["plain"] == weights["file"] == weights["line"]
    watched = ["-m", "rl_zoo3.enjoy", "--algo", "dqn", "--env", "CartPole-v1", "-f", "file", "-n", "50", "--no-render"]
    done = python(watched, tmp_path, published, FETCHED / "zoo")
    assert "Mean reward" in done.stdout, done.stderr[-3000:]

"""The drop-ins with the oldest declared version of Stable-Baselines3 and with 2.7. Other tests use the newest one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FETCHED = ROOT / ".cache" / "sb3"
HERE = "tests/integration/sb3"
VERSIONS = ["2.6.0", "2.7.0"]
SOME_TESTS = [
    "test_same_weights.py::test_every_algorithm_learns_the_same_from_vectors[SAC]",
    "test_same_her.py::test_infos_reach_compute_reward",
    "test_same_rollouts.py::test_vectors_give_the_same_weights_and_curve[3-PPO]",
    "test_copies.py::test_n_steps_need_a_version_that_has_them",
    "test_prioritized.py::test_rows_are_those_of_the_plain_buffer",
    "test_prioritized_dqn.py::test_with_alpha_0_the_weights_are_those_of_dqn[MlpPolicy-3-33]",
    "test_prioritized_dqn.py::test_with_alpha_0_the_weights_are_those_of_qr_dqn[MlpPolicy]",
]
TEST_FILES = [
    "test_arrays.py",
    "test_budget.py",
    "test_contrib.py",
    "test_copies.py",
    "test_edited_rollouts.py",
    "test_prioritized.py",
    "test_prioritized_dqn.py",
    "test_resume.py",
    "test_same_her.py",
    "test_same_nstep.py",
    "test_same_rollouts.py",
    "test_same_samples.py",
    "test_same_weights.py",
    "test_saving.py",
    "test_slots.py",
]


def run_with(version: str, tests: list[str]) -> str:
    """Run tests in a process that imports another version. Return the last line of pytest's output."""
    if not (FETCHED / ".stamp").exists():
        pytest.skip("needs older versions of Stable-Baselines3, which `make nightly` fetches where there is a network")
    places = [str(ROOT / "src"), str(FETCHED / version), str(FETCHED / "plots")]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(places), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    chosen = [f"{HERE}/{test}" for test in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not nightly", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, *chosen], cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_the_oldest_tested_version_is_the_declared_one() -> None:
    """The rule also holds for sb3-contrib."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    declared = [
        re.findall(r"(?:stable-baselines3|sb3-contrib)>=([\d.]+)", line) for line in extras["sb3"] + extras["contrib"]
    ]
    assert sorted({version for found in declared for version in found}) == [VERSIONS[0].removesuffix(".0")]


@pytest.mark.timeout(900)  # It imports another Stable-Baselines3, matplotlib and pandas.
@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_one_training_of_each_kind_works_with_an_older_version(version: str) -> None:
    """The trainings are compared with that version's own buffers."""
    assert " passed" in run_with(version, SOME_TESTS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS)
def test_all_tests_pass_with_an_older_version(version: str) -> None:
    assert " passed" in run_with(version, TEST_FILES)

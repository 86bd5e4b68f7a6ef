"""Run LeRobot's own tests of its replay buffer: with LeRobot's class, and with holdall's class in its place.

    python benchmarks/adapters/lerobot_tests.py FOLDER [--json FILE]     # FOLDER is a checkout of LeRobot

If LeRobot cannot be imported, its buffer is loaded alone, and the tests that need LeRobot's data sets are left out.
The exit status is 1 if a test fails with holdall's class.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from lerobot_source import load_module
from results import Figure, describe_run, store
from shared.process import emit

TESTS = "tests/utils/test_replay_buffer.py"
NOT_APPLICABLE = {
    "test_memory_optimization": "counts the tensors in the attributes of two buffers; holdall's buffers have none",
}
NEEDS_DATASETS = dict.fromkeys(
    ("test_to_lerobot_dataset", "test_from_lerobot_dataset"),
    "needs LeRobot's data sets, and LeRobot's buffer was loaded alone",
)
SIDES = ("LeRobot", "holdall")


class Outcomes:
    """Plugin for pytest that collects the outcome of every test.

    Args:
        left_out: Names of tests that are not run.
    """

    def __init__(self, left_out: Collection[str]) -> None:
        self._left_out = left_out
        self.passed: list[str] = []
        self.failed: list[str] = []
        self.skipped: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remove the tests that are left out."""
        items[:] = [item for item in items if item.name not in self._left_out]

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record a phase of a test."""
        name = report.nodeid.partition("::")[2]
        if report.failed:
            self.failed.append(name)
        elif report.skipped:
            self.skipped[name] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif report.when == "call":
            self.passed.append(name)


def run_tests(folder: Path, side: str) -> dict[str, Any]:
    """Run the tests in this process."""
    loaded = load_module(folder, "rl.buffer")
    left_out: dict[str, str] = {} if loaded.is_whole else dict(NEEDS_DATASETS)
    if side == "holdall":
        loaded.module.ReplayBuffer = importlib.import_module("holdall.lerobot").ReplayBuffer
        left_out |= NOT_APPLICABLE
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    outcomes = Outcomes(left_out)
    status = pytest.main([TESTS, "-q", "--noconftest", "-p", "no:cacheprovider"], [outcomes])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"pytest could not run the tests in {folder} (status {status})")
    return {
        "lerobot": loaded.describe(),
        "passed": outcomes.passed,
        "failed": outcomes.failed,
        "left_out": left_out | outcomes.skipped,
    }


def main() -> int:
    """Run the tests of both sides, each in a process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of LeRobot")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.side is not None:
        emit({"result": run_tests(folder, arguments.side)})
        return 0
    sides: dict[str, Any] = {}
    for side in SIDES:
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--side", side]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        *output, last = done.stdout.splitlines()
        sides[side] = json.loads(last)["result"]
        if sides[side]["failed"]:
            print(*output, sep="\n", file=sys.stderr)
        counts = ", ".join(f"{len(sides[side][kind])} {kind}" for kind in ("passed", "failed", "left_out"))
        print(f"{side}: {counts} ({sides[side]['lerobot']})", file=sys.stderr)
    if arguments.json is not None:
        figures = []
        for side in SIDES:
            case = f"LeRobot's tests with {side}'s class"
            figures += [
                Figure(case, kind.replace("_", " "), "", len(sides[side][kind]), "0" if kind == "failed" else None)
                for kind in ("passed", "failed", "left_out")
            ]
        store(arguments.json, figures, describe_run({"lerobot": sides[SIDES[0]]["lerobot"], "tests": TESTS}))
    return 1 if sides["holdall"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

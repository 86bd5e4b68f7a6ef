"""All tests and measurements that need a GPU: `python benchmarks/gpu_all.py [--results FOLDER] [--short]`.

Runs the GPU tests in several processes, then the `gpu_*.py` benchmarks one after another. Prints the output of every
step, and a table of exit statuses and seconds at the end. The exit status is the highest one of all steps.

With `--results`, each benchmark also writes its figures there as JSON; `gpu_docs.py` copies them into the docs.
Everything takes about five minutes on an H200. `--short` has the tests, the memories on the GPU, the drop-in with fewer
turns, and the loader. It ends after 150 seconds at most: a step that is too slow is stopped, later ones are skipped.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SHORT_S = 150
MAX_TESTERS = 8
"""Processes that run tests. Each of them has its own context on the GPU."""
STOPPED = 124
"""Exit status of a step that was stopped, as `timeout` has it."""
SKIPPED = 125


class Step(NamedTuple):
    """One command, without `python`."""

    name: str
    command: tuple[str, ...]
    writes_json: bool = False


def list_tests() -> Step:
    """Return the step that runs the GPU tests."""
    testers = min(MAX_TESTERS, os.cpu_count() or 1)
    # pytest-benchmark, where it is installed, warns about several processes, and warnings are errors.
    plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark", "-n", str(testers), "--dist", "worksteal")
    folders = ("tests/gpu", "tests/unit/device", "tests/unit/delivery")
    return Step("tests", ("-m", "pytest", "-q", *plugins, "-m", "not nightly", *folders))


def list_benchmarks(*, is_short: bool) -> list[Step]:
    """Return the steps that measure."""
    resident = Step("gpu_resident", ("benchmarks/gpu_resident.py",), writes_json=True)
    sb3 = ("benchmarks/gpu_sb3.py",)
    if is_short:
        return [
            resident,
            Step("gpu_sb3", (*sb3, "--turns", "100"), writes_json=True),
            Step("gpu_delivery", ("benchmarks/gpu_delivery.py", "--loader")),
        ]
    return [
        resident,
        Step("gpu_delivery", ("benchmarks/gpu_delivery.py",), writes_json=True),
        Step("gpu_sb3", sb3, writes_json=True),
        Step("gpu_rollout", ("benchmarks/gpu_rollout.py",), writes_json=True),
    ]


def run(step: Step, results: Path | None, timeout_s: float | None) -> int:
    """Run a step in the root of the repository, and return its exit status."""
    command = list(step.command)
    if step.writes_json and results is not None:
        command += ["--json", str(results / f"{step.name}.json")]
    print(f"\n$ python {' '.join(command)}", flush=True)
    if timeout_s is not None and timeout_s <= 0:
        print("skipped: the time is over")
        return SKIPPED
    try:
        return subprocess.run([sys.executable, *command], cwd=ROOT, check=False, timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        print("stopped: the time is over")
        return STOPPED


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="folder for the figures of all benchmarks")
    parser.add_argument("--short", action="store_true", help=f"the most important parts, in {SHORT_S} seconds at most")
    parser.add_argument("--skip-tests", action="store_true", help="only measure")
    arguments = parser.parse_args()
    results = None if arguments.results is None else arguments.results.resolve()
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
    steps = list_benchmarks(is_short=arguments.short)
    if not arguments.skip_tests:
        steps.insert(0, list_tests())
    begun = time.monotonic()
    outcomes: list[tuple[str, int, float]] = []
    for step in steps:
        step_begun = time.monotonic()
        timeout_s = SHORT_S - (step_begun - begun) if arguments.short else None
        status = run(step, results, timeout_s)
        outcomes.append((step.name, status, time.monotonic() - step_begun))
    print("\n| step | exit status | seconds |\n|---|---|---|")
    for name, status, seconds in outcomes:
        print(f"| {name} | {status} | {seconds:.0f} |")
    return max(abs(status) for _, status, _ in outcomes)


if __name__ == "__main__":
    sys.exit(main())

"""All tests and measurements that need a GPU: `python benchmarks/gpu_all.py [--results FOLDER]`.

Runs the GPU tests first, and stops if one fails. Then runs every `gpu_*.py` benchmark, about five minutes on an H200.
With `--results`, each benchmark also writes its figures there as JSON; `gpu_docs.py` copies them into the docs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("tests/gpu", "tests/unit/device", "tests/unit/delivery")
BENCHMARKS = ("gpu_resident", "gpu_delivery", "gpu_sb3", "gpu_rollout")


def run(*command: str) -> int:
    """Run a command with this Python, in the root of the repository, and return its exit status."""
    print(f"\n$ python {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="folder for the figures of all benchmarks")
    parser.add_argument("--skip-tests", action="store_true", help="only measure")
    arguments = parser.parse_args()
    if not arguments.skip_tests:
        status = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-m", "not nightly", *TESTS)
        if status:
            return status
    worst = 0
    for name in BENCHMARKS:
        json = [] if arguments.results is None else ["--json", str(arguments.results / f"{name}.json")]
        worst = max(worst, run(f"benchmarks/{name}.py", *json))
    return worst


if __name__ == "__main__":
    sys.exit(main())

"""How long `holdall lint` takes for a script: the whole command, from its start to its exit.

    python benchmarks/lint.py [--runs 9]

Both sides take turns: the command, and an interpreter that only imports holdall. CPU seconds are those that the process
used itself; on a busy machine the wall clock also counts the others.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "examples" / "notes" / "note_004.py"
SIDES = {
    "import holdall": ["-c", "import holdall"],
    "holdall lint": ["-m", "holdall", "lint", str(SCRIPT), "--fail-on", "never"],
}


def timed(arguments: list[str]) -> tuple[float, float]:
    """Return the wall and CPU seconds of one process."""
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    wall, after = time.perf_counter() - began, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    runs = parser.parse_args().runs
    for arguments in SIDES.values():
        timed(arguments)  # compiles what is imported for the first time
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    for _ in range(runs):
        for name, arguments in SIDES.items():
            taken[name].append(timed(arguments))
    for name, both in taken.items():
        for what, values in zip(("wall", "CPU"), zip(*both, strict=True), strict=True):
            print(f"{name:16} {what:4} s: minimum {min(values):.3f}, median {statistics.median(values):.3f}")


if __name__ == "__main__":
    main()

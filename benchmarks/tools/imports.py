"""Measure how long imports take, in fresh processes.

    python benchmarks/tools/imports.py [--before SRC] [--json FILE]

With `--before`, the folder `src` of another commit, the imports of both are measured in turns. The figures are medians
over the processes. The bytes of the modules are compiled and in the page cache, because a first process imports them
without being measured. The time of an interpreter that imports nothing is subtracted. CPU time depends less on other
programs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store

ROUNDS = 7
STATEMENTS = {
    "holdall": "import holdall",
    "holdall.ReplayMemory": "from holdall import ReplayMemory",
    "holdall.sb3": "import holdall.sb3",
    "stable_baselines3": "import stable_baselines3",
    "numpy, gymnasium": "import numpy, gymnasium",
}
"""What is measured. `import holdall` loads names when they are used. The last two are what the others load."""


def time_process(statement: str, source: Path | None) -> tuple[float, float]:
    """Run a statement in a fresh interpreter, with the packages of `source` first. Return clock and CPU seconds."""
    environment = os.environ | ({} if source is None else {"PYTHONPATH": str(source)})
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", statement], env=environment)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{statement!r} failed with exit code {process.returncode}")
    return seconds, used.ru_utime + used.ru_stime


def measure(sources: dict[str, Path | None], rounds: int) -> dict[str, Any]:
    """Measure all statements with all sources by turns."""
    cases = [(source, name) for source in sources for name in STATEMENTS]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    idle = []
    for number in range(1 + rounds):
        idle.append(time_process("pass", None))
        for source, name in cases:
            seconds = time_process(STATEMENTS[name], sources[source])
            if number:
                times[source, name].append(seconds)
    idle_s, idle_cpu_s = (statistics.median(column) for column in zip(*idle, strict=True))
    rows: dict[str, Any] = {source: {} for source in sources}
    for source, name in cases:
        clock, cpu = zip(*times[source, name], strict=True)
        rows[source][name] = {
            "median_s": round(statistics.median(clock) - idle_s, 4),
            "least_s": round(min(clock) - idle_s, 4),
            "cpu_s": round(statistics.median(cpu) - idle_cpu_s, 4),
        }
    return rows


def main() -> None:
    """Measure, print and store the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="SRC")
    parser.add_argument("--short", action="store_true", help="three processes instead of seven")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    rounds = 3 if wanted.short else ROUNDS
    sources: dict[str, Path | None] = {"now": None}
    if wanted.before is not None:
        sources["before"] = wanted.before.resolve()
    run = describe_run({"short": wanted.short, "rounds": rounds})
    figures = []
    for source, rows in measure(sources, rounds).items():
        for name, row in rows.items():
            case = f"`import {name}`" + (", before" if source == "before" else "")
            figures.append(Figure(case, "median", "s", row["median_s"]))
            figures.append(Figure(case, "CPU", "s", row["cpu_s"]))
    show(figures)
    if wanted.json is not None:
        store(wanted.json, figures, run)


if __name__ == "__main__":
    main()

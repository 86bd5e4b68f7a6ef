"""Measure how long imports take, each in fresh processes: `python benchmarks/import_time.py [--before SRC]`.

In:  with --before, the folder `src` of another commit, whose imports are measured by turns with those of this one.
Out: benchmarks/results/import_time.json, with the median and the least of `ROUNDS` processes for each module. The bytes
of the modules are compiled and in the page cache, because a first process imports them without being measured. The time
of an interpreter that imports nothing is subtracted. CPU time is stored, too, since it depends less on other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from process import commit, machine, versions

RESULTS = Path(__file__).parent / "results" / "import_time.json"
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


def measure(sources: dict[str, Path | None]) -> dict[str, Any]:
    """Measure all statements with all sources by turns."""
    cases = [(source, name) for source in sources for name in STATEMENTS]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    idle = []
    for number in range(1 + ROUNDS):
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
    before = parser.parse_args().before
    sources: dict[str, Path | None] = {"now": None}
    if before is not None:
        sources["before"] = before.resolve()
    found = measure(sources)
    for source, rows in found.items():
        for name, row in rows.items():
            print(f"{source:8} {name:22} {row['median_s']:.3f} s, CPU {row['cpu_s']:.3f} s")
    result = {"machine": machine(), "versions": versions(), "commit": commit(), "rounds": ROUNDS, "imports": found}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

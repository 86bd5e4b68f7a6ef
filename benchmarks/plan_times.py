"""How long `holdall plan` takes to answer, beside what importing torch takes.

In:  the command line, in fresh processes, turn by turn.  Out: median and shortest wall time, and CPU time, of each.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

_ROVER = ["--algo", "sac", "--obs", "image=84x84x3:uint8", "--obs", "vector=31:float32", "--action", "8"]
_PLAN = [sys.executable, "-m", "holdall", "plan", *_ROVER, "--capacity", "1e6"]
COMMANDS = {
    "`holdall plan`, buffers and libraries (`--no-networks`)": ([*_PLAN, "--no-networks"], 2.0),
    "`holdall plan`, with networks": (_PLAN, 6.0),
    "`python -c 'import torch'`, for comparison": ([sys.executable, "-c", "import torch"], None),
}
_ROUNDS = 7
_MOST = 1.1
"""The bars say "about"."""


def timed(command: list[str]) -> tuple[float, float]:
    """Return the wall and CPU seconds of one process and its children."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run(command, capture_output=True, check=False)
    wall, after = time.perf_counter() - begin, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def time_all() -> tuple[list[dict[str, Any]], list[str], bool]:
    """Time every command in turn, and write the table."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(_ROUNDS):
        for name, (command, _) in COMMANDS.items():
            taken[name].append(timed(command))
    results: list[dict[str, Any]] = [
        {
            "name": name,
            "median_s": statistics.median(wall for wall, _ in times),
            "shortest_s": min(wall for wall, _ in times),
            "cpu_s": statistics.median(cpu for _, cpu in times),
            "bar_s": COMMANDS[name][1],
        }
        for name, times in taken.items()
    ]
    lines = ["| | median | shortest | CPU time | bar |", "|---|---|---|---|---|"]
    for result in results:
        bar = "" if result["bar_s"] is None else f"about {result['bar_s']:.0f} s"
        times = [f"{result[key]:.1f} s" for key in ("median_s", "shortest_s", "cpu_s")]
        lines.append(f"| {result['name']} | {' | '.join(times)} | {bar} |")
    met = all(result["bar_s"] is None or result["median_s"] <= _MOST * result["bar_s"] for result in results)
    return results, lines, met

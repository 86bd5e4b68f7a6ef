"""How long `holdall plan` takes to answer, beside what importing torch takes.

In:  the command line, in fresh processes, turn by turn.  Out: median and shortest wall time of each.
"""

from __future__ import annotations

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


def time_all() -> tuple[list[dict[str, Any]], list[str], bool]:
    """Time every command in turn, and write the table."""
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(_ROUNDS):
        for name, (command, _) in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run(command, capture_output=True, check=False)
            taken[name].append(time.perf_counter() - begin)
    results: list[dict[str, Any]] = [
        {"name": name, "median_s": statistics.median(times), "shortest_s": min(times), "bar_s": COMMANDS[name][1]}
        for name, times in taken.items()
    ]
    lines = ["| | median | shortest | bar |", "|---|---|---|---|"]
    for result in results:
        bar = "" if result["bar_s"] is None else f"about {result['bar_s']:.0f} s"
        lines.append(f"| {result['name']} | {result['median_s']:.1f} s | {result['shortest_s']:.1f} s | {bar} |")
    met = all(result["bar_s"] is None or result["median_s"] <= _MOST * result["bar_s"] for result in results)
    return results, lines, met

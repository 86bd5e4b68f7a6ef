"""Two versions of holdall beside each other: `python benchmarks/before_after.py --before CHECKOUT [--rounds 3]`.

    ... [--only replay] [--only rollout] [--matching "camera --compressed"] [--json FILE]

In:  a checkout of another version with an environment of its own in .venv.  Out: a table of ratios, and JSON.
Each version runs its own benchmark scripts, and versions take turns, so that other load on the machine falls on both.
A time is the least of all rounds, a size the median. A ratio above 1.05 of a time, or 1.02 of a size, is marked.
The file is written after every round, so that a long run may be stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from process import commit, machine

HERE = Path(__file__).parents[1]
MOST_SLOWER, MOST_LARGER = 1.05, 1.02

RUNS: dict[str, list[list[str]]] = {
    "replay": [
        *(["replay.py", "--quick", "--case", case] for case in ("atari", "camera", "vector1", "vector16")),
        *(["replay.py", "--quick", "--case", case, "--compressed", "balanced"] for case in ("atari", "camera")),
    ],
    "samplers": [["samplers.py", "--quick"]],
    "checkpoint": [["checkpoint.py", "--gigabytes", "1"]],
    "rollout": [["rollout.py", "--quick"]],
    "ray": [["ray_replay.py", "--case", case, "--workload", "atari"] for case in ("insert", "sample")],
}

SIZES = re.compile(
    r"(?:holdall|core).*(?:bytes_per_transition|after_mib|peak_mib)$|wire\.bytes$|encoded_bytes|larger|written"
)
TIMES = re.compile(
    r"(?:holdall|core|uniform|prioritized)\.(?:min_us|min_ms|least_us|best_per_s)$|seconds$|_ms$|cpu_us\.holdall$"
)
SKIPPED = re.compile(r"sb3|torchrl|anonymous|rounds|machine|versions|reported|wrapped\.core|memory\.core")


def main() -> None:
    """Run both versions in turn, and compare."""
    parser = argparse.ArgumentParser(description="Compare two versions of holdall on the same benchmarks.")
    parser.add_argument(
        "--before", type=Path, required=True, help="a checkout of the other version, set up with make setup"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(RUNS), action="append")
    parser.add_argument(
        "--matching", default="", metavar="PATTERN", help="only commands in which this regular expression is found"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    asked = parser.parse_args()
    commands = [
        command for name in asked.only or RUNS for command in RUNS[name] if re.search(asked.matching, " ".join(command))
    ]
    if not commands:
        parser.error(f"no command matches {asked.matching!r}")
    figures: dict[str, dict[str, list[float]]] = {"before": {}, "now": {}}
    rows: list[tuple[str, float, float, float, bool]] = []
    for number in range(asked.rounds):
        for command in commands:
            sides = [("before", asked.before), ("now", HERE)]
            for side, root in sides if number % 2 == 0 else reversed(sides):
                print(f"round {number + 1}: {side}: {' '.join(command)}", file=sys.stderr, flush=True)
                for key, value in _measured(root, command):
                    figures[side].setdefault(f"{' '.join(command)}: {key}", []).append(value)
        rows = list(_rows(figures["before"], figures["now"]))
        if asked.json:
            result = {"rounds": number + 1, "rows": rows, "commit": commit(), "machine": machine()}
            asked.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n".join(["| figure | before | now | ratio | |", "|---|---|---|---|---|", *map(_line, rows)]))


def _measured(root: Path, command: list[str]) -> Iterator[tuple[str, float]]:
    """Run one script of a version, and yield its figures by name."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        script = [
            str(root / ".venv/bin/python"),
            str(root / "benchmarks" / command[0]),
            *command[1:],
            "--json",
            str(out),
        ]
        done = subprocess.run(
            script, env=os.environ | {"PYTHONPATH": str(root / "src")}, capture_output=True, text=True, check=False
        )
        if not out.exists():
            print(f"failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            return
        text = out.read_text(encoding="utf-8")
        try:
            found: list[Any] = [json.loads(text)]
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    for result in found:
        prefix = str(result.get("measurement") or result.get("what") or "") if isinstance(result, dict) else ""
        for key, value in _leaves(result):
            if not SKIPPED.search(key) and (SIZES.search(key) or TIMES.search(key)):
                yield f"{prefix}.{key}".lstrip("."), value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def _rows(
    before: dict[str, list[float]], now: dict[str, list[float]]
) -> Iterator[tuple[str, float, float, float, bool]]:
    for key, olds in before.items():
        if key not in now:
            continue
        is_size, is_rate = bool(SIZES.search(key)), key.endswith("per_s")
        pick = statistics.median if is_size else max if is_rate else min
        old, new = pick(olds), pick(now[key])
        ratio = (old / new if is_rate else new / old) if old and new else float("nan")
        yield key, old, new, ratio, ratio > (MOST_LARGER if is_size else MOST_SLOWER)


def _line(row: tuple[str, float, float, float, bool]) -> str:
    key, old, new, ratio, is_over = row
    return f"| {key} | {old:,.4g} | {new:,.4g} | {ratio:.3f} | {'over' if is_over else ''} |"


if __name__ == "__main__":
    main()

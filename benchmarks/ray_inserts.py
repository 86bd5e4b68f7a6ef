"""Inserts over shards in two versions of holdall, in turn: `python benchmarks/ray_inserts.py --before CHECKOUT`.

    ... [--workload atari] [--block 64] [--steps 768] [--rounds 100]

In:  a checkout of another version with an environment of its own in .venv.  Out: time and CPU of a step, and ratios.
Each version has a Ray, a writer and one shard of its own, all the while. They take turns of milliseconds: a stretch of
steps is inserted and flushed, so that other load on the machine falls on both.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
WARM, HELD = 1_024, 65_536
FIGURES = ("time, us", "writer's CPU, us", "shard's CPU, us")
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "atari": ("atari", {"game": "Breakout"}),
    "camera": ("camera", {}),
    "noise": ("camera", {"noisy": True}),
}


def main() -> None:
    """Run both versions in turn, and compare."""
    parser = argparse.ArgumentParser(description="Compare inserts of two versions of holdall over shards.")
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the other version")
    parser.add_argument("--workload", choices=sorted(SOURCES), default="atari")
    parser.add_argument("--block", type=int, default=64, help="steps of one call; 1: they are added one by one")
    parser.add_argument("--steps", type=int, default=768, help="steps of a round, after which all is flushed")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side is not None:
        serve(asked.side, asked.workload, asked.block, asked.steps)
        return
    sides = [started(root, asked) for root in (asked.before, HERE)]
    found: list[list[list[float]]] = [[], []]
    for side in sides:
        answer(side)  # it is ready
    for number in range(asked.rounds):
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            sides[which].stdin.write("\n")
            sides[which].stdin.flush()
            found[which].append(answer(sides[which]))
    for side in sides:
        side.stdin.close()
        side.wait()
    print(
        "| a step | before | now | median ratio | of the least | of the sums |", "|---|---|---|---|---|---|", sep="\n"
    )
    for figure, name in enumerate(FIGURES):
        old, new = ([each[figure] for each in taken] for taken in found)
        ratios = "-", "-"  # the kernel counts CPU in hundredths of a second: of one round that says nothing
        if figure == 0:
            ratios = f"{statistics.median(map(float.__truediv__, new, old)):.3f}", f"{min(new) / min(old):.3f}"
        means = f"{statistics.mean(old):.2f} | {statistics.mean(new):.2f}"
        print(f"| {name} | {means} | {ratios[0]} | {ratios[1]} | {sum(new) / sum(old):.3f} |")


def started(root: Path, asked: argparse.Namespace) -> Any:
    """Start one version in a process of its own."""
    settings = [f"--{name}={getattr(asked, name)}" for name in ("before", "workload", "block", "steps")]
    script = [str(root / ".venv/bin/python"), __file__, f"--side={root}", *settings]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(script, env=environment, text=True, **pipes)  # type: ignore[call-overload]  # named pipes


def answer(side: Any) -> list[float]:
    """Wait for what a version says of its round."""
    line = side.stdout.readline()
    if not line:
        raise SystemExit(f"{side.args[2]} ended; run it by itself to see why: {' '.join(side.args)}")
    said: list[float] = json.loads(line)
    return said


def serve(root: Path, workload: str, block: int, steps: int) -> None:
    """Insert a stretch of steps for every line that comes, and say how long a step took."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is not taken for an answer
    sys.path.insert(0, str(root / "benchmarks"))
    sides: Any = importlib.import_module("ray_sides")  # that version's own
    source, options = SOURCES[workload]
    recording = sides.record(importlib.import_module(f"streams.{source}").stream(0, **options), WARM + steps)
    with sides.own_ray():
        side = sides.HoldallSide(recording, HELD)
        side.insert(side.arrange(recording.steps[:WARM], 64), 64)
        time.sleep(3)  # a codec is being chosen
        arranged = side.arrange(recording.steps[WARM:], block)
        side.insert(arranged, block)
        print("[]", file=out, flush=True)
        for _ in sys.stdin:
            before, start = (sides.cpu_seconds(), sides.cpu_seconds(side.processes)), time.perf_counter()
            side.insert(arranged, block)
            taken = time.perf_counter() - start
            after = sides.cpu_seconds(), sides.cpu_seconds(side.processes)
            figures = taken, *(end - begin for begin, end in zip(before, after, strict=True))
            print(json.dumps([1e6 * figure / steps for figure in figures]), file=out, flush=True)
        side.close()


if __name__ == "__main__":
    main()

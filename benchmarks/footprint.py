"""Bytes per transition of one side, in a process of its own: `python benchmarks/footprint.py --case atari --side sb3`.

Out: JSON lines on stdout, {"done", "total"} while it runs and {"result"} last.
The figure is the slope of a line through the process's unique set size, read from smaps while transitions are added.
What a side costs before the first of them (libraries, tables, open segments) is where that line begins. Another
process that starts or ends meanwhile and uses the same libraries makes their pages shared or private; then the line
through anonymous pages alone has another slope, and the result is marked as disturbed.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  both sides need it, so it is here before memory is counted
from cases import CASES, SIDES, Side, libraries_of
from process import emit

from holdall.machine import HeldMemory, held_bytes

_WARM_UP = 1_000  # steps of the source before memory is counted
_SAME = 0.01  # two slopes are the same up to this share


def measure(case_name: str, side_name: Any, quick: bool, trace: Path | None, prefer: str | None) -> dict[str, Any]:
    """Fill one side and fit a line through what the process holds."""
    case = CASES[case_name]
    first, last, every = case.sizes(quick).readings_of(side_name)
    before_libraries = held_bytes()
    libraries_of(side_name)
    libraries = held_bytes().unique - before_libraries.unique
    stream = case.stream(trace)
    for _ in itertools.islice(stream.steps, _WARM_UP):
        pass
    start = held_bytes()
    side = Side(side_name, stream, last, prefer)
    readings: list[tuple[int, HeldMemory]] = []
    count = 0
    for step in itertools.islice(stream.steps, last // stream.lanes):
        side.add(*side.arguments(step))
        count += stream.lanes
        if count // every != (count - stream.lanes) // every:
            if count >= first:
                readings.append((count, held_bytes()))
            emit({"done": count, "total": last})
    slope, intercept = line_through([(count, held.unique) for count, held in readings])
    steadier, _ = line_through([(count, held.anonymous) for count, held in readings])
    result: dict[str, Any] = {
        "bytes_per_transition": slope,
        "anonymous_bytes_per_transition": steadier,
        "disturbed": abs(slope - steadier) > _SAME * steadier,
        "fixed_bytes": libraries + intercept - start.unique,
        "libraries_bytes": libraries,
        "held_bytes": readings[-1][1].anonymous - start.anonymous,
        "readings": {"count": len(readings), "from": readings[0][0], "to": readings[-1][0], "every": every},
    }
    if side_name != "sb3":
        report = side.memory.report()
        result["reported_bytes_per_transition"] = report.bytes_per_transition
        result["found"] = {field.name: field.finding for field in report.fields}
    return result


def line_through(readings: list[tuple[int, int]]) -> tuple[float, float]:
    """Return slope and intercept of the least-squares line."""
    held, taken = np.array(readings, np.float64).T
    slope, intercept = np.polyfit(held, taken, 1)
    return float(slope), float(intercept)


def main() -> None:
    """Read the command line, measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--compressed", metavar="PREFER")
    wanted = parser.parse_args()
    emit({"result": measure(wanted.case, wanted.side, wanted.quick, wanted.trace, wanted.compressed)})


if __name__ == "__main__":
    main()

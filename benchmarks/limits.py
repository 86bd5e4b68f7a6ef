"""How many transitions a memory holds under a limit: with small and large capacities, and with a disk that fills up.

    python benchmarks/limits.py [--disk DIR] [--steps 15000] [--json FILE] [--docs FILE]

The data is the camera stream with noise: 84 x 84 x 3 uint8 and 31 float32 in a Dict. The limit is 60 MiB.

1. Without a disk, memories with a capacity of 5,000, 20,000 and 200,000 transitions get the same steps.
2. A memory gets the same steps with `spill_dir` on a disk of 20 MB. Every 1,000 steps, the script reads the number of
   transitions, the bytes in memory and on disk, and the early drops from `report()`. It also compares 500 transitions,
   spread over all ids that are held, with what was added.

`--disk` names a folder on the small disk. Without it, the script mounts one, for which it must run as root. `--docs`
writes the tables to a page. The exit status is 1 if memories that drop transitions differ by more than 5 % in what they
hold, if a row is wrong, or if more than a quarter of the transitions or of the bytes on disk is lost when the disk is
full.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from process import commit, machine, versions
from streams import Step, Stream, camera

from holdall import ReplayMemory
from holdall.testing import OracleMemory, assert_same_bits

BUDGET = "60MiB"
CAPACITIES = (5_000, 20_000, 200_000)
DISK_BYTES = 20_000_000
READ_EVERY = 1_000
COMPARED = 500
HELD_BAR = 0.05
"""Largest relative difference between memories that drop transitions."""
FULL_DISK_BAR = 0.25
"""Largest share of transitions, and of bytes on disk, that may be lost once the disk is full."""


def arguments_of(step: Step) -> tuple[Any, ...]:
    """Return the arguments of `add`."""
    return step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated


def read_report(memory: ReplayMemory, added: int) -> dict[str, Any]:
    """Return the figures of a memory after `added` steps."""
    report = memory.report()
    return {
        "steps": added,
        "held": len(memory),
        "memory_bytes": report.total_bytes,
        "disk_bytes": report.disk_bytes,
        "dropped_early": report.dropped_early,
        "drop_reason": report.drop_reason,
        "failure": report.failure,
    }


def fill(stream: Stream, steps: list[Step], capacity: int) -> dict[str, Any]:
    """Add all steps to a memory without a disk."""
    with ReplayMemory(stream.observation_space, stream.action_space, capacity, budget=BUDGET, seed=0) as memory:
        for step in steps:
            memory.add(*arguments_of(step))
        memory.store.wait_idle()
        return {"capacity": capacity, **read_report(memory, len(steps))}


def fill_disk(stream: Stream, steps: list[Step], place: Path) -> list[dict[str, Any]]:
    """Add all steps to a memory with a small disk. Read its figures and compare rows every 1,000 steps."""
    spaces = (stream.observation_space, stream.action_space)
    capacity = CAPACITIES[-1]
    oracle = OracleMemory(capacity)
    readings = []
    with ReplayMemory(*spaces, capacity, budget=BUDGET, spill_dir=place, seed=0) as memory:
        for added, step in enumerate(steps, 1):
            memory.add(*arguments_of(step))
            oracle.add(*arguments_of(step))
            if added % READ_EVERY == 0:
                memory.store.wait_idle()
                oracle.evict(memory.first_id)
                ids = np.linspace(memory.first_id, memory.next_id - 1, COMPARED, dtype=np.int64)
                assert_same_bits(memory.gather(ids), oracle.gather(ids))
                readings.append(read_report(memory, added) | {"compared": len(ids)})
    return readings


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a file system of 20 MB in memory."""
    with tempfile.TemporaryDirectory() as place:
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: cannot mount a small disk ({done.stderr.strip()}). Run as root, or pass --disk.")
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "-l", place], check=True)


def are_met(capacities: list[dict[str, Any]], readings: list[dict[str, Any]]) -> bool:
    """Return whether all bars are met."""
    held = [row["held"] for row in capacities if row["dropped_early"]]
    agree = not held or max(held) - min(held) <= HELD_BAR * max(held)
    full = [reading for reading in readings if reading["dropped_early"]]
    stays = bool(full) and all(
        min(reading[name] for reading in full) >= (1 - FULL_DISK_BAR) * max(reading[name] for reading in readings)
        for name in ("held", "disk_bytes")
    )
    return agree and stays


def tables(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        f"| capacity | transitions held after {result['steps']:,} steps | in memory | dropped early |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['capacity']:,} | {row['held']:,} | {row['memory_bytes'] / 2**20:.1f} MiB | {row['dropped_early']:,} |"
        for row in result["capacities"]
    ]
    lines += [
        "",
        "With a disk of 20 MB and a capacity of 200,000:",
        "",
        "| steps | transitions held | in memory | on disk | dropped early |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['steps']:,} | {row['held']:,} | {row['memory_bytes'] / 2**20:.1f} MiB "
        f"| {row['disk_bytes'] / 1e6:.1f} MB | {row['dropped_early']:,} |"
        for row in result["full_disk"]
        if row["steps"] % (2 * READ_EVERY) == 0 or row["steps"] == result["steps"]
    ]
    return "\n".join(lines)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, help="a folder on a disk of 20 MB")
    parser.add_argument("--steps", type=int, default=15_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="a page with the marks <!-- limits --> and <!-- end of limits -->")
    wanted = parser.parse_args()
    source = commit()
    stream = camera.stream(noisy=True)
    steps = list(itertools.islice(stream.steps, wanted.steps))
    capacities = [fill(stream, steps, capacity) for capacity in CAPACITIES]
    with contextlib.nullcontext(wanted.disk) if wanted.disk else small_disk() as place:
        full_disk = fill_disk(stream, steps, place)
    result = {
        "benchmark": "limits",
        "budget": BUDGET,
        "steps": wanted.steps,
        "capacities": capacities,
        "full_disk": full_disk,
        "commit": source,
        "versions": versions(),
        "machine": machine(),
    }
    print(tables(result))
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if wanted.docs is not None:
        text = wanted.docs.read_text(encoding="utf-8")
        pattern = r"(<!-- limits -->\n).*?(<!-- end of limits -->)"
        shown = re.sub(pattern, lambda found: f"{found[1]}{tables(result)}\n{found[2]}", text, flags=re.DOTALL)
        wanted.docs.write_text(shown, encoding="utf-8")
    return 0 if are_met(capacities, full_disk) else 1


if __name__ == "__main__":
    sys.exit(main())

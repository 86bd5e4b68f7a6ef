"""What growing costs: bytes per transition, the time of a batch and of the slowest adds, from 10,000 transitions on.

    python benchmarks/growth.py [--case atari|camera] [--to TRANSITIONS] [--json FILE] [--groups FILE]

Each memory is ten times as large as the one before. The largest one holds ten million transitions of Atari or 100,000
of the camera, or `--to`. Every closed segment is compressed (`budget=None`) and stays in memory. One process fills the
memories one after another. Then it draws batches from all of them in turns, so that other programs on the machine slow
down all of them alike. The stream repeats a lap of 20,000 steps. A block is shorter than a lap, so every lap is
stored again. Each memory also says how many groups of slices a batch decompresses: rows of a small memory share some.

`--json` and `--groups` replace the lines of the measured cases in a file and keep the others. The exit status is 1 if a
batch from the largest memory takes more than 1.3 times as long as one from the smallest.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from cases import BATCH, CASES, Side
from process import commit, machine, versions
from streams.looped import looped

from holdall.machine import held_bytes

LAP = 20_000
ROUNDS = 40
GROUP_BATCHES = 10
"""Batches whose groups are counted, of each memory."""
SAMPLE_BAR = 1.3
NEXT_FOLLOWS = np.uint32(0x80000000)
"""Set in a cursor whose next observation does not overlap the observation."""
LARGEST = {"atari": 10_000_000, "camera": 100_000}
"""Transitions of the largest memory, by case."""


def count_groups(memory: Any, ids: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Return how many compressed groups of slices the transitions `ids` of a memory with one lane need."""
    groups: set[tuple[int, int]] = set()
    for segment in memory.store.catalog.segments:
        rows = ids - segment.first_tick
        rows = rows[(rows >= 0) & (rows < segment.ticks)]
        for part in segment.parts if rows.size else ():
            if part.block is None or not hasattr(part.block.form, "codec"):
                continue
            arrays = part.arrays()
            cursors = arrays["cursors"].ravel()[rows]
            starts = (cursors & ~NEXT_FOLLOWS).astype(np.int64)
            # The next observation starts `shift` entries later, or after the observation.
            _, count, _, _, shift = part.layout
            lengths = np.where(cursors & NEXT_FOLLOWS, 2 * count, count + shift)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                slices = arrays["log"].ravel()[start : start + length].astype(np.int64)
                groups.update((part.block.serial, unit) for unit in (slices // part.block.form.codec.group).tolist())
    return len(groups)


def measure(case_name: str, sizes: list[int], prefer: str) -> dict[str, Any]:
    """Fill a memory of every size, and draw from all of them in turn."""
    stream = looped(CASES[case_name].stream(None), LAP)
    sides: list[Side] = []
    rows: list[dict[str, Any]] = []
    for size in sizes:
        gc.collect()
        before = held_bytes().unique
        side = Side("core", stream, size, prefer)
        seconds = np.empty(size)
        for i in range(size):
            arguments = side.arguments(next(stream.steps))
            start = time.perf_counter()
            side.add(*arguments)
            seconds[i] = time.perf_counter() - start
            if i % 10_000 == 0:
                print(f"\r{case_name}: {i:,} of {size:,}", end="", file=sys.stderr)
        side.memory.store.wait_idle()
        held = held_bytes().unique - before
        p50, p99, p999 = (float(value) * 1e6 for value in np.quantile(seconds, (0.5, 0.99, 0.999)))
        rows.append(
            {
                "transitions": size,
                "held_bytes": held,
                "bytes_per_transition": held / size,
                "add_mean_us": float(seconds.mean()) * 1e6,
                "add_median_us": p50,
                "add_p99_us": p99,
                "add_p999_us": p999,
                "add_max_us": float(seconds.max()) * 1e6,
            }
        )
        sides.append(side)
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for which, side in enumerate(sides):
            start = time.perf_counter()
            side.sample(BATCH)
            taken[which].append(time.perf_counter() - start)
    for row, seconds_of in zip(rows, taken, strict=True):
        row["sample_median_us"] = float(np.median(seconds_of)) * 1e6
        row["sample_min_us"] = min(seconds_of) * 1e6
    for row, side in zip(rows, sides, strict=True):
        batches = [np.asarray(side.sample(BATCH).ids) for _ in range(GROUP_BATCHES)]
        row["groups_per_batch"] = float(np.mean([count_groups(side.memory, ids) for ids in batches]))
    ratio = rows[-1]["sample_median_us"] / rows[0]["sample_median_us"]
    return {
        "benchmark": "growth",
        "case": case_name,
        "prefer": prefer,
        "rows": rows,
        "sample_ratio": ratio,
        "sample_ratio_min": rows[-1]["sample_min_us"] / rows[0]["sample_min_us"],
        "bar": SAMPLE_BAR,
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def groups_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return how many groups of slices a batch needs, by transitions. The counts do not depend on what else runs."""
    groups = {str(row["transitions"]): row["groups_per_batch"] for row in result["rows"]}
    return {name: result[name] for name in ("case", "prefer", "commit")} | {"groups_per_batch": groups}


def table(result: dict[str, Any]) -> str:
    """Write the rows as Markdown."""
    lines = [
        "| transitions | held | each takes | `sample(256)` | `add`: mean, p99.9, slowest |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['transitions']:,} | {row['held_bytes'] / 2**20:,.0f} MiB | {row['bytes_per_transition']:,.0f} B "
        f"| {row['sample_median_us'] / 1e3:.1f} ms "
        f"| {row['add_mean_us']:.0f} us, {row['add_p999_us'] / 1e3:,.1f} ms, {row['add_max_us'] / 1e3:,.0f} ms |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def store(result: dict[str, Any], path: Path) -> None:
    """Write `result` to a file of results, in place of the line of the same case."""
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    lines = [line for line in kept if line["case"] != result["case"]] + [result]
    lines.sort(key=lambda line: str(line["case"]))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=LARGEST, action="append", help="default: all")
    parser.add_argument("--to", type=int, help="transitions of the largest memory")
    parser.add_argument("--prefer", default="balanced")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--groups", type=Path, help="write the groups of slices that batches need to this file")
    wanted = parser.parse_args()
    results = []
    for name in wanted.case or LARGEST:
        largest = wanted.to or LARGEST[name]
        sizes = [size for size in (10_000, 100_000, 1_000_000) if size < largest] + [largest]
        result = measure(name, sizes, wanted.prefer)
        results.append(result)
        if wanted.json is not None:
            store(result, wanted.json)
        if wanted.groups is not None:
            store(groups_of(result), wanted.groups)
        print(f"\n{result['case']}, {result['prefer']}:")
        print(f"a sample at {sizes[-1]:,} takes {result['sample_ratio']:.2f} times")
        print(f"as long as at {sizes[0]:,} by median, {result['sample_ratio_min']:.2f} by minimum (bar {SAMPLE_BAR})\n")
        print(table(result))
        for transitions, groups in groups_of(result)["groups_per_batch"].items():
            print(f"a batch from {transitions} transitions needs {groups:.0f} groups of slices")
    sys.exit(0 if all(result["sample_ratio"] <= SAMPLE_BAR for result in results) else 1)


if __name__ == "__main__":
    main()

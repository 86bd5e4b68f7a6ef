"""What growing costs: bytes per transition, the time of a batch and of the slowest adds, from 10,000 transitions on.

    python benchmarks/limits/growth.py [--case atari|camera] [--to TRANSITIONS] [--short] [--json FILE]

Each memory is ten times as large as the one before. The largest one holds ten million transitions of Atari or 100,000
of the camera, or `--to`. Every closed segment is compressed (`budget=None`) and stays in memory. One process fills the
memories one after another. Then it draws batches from all of them in turns, so that other programs on the machine slow
down all of them alike. The stream repeats a lap of 20,000 steps. A block is shorter than a lap, so every lap is
stored again. Each memory also says how many groups of slices a batch decompresses: rows of a small memory share some.

The exit status is 1 if a batch from the largest memory takes more than 1.3 times as long as one from the smallest.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from holdall.machine import held_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.cases import BATCH, CASES, Side
from shared.streams.looped import looped

MIB = 2**20
LAP = 20_000
ROUNDS = 100
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
    for segment in memory.host_store.catalog.segments:
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


def measure(case_name: str, sizes: list[int], prefer: str) -> list[dict[str, Any]]:
    """Fill a memory of every size, and draw from all of them in turn. Return the figures of each memory."""
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
    cpu: list[list[float]] = [[] for _ in sides]
    for _ in range(ROUNDS):
        for which, side in enumerate(sides):
            start = time.perf_counter()
            cpu_start = time.process_time()
            side.sample(BATCH)
            cpu[which].append(time.process_time() - cpu_start)
            taken[which].append(time.perf_counter() - start)
    for row, seconds_of, cpu_seconds_of in zip(rows, taken, cpu, strict=True):
        row["sample_median_us"] = float(np.median(seconds_of)) * 1e6
        row["sample_min_us"] = min(seconds_of) * 1e6
        row["sample_cpu_median_us"] = float(np.median(cpu_seconds_of)) * 1e6
    for row, side in zip(rows, sides, strict=True):
        batches = [np.asarray(side.sample(BATCH).ids) for _ in range(GROUP_BATCHES)]
        row["groups_per_batch"] = float(np.mean([count_groups(side.memory, ids) for ids in batches]))
    return rows


NAMES = {"atari": "Seaquest, stacks of 4 frames", "camera": "camera of 84 x 84 x 3 and 31 floats"}


def figures_of(case: str, rows: list[dict[str, Any]], prefer: str) -> list[Figure]:
    """Return the figures of all memories of a case."""
    figures = []
    begins = NAMES[case] + ("" if prefer == "balanced" else f', `prefer="{prefer}"`')
    for row in rows:
        name = f"{begins}: {row['transitions']:,} transitions"
        figures += [
            Figure(name, "held", "MiB", row["held_bytes"] / MIB),
            Figure(name, "each takes", "B", row["bytes_per_transition"]),
            Figure(name, "`sample(256)`, median", "ms", row["sample_median_us"] / 1e3),
            Figure(name, "`sample(256)`, least", "ms", row["sample_min_us"] / 1e3),
            Figure(name, "`sample(256)`, CPU", "ms", row["sample_cpu_median_us"] / 1e3),
            Figure(name, "groups in a batch", "", row["groups_per_batch"]),
            Figure(name, "`add`, mean", "us", row["add_mean_us"]),
            Figure(name, "`add`, p99.9", "ms", row["add_p999_us"] / 1e3),
            Figure(name, "`add`, slowest", "ms", row["add_max_us"] / 1e3),
        ]
    largest = rows[-1]["transitions"]
    name = f"{begins}: {largest:,} over {rows[0]['transitions']:,} transitions"
    for statistic, words in (("median", "median"), ("min", "least"), ("cpu_median", "CPU")):
        ratio = rows[-1][f"sample_{statistic}_us"] / rows[0][f"sample_{statistic}_us"]
        bar = f"at most {SAMPLE_BAR}" if statistic == "median" else None
        figures.append(Figure(name, f"`sample(256)`, {words}", "of the time", ratio, bar))
    return figures


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=LARGEST, action="append", help="default: all")
    parser.add_argument("--to", type=int, metavar="TRANSITIONS", help="transitions of the largest memory")
    parser.add_argument("--prefer", default="balanced", help="of the memories (%(default)s)")
    parser.add_argument("--short", action="store_true", help="a tenth of the transitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    wanted = parser.parse_args()
    run = describe_run({"short": wanted.short})
    is_met = True
    for name in wanted.case or LARGEST:
        largest = wanted.to or LARGEST[name] // (10 if wanted.short else 1)
        sizes = [size for size in (10_000, 100_000, 1_000_000) if size < largest] + [largest]
        rows = measure(name, sizes, wanted.prefer)
        figures = figures_of(name, rows, wanted.prefer)
        print(file=sys.stderr)
        show(figures)
        is_met &= rows[-1]["sample_median_us"] <= SAMPLE_BAR * rows[0]["sample_median_us"]
        if wanted.json is not None:
            store(wanted.json, figures, run)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()

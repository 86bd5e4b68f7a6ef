"""What growing costs: bytes per transition, sample time and the slowest adds, at 10,000, 100,000 and 1,000,000.

    python benchmarks/growth.py [--case atari|camera] [--to 1000000] [--json FILE] [--plot FILE.svg]

All that is sealed is compressed (`budget=None`) and in memory. The memories of all sizes are filled one after another
in one process and drawn from turn by turn, so that what else the machine does falls on all of them.
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
SAMPLE_BAR = 1.3


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
        side.memory.drain()
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


def table(result: dict[str, Any]) -> str:
    """Write the rows as Markdown."""
    lines = [
        "| transitions | held | a transition takes | `sample(256)` median, min | `add` mean | p99 | p99.9 | slowest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['transitions']:,} | {row['held_bytes'] / 2**20:,.0f} MiB | {row['bytes_per_transition']:,.0f} B "
        f"| {row['sample_median_us'] / 1e3:.2f}, {row['sample_min_us'] / 1e3:.2f} ms | {row['add_mean_us']:.0f} us "
        f"| {row['add_p99_us']:,.0f} us | {row['add_p999_us']:,.0f} us | {row['add_max_us'] / 1e3:,.0f} ms |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draw bytes and sample time over the number of transitions, as an SVG that needs nothing else."""
    width, height, left, bottom = 360, 220, 56, 36
    panels = [("bytes_per_transition", "bytes per transition", 1.0), ("sample_median_us", "sample(256), ms", 1e-3)]
    colours = ("#3366cc", "#cc6633")
    total = len(panels) * width
    font = 'font-family="sans-serif" font-size="11" fill="#777"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height + 24}" {font}>']
    for which, (key, title, scale) in enumerate(panels):
        x0 = which * width + left
        most = 1.15 * max(row[key] * scale for result in results for row in result["rows"])
        parts.append(f'<text x="{x0}" y="14" font-weight="bold">{title}</text>')
        for share in (0.0, 0.5, 1.0):
            y = height - bottom - share * (height - bottom - 24)
            parts.append(f'<line x1="{x0}" x2="{x0 + width - left - 16}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.0f}" text-anchor="end">{share * most:,.3g}</text>')
        for colour, result in zip(colours, results, strict=False):
            counts = [row["transitions"] for row in result["rows"]]
            span = max(float(np.log10(counts[-1] / counts[0])), 1.0)
            points = []
            for row in result["rows"]:
                x = x0 + float(np.log10(row["transitions"] / counts[0])) / span * (width - left - 40) + 10
                y = height - bottom - row[key] * scale / most * (height - bottom - 24)
                points.append((x, y))
                label = f"{row['transitions']:,}"
                parts.append(f'<text x="{x:.0f}" y="{height - bottom + 16}" text-anchor="middle">{label}</text>')
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(
                f'<text x="{points[-1][0]:.0f}" y="{points[-1][1] - 8:.0f}" text-anchor="end" fill="{colour}">'
                f"{result['case']}</text>"
            )
    parts.append("</svg>")
    path.write_text("\n".join(parts), encoding="utf-8")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("atari", "camera"), action="append")
    parser.add_argument("--to", type=int, default=1_000_000, help="transitions of the largest memory")
    parser.add_argument("--prefer", default="balanced")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    wanted = parser.parse_args()
    sizes = [size for size in (10_000, 100_000, 1_000_000) if size < wanted.to] + [wanted.to]
    results = [measure(name, sizes, wanted.prefer) for name in wanted.case or ["atari"]]
    for result in results:
        print(f"\n{result['case']}, {result['prefer']}:")
        print(f"a sample at {sizes[-1]:,} takes {result['sample_ratio']:.2f} times")
        print(f"as long as at {sizes[0]:,} by median, {result['sample_ratio_min']:.2f} by minimum (bar {SAMPLE_BAR})\n")
        print(table(result))
    if wanted.json is not None:
        wanted.json.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    if wanted.plot is not None:
        plot(results, wanted.plot)
    sys.exit(0 if all(result["sample_ratio"] <= SAMPLE_BAR for result in results) else 1)


if __name__ == "__main__":
    main()

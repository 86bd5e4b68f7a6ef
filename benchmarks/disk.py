"""The budget and the disk tier: does the process stay under its limit, and what does sampling from disk cost?

    python benchmarks/disk.py [--transitions 300000] [--budget 512MiB] [--spill-dir DIR] [--json FILE] [--docs FILE]

Two measurements on the camera case with some noise. The process's unique set size is read 20 times a second, by another
process, while transitions are added under a limit with a disk tier and batches are drawn in between. Then two memories
with the same content, one compressed in memory, one with nine tenths of it on disk, are drawn from turn by turn: warm,
and after the page cache was dropped. `--docs` writes the table to a page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from cases import BATCH
from process import commit, machine, versions
from streams import Step, Stream, camera
from streams.looped import looped

from holdall import ReplayMemory
from holdall.machine import held_bytes
from holdall.units import format_bytes, parse_bytes

LAP = 5_000
SLACK_BYTES = 64 * 2**20
DISK_BAR = 2.0
ROUNDS = 40
_WATCH = """
import sys, time
path = f"/proc/{sys.argv[1]}/smaps_rollup"
most = 0
count = 0
try:
    while True:
        lines = open(path, encoding="ascii").read().splitlines()
        private = [line.split()[1] for line in lines if line.startswith("Private_")]
        most = max(most, sum(map(int, private)) * 1024)
        count += 1
        print(most, count, flush=True)
        time.sleep(0.05)
except (OSError, KeyboardInterrupt):
    pass
"""


def add(memory: ReplayMemory, step: Step) -> None:
    """Hand a step to a memory."""
    memory.add(step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated)


def stay_under(stream: Stream, transitions: int, budget: str, place: Path) -> dict[str, Any]:
    """Add under a limit, and have the process watched."""
    before = held_bytes().unique
    with (
        ReplayMemory(
            stream.observation_space, stream.action_space, transitions, budget=budget, spill_dir=place, seed=0
        ) as memory,
        subprocess.Popen(
            [sys.executable, "-c", _WATCH, str(os.getpid())], stdout=subprocess.PIPE, text=True, encoding="ascii"
        ) as watcher,
    ):
        start = time.perf_counter()
        for i in range(transitions):
            add(memory, next(stream.steps))
            if i % 1_000 == 999:
                memory.sample(BATCH)
            if i % 10_000 == 0:
                print(f"\r{i:,} of {transitions:,}", end="", file=sys.stderr)
        seconds = time.perf_counter() - start
        memory.store.wait_idle()
        report = memory.report()
        watcher.terminate()
        readings = (watcher.stdout.read() if watcher.stdout else "").split("\n")
    most, count = (int(word) for word in readings[-2].split())
    limit = parse_bytes(budget)
    return {
        "transitions": len(range(transitions)),
        "budget_bytes": limit,
        "most_over_start_bytes": most - before,
        "over_budget_bytes": most - before - limit,
        "readings": count,
        "readings_per_second": count / seconds,
        "add_mean_us": seconds / transitions * 1e6,
        "in_memory_bytes": report.total_bytes,
        "on_disk_bytes": report.disk_bytes,
        "failure": report.failure,
        "met": most - before <= limit + SLACK_BYTES,
    }


def sample_from_disk(stream: Stream, transitions: int, place: Path) -> dict[str, Any]:
    """Draw from a memory on disk and one in memory, turn by turn."""
    spaces = (stream.observation_space, stream.action_space)
    inside = ReplayMemory(*spaces, transitions, budget=None, seed=0, device="cpu")
    outside = ReplayMemory(*spaces, transitions, budget=None, seed=0, device="cpu", spill_dir=place)
    for _ in range(transitions):
        step = next(stream.steps)
        add(inside, step)
        add(outside, step)
    inside.store.wait_idle()
    outside.store.wait_idle()
    report = outside.report()
    share = report.disk_bytes / (report.disk_bytes + sum(f.slice_bytes - f.compressed_bytes for f in report.fields))
    times: dict[str, list[float]] = {"memory": [], "disk": [], "cold": []}
    for _ in range(4):
        outside.sample(BATCH)
    for _ in range(ROUNDS):
        for name, memory in (("memory", inside), ("disk", outside)):
            start = time.perf_counter()
            memory.sample(BATCH)
            times[name].append(time.perf_counter() - start)
    for _ in range(ROUNDS // 4):
        for file in place.rglob("*.seg"):
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        start = time.perf_counter()
        outside.sample(BATCH)
        times["cold"].append(time.perf_counter() - start)
    ids = np.random.default_rng(0).integers(0, transitions, 512)
    there, here = outside.gather(ids), inside.gather(ids)
    same = all(bool((there.obs[key] == here.obs[key]).all()) for key in here.obs)
    found = {name: {"median_ms": float(np.median(t)) * 1e3, "min_ms": min(t) * 1e3} for name, t in times.items()}
    ratio = found["disk"]["median_ms"] / found["memory"]["median_ms"]
    inside.close()
    outside.close()
    return {
        "transitions": transitions,
        "share_on_disk": share,
        "times": found,
        "ratio_median": ratio,
        "ratio_min": found["disk"]["min_ms"] / found["memory"]["min_ms"],
        "same_bits": same,
        "met": ratio <= DISK_BAR and same,
    }


def table(under: dict[str, Any], drawn: dict[str, Any]) -> str:
    """Return the figures as Markdown."""

    def times_of(statistic: str) -> str:
        return ", ".join(f"{drawn['times'][name][statistic]:.2f}" for name in ("disk", "cold", "memory")) + " ms"

    filling = f"{under['transitions']:,} transitions under {format_bytes(under['budget_bytes'])}"
    growth = f"most that the process (USS) was over its start, of {under['readings']:,} readings"
    rows = [
        (f"{filling}: {growth}", format_bytes(under["most_over_start_bytes"])),
        ("on disk then", format_bytes(under["on_disk_bytes"])),
        (
            f"`sample({BATCH})`, {drawn['share_on_disk']:.1%} on disk: median warm, cold, all in memory",
            times_of("median_ms"),
        ),
        ("the same, least", times_of("min_ms")),
        ("warm over memory, by median and minimum", f"{drawn['ratio_median']:.2f}, {drawn['ratio_min']:.2f}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in rows)])


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transitions", type=int, default=300_000)
    parser.add_argument("--sampled", type=int, default=60_000, help="transitions of the memories that are drawn from")
    parser.add_argument("--budget", default="512MiB")
    parser.add_argument("--spill-dir", type=Path, help="on the disk that is meant; a temporary folder if not given")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="a page with the marks <!-- disk --> and <!-- end of disk -->")
    wanted = parser.parse_args()
    stream = looped(camera.stream(noisy=True), LAP)
    with tempfile.TemporaryDirectory(dir=wanted.spill_dir) as place:
        under = stay_under(stream, wanted.transitions, wanted.budget, Path(place))
        drawn = sample_from_disk(stream, wanted.sampled, Path(place))
    print(
        f"\n{under['transitions']:,} camera transitions under {wanted.budget}: at most "
        f"{format_bytes(under['most_over_start_bytes'])} over the start in {under['readings']:,} readings "
        f"({under['readings_per_second']:.0f} a second), {format_bytes(under['on_disk_bytes'])} on disk"
    )
    times = drawn["times"]
    print(
        f"sample({BATCH}), {drawn['share_on_disk']:.0%} on disk: {times['disk']['median_ms']:.2f} ms warm, "
        f"{times['cold']['median_ms']:.2f} ms cold, {times['memory']['median_ms']:.2f} ms in memory; ratio "
        f"{drawn['ratio_median']:.2f} by median, {drawn['ratio_min']:.2f} by minimum"
    )
    result = {
        "benchmark": "disk",
        "under_budget": under,
        "sample": drawn,
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if wanted.docs is not None:
        text = wanted.docs.read_text(encoding="utf-8")
        pattern = r"(<!-- disk -->\n).*?(<!-- end of disk -->)"
        shown = re.sub(pattern, lambda found: f"{found[1]}{table(under, drawn)}\n{found[2]}", text, flags=re.DOTALL)
        wanted.docs.write_text(shown, encoding="utf-8")
    sys.exit(0 if under["met"] and drawn["met"] else 1)


if __name__ == "__main__":
    main()

"""Limits: does a memory stay below its budget, what does it hold, and what do the disk tier and a fast camera cost?

    python benchmarks/limits/budget.py [--part disk|limits|feed] [--trace FILE] [--short] [--json FILE]

`disk`    Another process reads the unique set size 20 times a second, while camera images with noise are added under
          a limit with a disk tier and batches are drawn. Then batches are drawn in turns from two memories with the
          same content: one compressed in memory, and one with most of it on disk. The files are in the page cache at
          first, and then it is dropped.
`limits`  Memories with a limit of 60 MiB and a capacity of 5,000, 20,000 and 200,000 get the same steps. Another one
          gets them with `spill_dir` on a disk of 20 MB that fills up. Every 1,000 steps, 500 transitions, spread over
          all ids that are held, are compared with what was added. `--small-disk` names a folder on a disk of 20 MB.
          Without it, the script mounts one, for which it must run as root.
`feed`    A camera at full speed: `add` of the drop-in compared with Stable-Baselines3's buffer. Every side of every
          round is a fresh process, and the sides take turns. Images are those of a recorded trace (`f_image`,
          `f_vector`), or made-up ones. The figures are the mean, the 99.9th percentile and the longest `add` of the
          best round by the wall clock, the CPU time of the adding thread, and the growth of the process's unique
          memory. While a buffer is filled, the system spends most of the time clearing fresh pages. So as many steps
          again are added to the full buffer. For comparison, the same process measures the 99.9th percentile of pieces
          of a plain loop, and the first write to a fresh large page.

The exit status is 1 if a bar is missed or a row is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.machine import held_bytes
from holdall.testing import OracleMemory, assert_same_bits
from holdall.units import parse_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.cases import BATCH
from shared.process import emit
from shared.streams import Step, Stream, camera
from shared.streams.looped import looped

MIB = 2**20
PARTS = ("disk", "limits", "feed")

# ---------------------------------------------------------------- a disk tier

LAP = 5_000
SLACK_BYTES = 64 * MIB
DISK_BAR = 2.0
DISK_BUDGET = "512MiB"
FILLED = 300_000
SAMPLED = 60_000
"""Transitions that are added under the limit, and of the memories that are drawn from."""
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
            memory.add(*arguments_of(next(stream.steps)))
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
    described = (stream.observation_space, stream.action_space)
    inside = ReplayMemory(*described, transitions, budget=None, seed=0, device="cpu")
    outside = ReplayMemory(*described, transitions, budget=None, seed=0, device="cpu", spill_dir=place)
    for _ in range(transitions):
        step = next(stream.steps)
        inside.add(*arguments_of(step))
        outside.add(*arguments_of(step))
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
    there = outside.gather(ids)
    here = inside.gather(ids)
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


def figures_of_disk(under: dict[str, Any], drawn: dict[str, Any], budget: str) -> list[Figure]:
    """Return the figures of both measurements."""
    limit = (under["budget_bytes"] + SLACK_BYTES) / MIB
    filled = f"disk tier: {under['transitions']:,} transitions under {budget}"
    figures = [
        Figure(filled, "over its start", "MiB", under["most_over_start_bytes"] / MIB, f"at most {limit:.0f} MiB"),
        Figure(filled, "readings of the process", "", under["readings"]),
        Figure(filled, "on disk", "MiB", under["on_disk_bytes"] / MIB),
    ]
    titles = {"memory": "all in memory", "disk": "from disk, files in the page cache", "cold": "from disk, cold"}
    for name, title in titles.items():
        case = f"disk tier: `sample({BATCH})`, {title}"
        figures.append(Figure(case, "median", "ms", drawn["times"][name]["median_ms"]))
        figures.append(Figure(case, "least", "ms", drawn["times"][name]["min_ms"]))
    over = f"at most {DISK_BAR}"
    figures.append(Figure("disk tier: from the page cache", "over memory", "of the time", drawn["ratio_median"], over))
    return figures


# ---------------------------------------------------------------- capacities, and a disk that fills up

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
    described = (stream.observation_space, stream.action_space)
    capacity = CAPACITIES[-1]
    oracle = OracleMemory(capacity)
    readings = []
    with ReplayMemory(*described, capacity, budget=BUDGET, spill_dir=place, seed=0) as memory:
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
            sys.exit(f"error: cannot mount a small disk ({done.stderr.strip()}). Run as root, or pass --small-disk.")
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


def figures_of_limits(capacities: list[dict[str, Any]], readings: list[dict[str, Any]], steps: int) -> list[Figure]:
    """Return the figures of both measurements."""
    rows = [(f"limit of {BUDGET}, {steps:,} steps, capacity {row['capacity']:,}", row) for row in capacities]
    rows += [
        (f"disk of 20 MB, after {row['steps']:,} steps", row)
        for row in readings
        if row["steps"] % (2 * READ_EVERY) == 0 or row["steps"] == steps
    ]
    figures = []
    for name, row in rows:
        figures += [
            Figure(name, "transitions held", "", row["held"]),
            Figure(name, "in memory", "MiB", row["memory_bytes"] / MIB),
            Figure(name, "on disk", "MB", row["disk_bytes"] / 1e6),
            Figure(name, "dropped early", "", row["dropped_early"]),
        ]
    return figures


# ---------------------------------------------------------------- a camera at full speed

SIDES: dict[str, dict[str, Any]] = {
    "sb3": {},
    "raw": {"budget": "auto"},
    "compressed": {"budget": None},
    "limited": {"budget": "256MiB"},
}
BARS = {"cpu_ratio": 1.0, "full_cpu_ratio": 0.75, "p999_ms": 3.0}
FEED_CAPACITY = 20_000


def images_of(trace: Path | None) -> tuple[Any, Any]:
    """Return images and vectors."""
    if trace is not None:
        with np.load(trace) as recorded:
            return recorded["f_image"], recorded["f_vector"]
    random = np.random.default_rng(0)
    ground = random.integers(90, 120, (84, 84, 3), np.uint8)
    images = np.stack([np.roll(ground, shift, axis=1) for shift in range(84)] * 24)
    return images + random.integers(0, 4, images.shape, np.uint8), random.normal(size=(len(images), 31)).astype(
        np.float32
    )


def measure_interruptions_ms(pieces: int, seconds: float) -> float:
    """Return the 99.9th percentile of the times of pieces of an otherwise empty loop."""
    took = np.zeros(pieces)
    for piece in range(pieces):
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            pass
        took[piece] = time.perf_counter() - start
    return 1e3 * float(np.percentile(took, 99.9))


def measure_fresh_page_ms() -> float:
    """Return how long the first write to 2 MiB of fresh memory takes, where the system has such pages."""
    memory = np.zeros(32 * 2**20, np.uint8)
    took = []
    for place in range(2**21, memory.size, 2**21):
        start = time.perf_counter()
        memory[place] = 1
        took.append(time.perf_counter() - start)
    return 1e3 * float(np.median(took))


def feed(side: str, trace: Path | None, steps: int) -> dict[str, Any]:
    """Feed one side, and time every call."""
    from stable_baselines3.common import buffers  # noqa: PLC0415  slow, and not for --help

    import holdall.sb3  # noqa: PLC0415  likewise

    images, vectors = images_of(trace)
    space = spaces.Dict(
        {"image": spaces.Box(0, 255, images.shape[1:], np.uint8), "vector": spaces.Box(-9, 9, vectors.shape[1:])}
    )
    kind: Any = buffers.DictReplayBuffer if side == "sb3" else holdall.sb3.ReplayBuffer
    buffer = kind(FEED_CAPACITY, space, spaces.Box(-1, 1, (8,), np.float32), device="cpu", **SIDES[side])
    seen = [{"image": images[None, i], "vector": vectors[None, i]} for i in range(len(images))]
    action = np.zeros((1, 8), np.float32)
    reward = np.ones(1, np.float32)
    infos: list[dict[str, Any]] = [{}]
    done = np.zeros(1, np.bool_)
    took = np.zeros(steps)
    most = 0
    before = held_bytes().unique
    cpu = time.thread_time()
    for step in range(steps):
        obs = seen[step % (len(seen) - 1)]
        next_obs = seen[step % (len(seen) - 1) + 1]
        start = time.perf_counter()
        buffer.add(obs, next_obs, action, reward, done, infos)
        took[step] = time.perf_counter() - start
        if step % 500 == 0:
            looking = time.thread_time()
            most = max(most, held_bytes().unique)
            cpu += time.thread_time() - looking
    cpu = time.thread_time() - cpu
    full_cpu = time.thread_time()
    for step in range(steps):
        obs = seen[step % (len(seen) - 1)]
        next_obs = seen[step % (len(seen) - 1) + 1]
        buffer.add(obs, next_obs, action, reward, done, infos)
    full_cpu = time.thread_time() - full_cpu
    if side != "sb3":
        buffer.memory.store.wait_idle()
    return {
        "interrupted_ms": measure_interruptions_ms(steps, float(took.mean())),
        "fresh_page_ms": measure_fresh_page_ms(),
        "mean_us": 1e6 * float(took.mean()),
        "p999_ms": 1e3 * float(np.percentile(took, 99.9)),
        "longest_ms": 1e3 * float(took.max()),
        "cpu_us": 1e6 * cpu / steps,
        "full_cpu_us": 1e6 * full_cpu / steps,
        "most_mib": (most - before) / MIB,
        "slow": int((took > 3e-3).sum()),
    }


def measure_feed(trace: Path | None, steps: int, rounds: int) -> dict[str, Any]:
    """Run all sides in turn, each in a fresh process. Return the best round of each."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
            command = [sys.executable, __file__, "--side", side, "--steps", str(steps)]
            command += [] if trace is None else ["--trace", str(trace)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[side].append(json.loads(done.stdout.splitlines()[-1])["result"])
    best = {side: {name: min(each[name] for each in all_) for name in all_[0]} for side, all_ in found.items()}
    for row in best.values():
        row["mean_ratio"] = row["mean_us"] / best["sb3"]["mean_us"]
        row["cpu_ratio"] = row["cpu_us"] / best["sb3"]["cpu_us"]
        row["full_cpu_ratio"] = row["full_cpu_us"] / best["sb3"]["full_cpu_us"]
    return best


TITLES = {
    "sb3": "SB3",
    "raw": "holdall",
    "compressed": "holdall, compressed",
    "limited": "holdall, under a limit of 256 MiB",
}


def figures_of_feed(found: dict[str, Any], source: str) -> tuple[list[Figure], bool]:
    """Return the figures, and whether they meet their bars."""
    figures = []
    is_met = True
    for side, row in found.items():
        name = f"camera at full speed, {source}: {TITLES[side]}"
        bars: dict[str, float] = {} if side == "sb3" else BARS
        is_met &= all(row[key] <= bar for key, bar in bars.items())
        for key, figure, unit in (
            ("mean_us", "`add`, mean", "us"),
            ("p999_ms", "`add`, p99.9", "ms"),
            ("longest_ms", "`add`, longest", "ms"),
            ("cpu_ratio", "`add`, CPU", "of SB3's time"),
            ("full_cpu_ratio", "`add` to a full buffer, CPU", "of SB3's time"),
            ("most_mib", "memory", "MiB"),
            ("interrupted_ms", "a plain loop's p99.9", "ms"),
            ("fresh_page_ms", "first write to a large page", "ms"),
        ):
            figures.append(Figure(name, figure, unit, row[key], f"at most {bars[key]}" if key in bars else None))
    return figures, is_met


# ---------------------------------------------------------------- all of it


def measure_disk_part(wanted: argparse.Namespace) -> tuple[list[Figure], bool]:
    """Stay under a limit with a disk tier, and draw from disk."""
    divisor = 5 if wanted.short else 1
    stream = looped(camera.stream(noisy=True), LAP)
    with tempfile.TemporaryDirectory(dir=wanted.spill_dir) as place:
        under = stay_under(stream, FILLED // divisor, DISK_BUDGET, Path(place))
        drawn = sample_from_disk(stream, SAMPLED // divisor, Path(place))
    return figures_of_disk(under, drawn, DISK_BUDGET), under["met"] and drawn["met"]


def measure_limits_part(wanted: argparse.Namespace) -> tuple[list[Figure], bool]:
    """Fill memories with a limit, and one whose disk fills up."""
    count = 10_000 if wanted.short else 15_000
    stream = camera.stream(noisy=True)
    steps = list(itertools.islice(stream.steps, count))
    capacities = [fill(stream, steps, capacity) for capacity in CAPACITIES]
    with contextlib.nullcontext(wanted.small_disk) if wanted.small_disk else small_disk() as place:
        full_disk = fill_disk(stream, steps, place)
    return figures_of_limits(capacities, full_disk, count), are_met(capacities, full_disk)


def measure_feed_part(wanted: argparse.Namespace) -> tuple[list[Figure], bool]:
    """Feed all sides at full speed."""
    found = measure_feed(wanted.trace, wanted.steps, 1 if wanted.short else 3)
    return figures_of_feed(found, "recorded" if wanted.trace else "made up")


def main() -> int:
    """Read the command line. Feed one side here, or measure the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--spill-dir", type=Path, help="a folder on the disk that is measured, for `disk`")
    parser.add_argument("--small-disk", type=Path, help="a folder on a disk of 20 MB, for `limits`")
    parser.add_argument("--trace", type=Path, help="recorded camera images, for `feed`")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of `feed`")
    parser.add_argument("--short", action="store_true", help="fewer transitions and one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # a child's
    wanted = parser.parse_args()
    if wanted.side:
        emit({"result": feed(wanted.side, wanted.trace, wanted.steps)})
        return 0
    measures: dict[str, Callable[[argparse.Namespace], tuple[list[Figure], bool]]] = {
        "disk": measure_disk_part,
        "limits": measure_limits_part,
        "feed": measure_feed_part,
    }
    run = describe_run({"short": wanted.short, "trace": wanted.trace and wanted.trace.name})
    is_met = True
    for part in wanted.part or PARTS:
        figures, is_part_met = measures[part](wanted)
        show(figures)
        is_met &= is_part_met
        if wanted.json is not None:
            store(wanted.json, figures, run)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

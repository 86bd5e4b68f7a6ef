"""Replay memory compared with Stable-Baselines3's: bytes per transition, times, and wrong rows.

    python benchmarks/memory/replay.py [--case atari] [--compressed PREFER] [--short] [--json FILE]

**Bytes per transition** are the slope of a line through the unique set size (USS) of a fresh process while one buffer
fills (shared/line.py). At every reading, the feed waits for the compressor, because a training is slower than it, and
the C library gives back what it keeps of freed memory. budget.py measures a feed at full speed. Memory is read at the
first step of each segment, since an open segment takes up to 16 MiB, which are freed when it is compressed. The fixed
cost is where the line begins: libraries and tables. If another process that uses the same libraries starts or ends
meanwhile, their pages change from private to shared or back. Then the line through anonymous pages alone has another
slope, and the figure is taken from that line.

A short run is too short for the bytes of a compressed game: they are fewer than what the process frees meanwhile.

**Times**: both buffers run in one process and take turns. Each adds a block of steps or draws a few batches before the
next one's turn, and the one that comes first changes. Nothing is dropped. Shown are ratios of medians; of `add` to a
compressed memory it is the ratio of means, because some calls also wait for the compressor.

**Wrong rows**: the rows around every end of an episode and 2,000 others are compared with Stable-Baselines3's arrays,
bit for bit.

The exit status is 1 if a bar is missed. `--trace FILE` plays a recorded trace in place of a case's own source.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401  both sides need it, so it is imported before memory is counted
from numpy.typing import NDArray

from holdall.machine import HeldMemory, held_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))

from results import Figure, describe_run, show, store
from shared.cases import BATCH, CASES, SIDES, Case, Side, SideName, Sizes, libraries_of, sb3_capacity
from shared.line import fit_line, fit_median_line
from shared.process import emit
from shared.streams import Stream

MIB = 2**20
FIXED_BAR_MIB = 64
COMPRESSED_ADD_BAR = 0.6
GAMES = ["montezumarevenge", "mspacman", "pong", "breakout"]
GROUPS = {name: [name] for name in CASES} | {
    "vector": ["vector1", "vector16"],
    "games": GAMES,
    "all": [name for name in CASES if name not in GAMES],
}
NAMES = {
    "atari": "Atari Seaquest, 4 frames",
    "camera": "camera, 84x84x3 and 31 floats",
    "market": "market window of 504 days, 1.9 MB",
    "montezumarevenge": "Atari Montezuma's Revenge, 4 frames",
    "mspacman": "Atari Ms. Pac-Man, 4 frames",
    "pong": "Atari Pong, 4 frames",
    "breakout": "Atari Breakout, 4 frames",
    "vector1": "17 floats",
    "vector16": "17 floats, 16 environments",
}
WARM_UP_STEPS = 1_000
SAME_SLOPE = 0.01
"""Two slopes that differ by at most this share are equal."""
MIN_SEGMENTS = 8
"""With this many segments, memory is read at the first step of each: an open segment would bend the line."""
COMPARED_ROWS = 2_000
COMPARED_BYTES = 64_000_000
"""Bytes of rows that are compared at once."""

# ---------------------------------------------------------------- bytes, one side in a process


def measure_memory(case: Case, side_name: SideName, wanted: argparse.Namespace) -> dict[str, Any]:
    """Fill one side, and fit a line through what the process holds."""
    first, last, every = case.sizes(wanted.short).readings_of(side_name)
    before_libraries = held_bytes().unique
    libraries_of(side_name)
    libraries = held_bytes().unique - before_libraries
    stream = case.stream(wanted.trace)
    for _ in itertools.islice(stream.steps, WARM_UP_STEPS):
        pass
    start = held_bytes()
    side = Side(side_name, stream, last, wanted.compressed)
    readings: list[tuple[int, HeldMemory]] = []
    segment_readings: list[tuple[int, HeldMemory]] = []
    count = 0
    segments = 0
    for step in itertools.islice(stream.steps, last // stream.lanes):
        side.add(*side.arguments(step))
        count += stream.lanes
        is_due = count // every != (count - stream.lanes) // every
        is_new_segment = False
        if side_name != "sb3":
            is_new_segment = side.memory.store.segments > segments
            segments = side.memory.store.segments
            if is_due or is_new_segment:
                side.memory.store.wait_idle()
        if is_due and count >= first:
            readings.append((count, read_memory()))
        if is_new_segment and count >= first:
            segment_readings.append((count, read_memory()))
    if len(segment_readings) >= MIN_SEGMENTS:
        readings = segment_readings
    fit = fit_line if side_name == "sb3" or wanted.compressed is None else fit_median_line
    slope, intercept = fit([(count, held.unique) for count, held in readings])
    anonymous_slope, _ = fit([(count, held.anonymous) for count, held in readings])
    is_disturbed = abs(slope - anonymous_slope) > SAME_SLOPE * anonymous_slope
    return {
        "bytes_per_transition": anonymous_slope if is_disturbed else slope,
        "fixed_bytes": libraries + intercept - start.unique,
        "held_bytes": readings[-1][1].anonymous - start.anonymous,
        "transitions": readings[-1][0],
    }


def read_memory() -> HeldMemory:
    """Return what the process holds, without memory that the C library keeps for later allocations."""
    ctypes.CDLL(None).malloc_trim(0)
    return held_bytes()


# ---------------------------------------------------------------- times, both sides in one process


class Clock:
    """Seconds by act and side, with one entry for each block of adds or batch."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[SideName, list[float]]] = {}

    def record(self, act: str, side: SideName, seconds: float) -> None:
        """Record one measurement."""
        self.seconds.setdefault(act, {}).setdefault(side, []).append(seconds)

    def ratio(self, act: str, statistic: Any = np.median) -> float:
        """Return holdall's time over that of Stable-Baselines3."""
        sides = self.seconds[act]
        return float(statistic(sides["holdall"]) / statistic(sides["sb3"]))


def measure_times(case: Case, wanted: argparse.Namespace) -> dict[str, Any]:
    """Fill both sides, draw from them, add to the full memories, and compare what they hold."""
    sizes = case.sizes(wanted.short)
    stream = case.stream(wanted.trace)
    sb3_held = sb3_capacity(stream, sizes.held)
    sides = [Side(name, stream, sb3_held if name == "sb3" else sizes.held, wanted.compressed) for name in SIDES]
    turns = _turns(sides)
    clock = Clock()
    # Beyond what Stable-Baselines3's buffer can hold, adding is not comparable, so it has an act of its own.
    held = _add(stream, sides, turns, clock, sb3_held, sizes.block, "add")
    held += _add(stream, sides, turns, clock, sizes.held - sb3_held, sizes.block, "add beyond")
    held += _add(stream, sides, turns, clock, sizes.wrapped, sizes.block, "add to a full memory")
    for side in sides:
        if side.name != "sb3":
            side.memory.store.wait_idle()
    _sample(turns, clock, sizes)
    return {
        "add": clock.ratio("add", np.mean if wanted.compressed else np.median),
        "add_full": clock.ratio("add to a full memory", np.mean if wanted.compressed else np.median),
        "sample": clock.ratio("sample"),
        "sample_us": 1e6 * float(np.median(clock.seconds["sample"]["holdall"])),
        **compare(sides, stream.lanes, held // stream.lanes),
    }


def _add(
    stream: Stream,
    sides: list[Side],
    turns: Iterator[list[Side]],
    clock: Clock,
    transitions: int,
    block: int,
    act: str,
) -> int:
    """Add `transitions` to all sides, block by block. Return how many were added."""
    ticks = transitions // stream.lanes
    for begin in range(0, ticks, block):
        steps = list(itertools.islice(stream.steps, min(block, ticks - begin)))
        arranged = {side.name: [side.arguments(step) for step in steps] for side in sides}
        for side in next(turns):
            add = side.add
            batch = arranged[side.name]
            start = time.perf_counter()
            for arguments in batch:
                add(*arguments)
            clock.record(act, side.name, (time.perf_counter() - start) / len(batch))
    return ticks * stream.lanes


def _sample(turns: Iterator[list[Side]], clock: Clock, sizes: Sizes) -> None:
    np.random.seed(0)  # noqa: NPY002  what Stable-Baselines3 draws from
    for _ in range(0, sizes.batches, sizes.in_a_row):
        for side in next(turns):
            held = None  # as in training, the last batch is held until the next one was drawn
            for _ in range(sizes.in_a_row):
                start = time.perf_counter()
                held = side.sample(BATCH)
                clock.record("sample", side.name, time.perf_counter() - start)
            del held


def _turns(sides: list[Side]) -> Iterator[list[Side]]:
    """Yield the sides, each time with another one first."""
    for first in itertools.cycle(range(len(sides))):
        yield sides[first:] + sides[:first]


# ---------------------------------------------------------------- rows


def compare(sides: list[Side], lanes: int, ticks: int) -> dict[str, int]:
    """Count the rows of holdall that differ in any bit: ends of episodes, their neighbours, and others."""
    plain = next(side for side in sides if side.name == "sb3").store
    first = max(0, ticks - plain.buffer_size)
    slots = np.arange(first, ticks) % plain.buffer_size
    ends = np.flatnonzero(plain.dones[slots].reshape(-1))
    count = len(slots) * lanes
    others = np.random.default_rng(1).integers(0, count, COMPARED_ROWS)
    places = np.concatenate([ends, ends + lanes, ends - lanes, others])
    ids = first * lanes + np.unique(places[(places >= 0) & (places < count)])
    (ours,) = (side for side in sides if side.name == "holdall")
    return {"compared": len(ids), "wrong": _count_wrong_rows(plain, ours, ids, lanes)}


def _count_wrong_rows(plain: Any, side: Side, ids: NDArray[np.int64], lanes: int) -> int:
    observed = plain.observations if isinstance(plain.observations, dict) else {"": plain.observations}
    row_bytes = sum(2 * array[0, 0].nbytes for array in observed.values())
    wrong = 0
    for some in np.array_split(ids, max(1, len(ids) * row_bytes // COMPARED_BYTES)):
        batch = side.memory.gather(some)
        ticks, lane = np.divmod(some, lanes)
        slot = ticks % plain.buffer_size
        differs = np.zeros(len(some), np.bool_)
        for theirs, ours in _fields_of(plain, batch):
            differs |= (_rows(theirs[slot, lane]) != _rows(np.asarray(ours))).any(axis=1)
        wrong += int(np.count_nonzero(differs))
    return wrong


def _fields_of(plain: Any, batch: Any) -> Iterator[tuple[NDArray[Any], Any]]:
    for theirs, ours in ((plain.observations, batch.obs), (plain.next_observations, batch.next_obs)):
        if isinstance(theirs, dict):
            yield from ((theirs[key], ours[key]) for key in theirs)
        else:
            yield theirs, ours
    yield plain.actions, batch.action
    yield plain.rewards, batch.reward
    yield plain.dones.astype(np.bool_), np.asarray(batch.terminated) | np.asarray(batch.truncated)
    yield plain.timeouts.astype(np.bool_), batch.truncated


def _rows(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8).reshape(len(array), -1)


# ---------------------------------------------------------------- all of it


def measure(case: Case, wanted: argparse.Namespace) -> tuple[list[Figure], bool]:
    """Measure one case. Return its figures, and whether they meet their bars."""
    sb3 = _run_child(case, "sb3", wanted)
    ours = _run_child(case, "holdall", wanted)
    timed = _run_child(case, "times", wanted)
    bytes_bar = case.bytes_bar
    add_bar = case.add_bar
    sample_bar = case.sample_bar
    if wanted.compressed in case.compressed:
        bytes_bar, sample_bar = case.compressed[wanted.compressed]
        add_bar = COMPRESSED_ADD_BAR
    name = name_of(case.name, wanted.compressed)
    ratio = ours["bytes_per_transition"] / sb3["bytes_per_transition"]
    fixed_mib = ours["fixed_bytes"] / MIB
    judged = [
        (Figure(name, "SB3", "B", sb3["bytes_per_transition"]), True),
        (
            Figure(name, "holdall", "B", ours["bytes_per_transition"], _most(bytes_bar)),
            bytes_bar is None or ours["bytes_per_transition"] <= bytes_bar,
        ),
        (
            Figure(name, "less by", "times", 1 / ratio, _least(case.bytes_ratio_bar)),
            case.bytes_ratio_bar is None or ratio <= case.bytes_ratio_bar,
        ),
        (
            Figure(name, "`sample(256)`", "of SB3's time", timed["sample"], f"at most {sample_bar}"),
            timed["sample"] <= sample_bar,
        ),
        (Figure(name, "`add`", "of SB3's time", timed["add"], f"at most {add_bar}"), timed["add"] <= add_bar),
        (Figure(name, "`add` to a full memory", "of SB3's time", timed["add_full"]), True),
        (
            Figure(name, "wrong rows", "", f"{timed['wrong']} of {timed['compared']:,}", "0"),
            timed["wrong"] == 0,
        ),
        (
            Figure(name, "fixed cost", "MiB", fixed_mib, f"at most {FIXED_BAR_MIB} MiB"),
            fixed_mib <= FIXED_BAR_MIB,
        ),
        (Figure(name, "transitions when full, SB3", "", sb3["transitions"]), True),
        (Figure(name, "held when full, SB3", "B", sb3["held_bytes"]), True),
        (Figure(name, "transitions when full, holdall", "", ours["transitions"]), True),
        (Figure(name, "held when full, holdall", "B", ours["held_bytes"]), True),
    ]
    return [figure for figure, _ in judged], all(is_met for _, is_met in judged)


def name_of(case: str, prefer: str | None) -> str:
    """Return the name of a case in the results."""
    if prefer is None:
        return NAMES[case]
    return f"{NAMES[case]}, compressed" + ("" if prefer == "balanced" else f', `prefer="{prefer}"`')


def _most(nbytes: float | None) -> str | None:
    return None if nbytes is None else f"at most {nbytes:,.0f} B"


def _least(ratio: float | None) -> str | None:
    return None if ratio is None else f"at least {1 / ratio:,.1f} x"


def _run_child(case: Case, part: str, wanted: argparse.Namespace) -> dict[str, Any]:
    """Run one part of a measurement in a process of its own, and return its result."""
    command = [sys.executable, __file__, "--part", part, "--case", case.name]
    command += ["--short"] if wanted.short else []
    command += ["--compressed", wanted.compressed] if wanted.compressed else []
    command += ["--trace", str(wanted.trace)] if wanted.trace else []
    print(f"{case.name}: {part}", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Read the command line. Measure one part here, or all of them in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=GROUPS, default="all", help="default: %(default)s")
    parser.add_argument("--compressed", choices=("speed", "balanced", "memory"), help="compress every full block")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --case atari or camera")
    parser.add_argument("--short", action="store_true", help="fewer transitions: about half a minute for each case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file of results that the figures are written to")
    parser.add_argument("--part", choices=("times", *SIDES), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.part:
        case = CASES[wanted.case]
        emit(measure_times(case, wanted) if wanted.part == "times" else measure_memory(case, wanted.part, wanted))
        return 0
    run = describe_run({"short": wanted.short, "trace": wanted.trace and wanted.trace.name})
    is_met = True
    for name in GROUPS[wanted.case]:
        figures, is_case_met = measure(CASES[name], wanted)
        show(figures)
        is_met &= is_case_met
        if wanted.json is not None:
            store(wanted.json, figures, run)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())

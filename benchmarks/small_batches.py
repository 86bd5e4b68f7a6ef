"""Batches of 1, 32, 64 and 256 rows of images: the drop-in, raw and compressed, beside Stable-Baselines3's buffer.

    python benchmarks/small_batches.py [--trace FILE] [--rounds 15] [--json FILE]

All sides hold the same steps in one process and draw in turn: first for 20 ms that are not timed, then a block of calls
that is. So long because threads of the side before keep a core busy: those of OpenMP, which copies Stable-Baselines3's
tensors, look for more to do for some milliseconds. A trace is a file of recorded steps with `f_obs` (frames, which are
stacked by four) or `f_image` (whole images in a Dict with `f_vector`); without one, frames are made up: a few small
things that move over a plain ground. Shown are the medians over blocks, by the wall clock and by the CPU time of the
process, and the ratios of these, which other programs on the machine change little. Exit status 1 if a bar is not met,
by the wall clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from process import commit, machine, versions

ROWS = {1: 60, 32: 20, 64: 12, 256: 4}
"""Rows of a batch, and calls of a block."""
BARS = {
    "raw": {1: 1.2, 32: 0.7, 64: 0.7, 256: 0.45},
    "compressed": {32: 1.0, 64: 1.0},
}
SIDES = ("sb3", "raw", "compressed")
UNTIMED_S = 0.02
STEPS, MADE_UP_STEPS = 12_000, 6_000


def made_up_frames(count: int) -> Any:
    """Frames of 84 x 84 on which squares move."""
    random, frames = np.random.default_rng(0), np.full((count, 84, 84), 30, np.uint8)
    places, steps = random.integers(0, 76, (6, 2)), random.choice([-1, 1, 2], (6, 2))
    for frame in frames:
        for number, (x, y) in enumerate(places):
            frame[x : x + 8, y : y + 8] = 60 + 30 * number
        steps = np.where((places + steps < 0) | (places + steps > 76), -steps, steps)
        places = places + steps
    return frames


def steps_of(trace: Path | None) -> tuple[spaces.Space[Any], Iterator[tuple[Any, Any]]]:
    """Return the space, and pairs of an observation and the next one, each with a leading axis of one."""
    if trace is None:
        frames = made_up_frames(MADE_UP_STEPS)
    else:
        with np.load(trace) as recorded:
            if "f_image" in recorded:
                return _images(recorded["f_image"], recorded["f_vector"])
            frames = recorded["f_obs"][:STEPS]

    def stacks() -> Iterator[tuple[Any, Any]]:
        for first in range(len(frames) - 5):
            yield frames[None, first : first + 4], frames[None, first + 1 : first + 5]

    return spaces.Box(0, 255, (4, *frames.shape[1:]), np.uint8), stacks()


def _images(images: Any, vectors: Any) -> tuple[spaces.Space[Any], Iterator[tuple[Any, Any]]]:
    images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, images.shape[1:], np.uint8),
            "vector": spaces.Box(-np.inf, np.inf, vectors.shape[1:], vectors.dtype.type),
        }
    )

    def pairs() -> Iterator[tuple[Any, Any]]:
        for now in range(len(images) - 1):
            yield tuple(  # type: ignore[misc]
                {"image": images[None, at], "vector": vectors[None, at]} for at in (now, now + 1)
            )

    return space, pairs()


def filled_buffers(trace: Path | None) -> dict[str, Any]:
    """Return the buffers of all sides, with the same steps."""
    from stable_baselines3.common import buffers  # noqa: PLC0415  slow, and not for --help

    import holdall.sb3  # noqa: PLC0415  likewise

    space, steps = steps_of(trace)
    action_space, action = spaces.Discrete(6), np.zeros((1, 1), np.int64)
    theirs: Any = buffers.DictReplayBuffer if isinstance(space, spaces.Dict) else buffers.ReplayBuffer
    sides = {
        "sb3": theirs(STEPS, space, action_space, device="cpu"),
        "raw": holdall.sb3.ReplayBuffer(STEPS, space, action_space, device="cpu", budget="auto"),
        "compressed": holdall.sb3.ReplayBuffer(STEPS, space, action_space, device="cpu", budget=None),
    }
    reward, done = np.ones(1, np.float32), np.zeros(1, np.bool_)
    for obs, next_obs in steps:
        for buffer in sides.values():
            buffer.add(obs, next_obs, action, reward, done, [{}])
    sides["compressed"].memory.store.wait_idle()
    return sides


def measure(sides: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return milliseconds a call, by rows and side."""
    times: dict[tuple[int, str], list[tuple[float, float]]] = {(rows, side): [] for rows in ROWS for side in sides}
    for turn in range(rounds):
        for rows, calls in ROWS.items():
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                sample = sides[side].sample
                began = time.perf_counter()
                while time.perf_counter() - began < UNTIMED_S:
                    sample(rows)
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    sample(rows)
                cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
                times[rows, side].append((1e3 * wall / calls, 1e3 * cpu / calls))
    medians = {key: np.median(np.array(each), axis=0) for key, each in times.items()}
    found: dict[str, Any] = {}
    for rows in ROWS:
        plain = medians[rows, "sb3"]
        found[str(rows)] = {
            side: {
                "wall_ms": float(medians[rows, side][0]), "cpu_ms": float(medians[rows, side][1]),
                "wall_ratio": float(medians[rows, side][0] / plain[0]),
                "cpu_ratio": float(medians[rows, side][1] / plain[1]),
                "bar": BARS.get(side, {}).get(rows),
            }
            for side in SIDES
        }  # fmt: skip
    return found


def show(found: dict[str, Any]) -> bool:
    """Print a table to stderr; return whether all bars are met."""
    is_met = True
    for rows, sides in found.items():
        for side, row in sides.items():
            is_met &= row["bar"] is None or row["wall_ratio"] <= row["bar"]
            line = f"{rows:>4} rows {side:11} {row['wall_ms']:8.3f} ms, CPU {row['cpu_ms']:8.3f} ms"
            bar = "" if row["bar"] is None else f", bar {row['bar']}"
            print(f"{line}; {row['wall_ratio']:.2f}, CPU {row['cpu_ratio']:.2f} of SB3's{bar}", file=sys.stderr)
    return is_met


def main() -> int:
    """Read the command line, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args()
    found = measure(filled_buffers(wanted.trace), wanted.rounds)
    is_met = show(found)
    trace = None if wanted.trace is None else wanted.trace.name
    result = {"commit": commit(), "machine": machine(), "versions": versions(), "trace": trace, "found": found}
    if wanted.json:
        wanted.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure the overhead of a memory: `python tests/unit/fixed_cost.py --frame 256 280 3 --stack 4`.

Overhead is what the process holds beyond the bytes of the transitions: open segments, tables, staging, and the work of
choosing a codec. The script adds stacks of frames of a made-up game (a landscape that scrolls, and a sprite), and every
full block is compressed. After every `--every` transitions it reads the process's unique set size from the kernel. The
figure is the largest overhead of all readings. Before each reading the script waits for the compressor, so that raw
blocks in its queue do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.machine import held_bytes


def make_stacks(shape: tuple[int, ...], stack: int, count: int) -> Iterator[Any]:
    """Yield stacks of frames. The newest frame is the last one, and the other frames are those of the step before."""
    generator = np.random.default_rng(0)
    rows, columns = shape[:2]
    landscape = generator.integers(0, 256, (rows // 8 + 1, columns // 8 + 64, *shape[2:]), np.uint8)
    landscape = landscape.repeat(8, axis=0).repeat(8, axis=1)
    sprite = generator.integers(0, 256, (16, 16, *shape[2:]), np.uint8)
    frames = np.zeros((stack, *shape), np.uint8)
    for step in range(count):
        newest = landscape[:rows, step % 256 : step % 256 + columns].copy()
        top = generator.integers(0, rows - 16)
        left = generator.integers(0, columns - 16)
        newest[top : top + 16, left : left + 16] = sprite
        frames = np.concatenate([frames[1:], newest[None]])
        yield frames


class Peak:
    """Largest unique set size of the process. A thread reads it every few milliseconds."""

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, held_bytes().unique)

    def stop(self) -> None:
        """Stop the thread."""
        self._done.set()
        self._thread.join()


def measure(shape: tuple[int, ...], stack: int, count: int, every: int) -> dict[str, Any]:
    """Fill a memory, and compare the bytes of the process with the bytes of the transitions."""
    action = np.zeros(1, np.int64)
    reward = np.ones(1, np.float32)
    flag = np.zeros(1, np.bool_)
    for _ in make_stacks(shape, stack, 50):
        pass
    start = held_bytes().unique
    memory = ReplayMemory(spaces.Box(0, 255, (stack, *shape), np.uint8), spaces.Discrete(2), 10 * count, budget=None)
    peak = Peak()
    readings = []
    most = 0
    last = None
    for number, frames in enumerate(make_stacks(shape, stack, count)):
        if last is not None:
            memory.add(last[None], action, reward, frames[None], flag, flag)
        last = frames
        if number % every == every - 1:
            memory.store.wait_idle()
            readings.append((number, held_bytes().unique - start))
    most = peak.most - start
    memory.store.wait_idle()
    peak.stop()
    time.sleep(0.1)
    held = memory.report()
    return {
        "bytes_per_transition": held.bytes_per_transition,
        "overhead_mib": max(taken - held.bytes_per_transition * number for number, taken in readings) / 2**20,
        "peak_overhead_mib": most / 2**20,
        "final_mib": (held_bytes().unique - start) / 2**20,
        "finding": held.fields[0].finding,
    }


def main() -> None:
    """Read the command line, measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frame", type=int, nargs="+", default=[256, 280, 3], help="rows, columns, channels")
    parser.add_argument("--stack", type=int, default=4)
    parser.add_argument("--transitions", type=int, default=600)
    parser.add_argument("--every", type=int, default=5)
    wanted = parser.parse_args()
    found = measure(tuple(wanted.frame), wanted.stack, wanted.transitions, wanted.every)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

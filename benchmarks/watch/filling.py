"""A process that grows until a GPU or a disk is full: `python benchmarks/watch/filling.py disk COUNTER FOLDER`.

The arguments are "disk" or "vram", a file for the step at which the process ended, and for a disk the folder to spill
to. The exit code is 3 when the GPU or the disk is full. The process watches itself, as a training does that calls
`holdall.watch.start()`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

import holdall
from holdall import watch
from holdall.tools.watch.agent import get_agent

FULL = 3
MIB = 2**20


def vram() -> Iterator[bool]:
    """Keep 128 MiB more on the GPU with every step."""
    kept: list[torch.Tensor] = []
    while True:
        try:
            kept.append(torch.ones(128 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            yield True
        time.sleep(0.05)
        yield False


def disk(folder: Path) -> Iterator[bool]:
    """Add frames of noise to a memory that spills."""
    frame = spaces.Box(0, 255, (84, 84), np.uint8)
    memory = holdall.ReplayMemory(frame, spaces.Discrete(2), 1_000_000, budget=64 * MIB, spill_dir=folder)
    draw = np.random.default_rng(0)
    no = np.zeros(1, bool)
    while True:
        now, after = draw.integers(0, 256, (2, 1, 84, 84), np.uint8)
        memory.add(now, np.zeros(1, np.int64), np.zeros(1), after, no, no)
        time.sleep(0.002)
        room = os.statvfs(folder)
        yield room.f_bavail * room.f_frsize < 4 * MIB


def main() -> int:
    """Grow until the GPU or the disk is full."""
    kind = sys.argv[1]
    counter = Path(sys.argv[2])
    growing = vram() if kind == "vram" else disk(Path(sys.argv[3]))
    with watch.start(interval_s=1.0):
        for step, is_full in enumerate(growing):
            get_agent().step = step
            get_agent().publish_if_due()
            if is_full:
                counter.write_text(str(step), encoding="ascii")
                return FULL
    return 0


if __name__ == "__main__":
    sys.exit(main())

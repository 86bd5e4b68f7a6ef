"""A memory that grows beyond its container: `python benchmarks/watch_pressure.py spill FOLDER`.

In:  what is done when memory runs short ("none" for nothing), and a folder to spill to.  Out: an exit code; 0 if all
transitions are there at the end, bit for bit. Its budget is far more than its control group allows.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

import holdall
from holdall import watch

STEPS = 60_000
SIDE = 84
CHECKED = 256


def frame(number: int, base: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the observation of a step."""
    made: NDArray[np.uint8] = base[number % len(base)] ^ np.uint8(number % 251)
    made[0, 0, 0, :4] = np.frombuffer(np.int32(number).tobytes(), np.uint8)
    return made


def main() -> None:
    """Fill the memory, and check it."""
    act: Any = sys.argv[1]
    observations = spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8)
    base = np.random.default_rng(0).integers(0, 256, (50, 1, 3, SIDE, SIDE), np.uint8)
    watched = None if act == "none" else watch.start(on_pressure=act)
    action, reward, no = np.zeros((1, 2), np.float32), np.zeros(1), np.zeros(1, np.bool_)
    memory = holdall.ReplayMemory(
        observations, spaces.Box(-1, 1, (2,)), STEPS, budget="4GiB", spill_dir=sys.argv[2], seed=0
    )
    with memory:
        for number in range(STEPS):
            memory.add(frame(number, base), action, reward, frame(number + 1, base), no, no)
        ids = np.random.default_rng(1).integers(0, STEPS, CHECKED)
        batch = memory.gather(ids)
        for row, number in enumerate(ids.tolist()):
            if not np.array_equal(batch.obs[row], frame(number, base)[0]) or len(memory) != STEPS:
                sys.exit(3)
    if watched is not None:
        watched.stop()


if __name__ == "__main__":
    main()

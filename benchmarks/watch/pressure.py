"""A memory that grows beyond its container, as fast as it can: `python benchmarks/watch/pressure.py spill FOLDER`.

The arguments are the action of `on_pressure` ("none" for no watch) and a folder to spill to. The output is one JSON
line with the bytes a second. The exit code is 0 if all transitions are stored at the end, bit for bit. The budget is
far more than the control group allows. Frames are made before the first `add`, so that only `add` takes time.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

import holdall
from holdall import watch

STEPS = 20_000
SIDE = 84
MADE = 500
CHECKED = 512


def camera_frames() -> NDArray[np.uint8]:
    """Return frames that compress about as well as those of a camera: smooth areas, and noise in the lowest bits."""
    draw = np.random.default_rng(0)
    areas = draw.integers(0, 256, (MADE, 1, 3, 12, 12), np.uint8).repeat(7, 3).repeat(7, 4)
    noise: NDArray[np.uint8] = draw.integers(0, 4, areas.shape, np.uint8)
    np.bitwise_xor(areas, noise, out=noise)
    return noise


def stamp(frame: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """Write `number` into a frame, and return the frame."""
    frame[0, 0, 0, :4] = np.frombuffer(np.int32(number).tobytes(), np.uint8)
    return frame


def main() -> None:
    """Fill the memory, and check it."""
    act: Any = sys.argv[1]
    frames = camera_frames()
    watched = None if act == "none" else watch.start(on_pressure=act)
    action = np.zeros((1, 2), np.float32)
    reward = np.zeros(1)
    no = np.zeros(1, np.bool_)
    memory = holdall.ReplayMemory(
        spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8),
        spaces.Box(-1, 1, (2,)),
        STEPS,
        budget="4GiB",
        spill_dir=sys.argv[2],
        seed=0,
    )
    with memory:
        began = time.monotonic()
        for number in range(STEPS):
            now = frames[number % MADE]
            after = frames[(number + 1) % MADE]
            memory.add(stamp(now, number), action, reward, stamp(after, number + 1), no, no)
        rate = STEPS * frames[0].nbytes / (time.monotonic() - began)
        ids = np.random.default_rng(1).integers(0, STEPS, CHECKED)
        batch = memory.gather(ids)
        for row, number in enumerate(ids.tolist()):
            is_right = np.array_equal(batch.obs[row], stamp(frames[number % MADE], number)[0])
            if not is_right or len(memory) != STEPS:
                sys.exit(3)
    print(json.dumps({"bytes_per_second": rate, "disk": memory.disk_bytes}))
    if watched is not None:
        watched.stop()


if __name__ == "__main__":
    main()

"""What an installed wheel must do, with the standard library and holdall alone: `python release/smoke.py [--linked]`.

Frames are added, compressed, spilled to disk, saved and loaded, and every row is compared with what was added.
--linked: Zstandard and LZ4 must be those inside the wheel, so the system's are hidden first.
Out: one line with the platform, Python, and which loops did the work. No line: it failed.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np

import holdall
from holdall.native import chosen_kernels

STEPS, SHAPE = 3_000, (4, 42, 42)


def frames() -> np.ndarray:
    """Return a window that moves over pictures that repeat in part."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 40, (STEPS + 4, *SHAPE[1:]), np.uint8)
    noise[:, 8:] //= 20
    return np.lib.stride_tricks.sliding_window_view(noise, 4, axis=0).transpose(0, 3, 1, 2)


def check(memory: holdall.ReplayMemory, stacks: np.ndarray) -> None:
    """Compare every row."""
    for begin in range(0, STEPS, 500):
        batch = memory.gather(np.arange(begin, begin + 500))
        assert np.array_equal(batch.obs, stacks[begin : begin + 500])
        assert np.array_equal(batch.next_obs, stacks[begin + 1 : begin + 501])
        assert np.array_equal(batch.reward, np.arange(begin, begin + 500, dtype=np.float32))


def main() -> None:
    """Run it all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--linked", action="store_true")
    linked = parser.parse_args().linked
    if linked:
        warnings.simplefilter("error")
        mock.patch(
            "holdall.native.library._load", return_value=None
        ).start()  # the system's Zstandard and LZ4 are hidden
    stacks = frames()
    with tempfile.TemporaryDirectory() as folder:
        memory = holdall.ReplayMemory(
            gym.spaces.Box(0, 255, SHAPE, np.uint8), gym.spaces.Discrete(3), STEPS, budget=None, seed=0
        )
        with memory:
            for step in range(STEPS):
                memory.add(stacks[step], step % 3, float(step), stacks[step + 1], False, step % 500 == 499)
            memory.drain()
            check(memory, stacks)
            assert len(memory.sample(256).reward) == 256
            report = memory.report()
            memory.save(Path(folder, "saved")).result()
        with holdall.ReplayMemory.load(Path(folder, "saved")) as loaded:
            check(loaded, stacks)
    assert not linked or not report.fallback, report.fallback
    print(
        f"holdall {holdall.__version__}, {platform.system()} {platform.machine()}, Python {platform.python_version()}: "
        f"{chosen_kernels().name} loops, {report.ratio:.1f} times smaller, {STEPS} of {STEPS} rows right"
    )


if __name__ == "__main__":
    main()

"""Test of an installed wheel that needs only holdall and its dependencies: `python release/smoke.py`.

The script adds frames, compresses them, saves and loads them, and compares every row with what was added. If everything
is right, it prints one line with the platform and the version of Python.
"""

from __future__ import annotations

import platform
import tempfile
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np

import holdall

STEPS = 3_000
SHAPE = (4, 42, 42)


def make_stacks() -> np.ndarray:
    """Return stacks of four pictures, which have some content in common."""
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
    """Fill, save and load a memory, and check its rows."""
    warnings.simplefilter("error")
    stacks = make_stacks()
    with tempfile.TemporaryDirectory() as folder:
        memory = holdall.ReplayMemory(
            gym.spaces.Box(0, 255, SHAPE, np.uint8), gym.spaces.Discrete(3), STEPS, budget=None, seed=0
        )
        with memory:
            for step in range(STEPS):
                memory.add(stacks[step], step % 3, float(step), stacks[step + 1], False, step % 500 == 499)
            memory.store.wait_idle()
            check(memory, stacks)
            assert len(memory.sample(256).reward) == 256
            report = memory.report()
            memory.save(Path(folder, "saved")).result()
        with holdall.ReplayMemory.load(Path(folder, "saved")) as loaded:
            check(loaded, stacks)
    print(
        f"holdall {holdall.__version__}, {platform.system()} {platform.machine()}, Python {platform.python_version()}: "
        f"{report.ratio:.1f} times smaller, {STEPS} of {STEPS} rows right"
    )


if __name__ == "__main__":
    main()

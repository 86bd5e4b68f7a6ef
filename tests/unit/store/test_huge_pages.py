"""Which blocks of slices ask the system for huge pages."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.store.tuning import Tuning

BLOCK_BYTES = 4 * 2**20
IMAGE = spaces.Box(0, 255, (64, 64, 4), np.uint8)
IMAGES_PER_BLOCK = BLOCK_BYTES // (64 * 64 * 4)


def huge_bytes() -> int:
    """Return the bytes of all areas of this process that may use huge pages."""
    total = size = 0
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if name == "Size:":
            size = 1024 * int(values[0])
        elif name == "VmFlags:" and "hg" in values:
            total += size
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says which areas may use huge pages")
def test_a_block_after_a_filled_one_uses_huge_pages_and_the_first_one_does_not() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    random = np.random.default_rng(0)
    obs = random.integers(0, 256, (1, *IMAGE.shape), np.uint8)
    with holdall.ReplayMemory(
        IMAGE, spaces.Discrete(2), 100 * IMAGES_PER_BLOCK, _tuning=Tuning(block_bytes=BLOCK_BYTES)
    ) as memory:
        before = huge_bytes()
        used = []
        for _ in range(3):
            for _ in range(IMAGES_PER_BLOCK // 2):
                next_obs = random.integers(0, 256, (1, *IMAGE.shape), np.uint8)
                memory.add(obs, np.zeros(1, np.int64), np.zeros(1), next_obs, np.zeros(1, bool), np.zeros(1, bool))
                obs = next_obs
            used.append(huge_bytes() - before)
    assert used[0] == 0
    assert used[-1] >= BLOCK_BYTES

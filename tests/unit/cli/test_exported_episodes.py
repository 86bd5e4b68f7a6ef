"""The episodes that an export finds in a memory do not depend on the blocks in which it reads them."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.tools.datasets import read_episodes

SPACE = spaces.Box(-9, 9, (3,), np.float32)


@pytest.mark.parametrize("ticks", [1, 2, 4, 5, 9, 12])
def test_episodes_are_whole_for_every_block_length(ticks: int) -> None:
    """An episode of five steps in each of two lanes. Blocks have four transitions, and the last one may have one."""
    seen = np.arange(3 * (ticks + 1), dtype=np.float32).reshape(-1, 1, 3).repeat(2, axis=1)
    with ReplayMemory(SPACE, SPACE, 64, 2) as memory:
        for at in range(ticks):
            ends = np.array([at % 5 == 4] * 2)
            cut = np.zeros(2, np.bool_)
            memory.add(seen[at], seen[at], np.full(2, at, np.float32), seen[at + 1], ends, cut)
        found = [episode["reward"][0].tolist() for episode in read_episodes(memory, steps_at_once=4)]
    expected = [list(map(float, range(start, min(start + 5, ticks)))) for start in range(0, ticks, 5)]
    assert found == expected + expected


def test_a_transition_that_is_not_valid_ends_an_episode() -> None:
    """Also if it is the last one of a block."""
    still = np.zeros((1, 3), np.float32)
    with ReplayMemory(SPACE, SPACE, 64) as memory:
        for at in range(8):
            never = np.zeros(1, np.bool_)
            memory.add(still, still, np.full(1, at, np.float32), still, never, never, valid=np.array([at != 3]))
        found = [episode["reward"][0].tolist() for episode in read_episodes(memory, steps_at_once=4)]
    assert found == [[0.0, 1.0, 2.0], [4.0, 5.0, 6.0, 7.0]]

"""A memory that grows waits for its guard, however fast it grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.machine import held_bytes
from holdall.tools.watch.agent import Agent, get_agent
from holdall.tools.watch.guard import MemoryGuard

MIB = 2**20
CAMERA = spaces.Box(0, 255, (3, 128, 128), np.uint8)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    made = get_agent()
    yield made
    made.stop()


def fill(memory: ReplayMemory, count: int) -> int:
    """Add frames that compress well. Return the largest number of anonymous bytes that the process held."""
    frame = np.zeros((1, 3, 128, 128), np.uint8)
    no = np.zeros(1, np.bool_)
    most = 0
    for number in range(count):
        frame[0, :, number % 128] = number % 251
        after = frame.copy()
        after[0, 0, 0, :4] = np.frombuffer(np.int32(number).tobytes(), np.uint8)
        memory.add(frame, np.zeros((1, 2), np.float32), np.zeros(1), after, no, no)
        if number % 100 == 0:
            most = max(most, held_bytes().anonymous)
    return most


@pytest.mark.parametrize("is_made_first", [True, False])
def test_a_memory_that_grows_stays_under_the_limit(agent: Agent, tmp_path: Path, is_made_first: bool) -> None:
    """The guard has no thread, because a thread may be late on a busy machine."""
    held = held_bytes()
    limit = held.proportional + 160 * MIB
    guard = None if is_made_first else MemoryGuard(agent, "spill", limit_bytes=limit, has_thread=False)
    with ReplayMemory(CAMERA, ACTION, 20_000, budget="4GiB", spill_dir=tmp_path / "spill") as memory:
        guard = guard or MemoryGuard(agent, "spill", limit_bytes=limit, has_thread=False)
        most = fill(memory, 3_000)  # 280 MiB with the next observations
        guard.stop()
        assert most < held.anonymous + 160 * MIB
        assert len(memory) == 3_000
        batch = memory.gather(np.arange(2_000, 2_010))
        assert batch.next_obs[:, 0, 0, :4].copy().view(np.int32)[:, 0].tolist() == list(range(2_000, 2_010))


def test_memories_do_not_ask_a_stopped_guard(agent: Agent, tmp_path: Path) -> None:
    guard = MemoryGuard(agent, "spill", limit_bytes=held_bytes().proportional, has_thread=False)
    guard.stop()
    with ReplayMemory(CAMERA, ACTION, 20_000, budget="4GiB", spill_dir=tmp_path / "spill") as memory:
        fill(memory, 1_000)
        assert memory.report().disk_bytes == 0

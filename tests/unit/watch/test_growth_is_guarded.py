"""A guard's memories wait for it while they grow, however fast that is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory, watch
from holdall.machine import held_bytes
from holdall.watch import MemoryGuard

MIB = 2**20
CAMERA = spaces.Box(0, 255, (3, 128, 128), np.uint8)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture(autouse=True)
def no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard's own thread ends at once: on a busy machine it may come late, and memories must not need it."""
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(MemoryGuard, "_run", lambda self: None)


def filled(memory: ReplayMemory, count: int) -> int:
    """Add frames that compress well; return the most that the process held, without what it shares with others."""
    frame, no, most = np.zeros((1, 3, 128, 128), np.uint8), np.zeros(1, np.bool_), 0
    for number in range(count):
        frame[0, :, number % 128] = number % 251
        after = frame.copy()
        after[0, 0, 0, :4] = np.frombuffer(np.int32(number).tobytes(), np.uint8)
        memory.add(frame, np.zeros((1, 2), np.float32), np.zeros(1), after, no, no)
        if number % 100 == 0:
            most = max(most, held_bytes().anonymous)
    return most


def test_a_memory_that_grows_stays_under_the_limit(tmp_path: Path) -> None:
    held = held_bytes()
    limit = held.proportional + 160 * MIB
    guarded = watch.start(limit=limit, on_pressure="spill", pressure_at=0.9)
    with guarded, ReplayMemory(CAMERA, ACTION, 20_000, budget="4GiB", spill_dir=tmp_path / "spill") as memory:
        most = filled(memory, 3_000)  # 280 MiB with the next observations
        assert most < held.anonymous + 160 * MIB
        assert len(memory) == 3_000
        batch = memory.gather(np.arange(2_000, 2_010))
        assert batch.next_obs[:, 0, 0, :4].copy().view(np.int32)[:, 0].tolist() == list(range(2_000, 2_010))


def test_a_guard_that_was_stopped_is_not_asked(tmp_path: Path) -> None:
    guarded = watch.start(limit=held_bytes().proportional, on_pressure="spill")
    guarded.stop()
    with ReplayMemory(CAMERA, ACTION, 20_000, budget="4GiB", spill_dir=tmp_path / "spill") as memory:
        filled(memory, 1_000)
        assert memory.report().disk_bytes == 0

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ArgumentError, ReplayMemory
from holdall.machine import Limit, held_bytes
from holdall.tools.watch.agent import Agent, agent
from holdall.tools.watch.agent_files import read_agent_report
from holdall.watch import MemoryGuard

MIB = 2**20
CAMERA = spaces.Box(0, 255, (3, 64, 64), np.uint8)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    made = agent()
    yield made
    made.stop()


def guard(own: Agent, act: Any, **named: Any) -> MemoryGuard:
    """A guard that looks only when it is told to."""
    made = Unhurried(own, act, **named)
    made.stop()
    return made


class Unhurried(MemoryGuard):
    """One without a thread."""

    def _run(self) -> None:
        """Never look by itself."""


def filled(memory: ReplayMemory, count: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    frames = [generator.integers(0, 256, (1, 3, 8, 64), np.uint8).repeat(8, 2) for _ in range(count + 1)]
    no = np.zeros(1, np.bool_)
    for i in range(count):
        memory.add(frames[i], np.zeros((1, 2), np.float32), np.zeros(1), frames[i + 1], no, no)
    return frames


def test_nothing_is_done_while_there_is_room(own: Agent, caplog: pytest.LogCaptureFixture) -> None:
    assert not guard(own, "warn", limit_bytes=held_bytes().proportional * 4, at=0.9).check()
    assert not caplog.records


def test_a_limit_that_is_near_is_told_once(own: Agent, caplog: pytest.LogCaptureFixture) -> None:
    one = guard(own, "warn", limit_bytes=held_bytes().proportional, at=0.9)
    with caplog.at_level(logging.WARNING, "holdall"):
        assert one.check()
        one._rests_until = 0.0
        assert one.check()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["memory is short"]
    own.publish()
    told = read_agent_report(own._pid)
    assert told is not None
    assert told.events[-1][1].startswith("memory is short")


@pytest.mark.parametrize("spills", [True, False])
def test_memories_give_memory_back_and_lose_nothing(own: Agent, tmp_path: Path, spills: bool) -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    folder = tmp_path / "spill" if spills else None
    # The limit is so far away that nothing is compressed before the guard asks for it.
    with ReplayMemory(CAMERA, space, 4000, budget="64GiB", spill_dir=folder) as memory:
        frames = filled(memory, 4000)
        before = held_bytes().unique
        assert memory.report().disk_bytes == 0
        assert guard(own, "spill", limit_bytes=held_bytes().proportional + MIB, at=0.5).check()
        memory.store.wait_idle()
        assert held_bytes().unique < before - 20 * MIB
        assert (memory.report().disk_bytes > 0) == spills
        assert len(memory) == 4000
        ids = np.arange(0, 4000, 7)
        batch = memory.gather(ids)
        assert all(np.array_equal(batch.obs[row], frames[i][0]) for row, i in enumerate(ids))
        assert all(np.array_equal(batch.next_obs[row], frames[i + 1][0]) for row, i in enumerate(ids))


def test_a_checkpoint_is_asked_for_once_each_time_memory_runs_short(own: Agent) -> None:
    saved: list[int] = []
    limit = held_bytes().proportional // 2  # what is shared with others may become less
    one = guard(own, "checkpoint", limit_bytes=limit, at=0.9, checkpoint=lambda: saved.append(1))
    for _ in range(3):
        one._rests_until = 0.0
        assert one.check()
    assert saved == [1]
    one._limit_bytes, one._rests_until = 10 * limit, 0.0
    assert not one.check()
    one._limit_bytes, one._rests_until = limit, 0.0
    assert one.check()
    assert saved == [1, 1]


def test_an_agent_counts_the_transitions_that_were_added_and_bears_closed_memories(own: Agent) -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    with ReplayMemory(CAMERA, space, 100) as memory, ReplayMemory(CAMERA, space, 100) as other:
        filled(memory, 7)
        other.close()
        own.publish()
        told = read_agent_report(own._pid)
        assert told is not None
        assert (told.step or 0) >= 7  # memories of other tests may still be there


def test_a_small_limit_is_looked_at_often_beside_a_large_one_that_is_nearer_as_a_share(
    own: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = guard(own, "spill")
    machine, group = Limit("machine", 8 * 1024 * MIB, 24 * 1024 * MIB), Limit("group", 160 * MIB, 200 * MIB)
    monkeypatch.setattr(one, "_limits", lambda: [machine, group])
    one._unseen_bytes = 0.0
    assert not one.is_short(MIB)
    assert one._unseen_bytes <= 160 * MIB / 8
    assert one._pause_s < 0.5


def test_arguments_that_make_no_sense_are_refused(own: Agent) -> None:
    with pytest.raises(ArgumentError, match="on_pressure"):
        guard(own, "pray")
    with pytest.raises(ArgumentError, match="pressure_at"):
        guard(own, "warn", at=2.0)
    with pytest.raises(ArgumentError, match="checkpoint"):
        guard(own, "checkpoint")

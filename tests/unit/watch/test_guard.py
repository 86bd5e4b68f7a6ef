"""What the guard does when memory is short."""

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
from holdall.tools.watch.agent import Agent, get_agent
from holdall.tools.watch.exchange import read_agent_report
from holdall.tools.watch.guard import MemoryGuard

MIB = 2**20
CAMERA = spaces.Box(0, 255, (3, 64, 64), np.uint8)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    made = get_agent()
    yield made
    made.stop()


class Machine:
    """A machine whose free memory, memory pressure and clock a test sets."""

    def __init__(self, free_mib: int = 1000, total_mib: int = 1000) -> None:
        self.limits = [Limit("machine", free_mib * MIB, total_mib * MIB)]
        self.now = 0.0
        self.stalled_percent: float | None = None

    def guard(self, agent: Agent, on_pressure: Any, **named: Any) -> MemoryGuard:
        return MemoryGuard(
            agent,
            on_pressure,
            has_thread=False,
            read_limits=lambda: self.limits,
            read_stalled=lambda: self.stalled_percent,
            clock=lambda: self.now,
            **named,
        )

    def set(self, free_mib: int, seconds: float = 100.0) -> None:
        self.limits = [Limit("machine", free_mib * MIB, 1000 * MIB)]
        self.now += seconds


def fill(memory: ReplayMemory, count: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    frames = [generator.integers(0, 256, (1, 3, 8, 64), np.uint8).repeat(8, 2) for _ in range(count + 1)]
    no = np.zeros(1, np.bool_)
    for i in range(count):
        memory.add(frames[i], np.zeros((1, 2), np.float32), np.zeros(1), frames[i + 1], no, no)
    return frames


def test_the_guard_does_nothing_while_memory_is_free(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    guard = Machine(free_mib=200).guard(agent, "warn")
    assert not guard.check()
    assert not caplog.records


@pytest.mark.parametrize(("percent", "is_short"), [(None, False), (39.0, False), (41.0, True)])
def test_memory_is_short_if_processes_wait_for_it(agent: Agent, percent: float | None, is_short: bool) -> None:
    machine = Machine()
    guard = machine.guard(agent, "warn")
    machine.stalled_percent = percent
    assert guard.check() == is_short


def test_a_near_limit_is_reported_once(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    guard = machine.guard(agent, "warn")
    machine.set(free_mib=50)
    with caplog.at_level(logging.WARNING, "holdall"):
        assert guard.check()
        machine.set(free_mib=50)
        assert guard.check()
    assert [record.getMessage() for record in caplog.records] == [
        "memory is short: 50.0 MiB left of 1000.0 MiB (machine)"
    ]
    agent.publish()
    report = read_agent_report(agent.pid)
    assert report is not None
    assert report.events[-1][1].startswith("memory is short")


@pytest.mark.parametrize("spills", [True, False])
def test_memories_free_memory_and_lose_nothing(agent: Agent, tmp_path: Path, spills: bool) -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    folder = tmp_path / "spill" if spills else None
    # The budget is so large that nothing is compressed before the guard asks for it.
    with ReplayMemory(CAMERA, space, 4000, budget="64GiB", spill_dir=folder) as memory:
        frames = fill(memory, 4000)
        before = held_bytes().unique
        assert memory.report().disk_bytes == 0
        guard = MemoryGuard(
            agent, "spill", limit_bytes=held_bytes().proportional + MIB, pressure_at=0.5, has_thread=False
        )
        assert guard.check()
        guard.stop()
        memory.store.wait_idle()
        assert held_bytes().unique < before - 20 * MIB
        assert (memory.report().disk_bytes > 0) == spills
        assert len(memory) == 4000
        ids = np.arange(0, 4000, 7)
        batch = memory.gather(ids)
        assert all(np.array_equal(batch.obs[row], frames[i][0]) for row, i in enumerate(ids))
        assert all(np.array_equal(batch.next_obs[row], frames[i + 1][0]) for row, i in enumerate(ids))


def test_checkpoint_is_called_once_each_time_memory_runs_short(agent: Agent) -> None:
    saved: list[int] = []
    machine = Machine()
    guard = machine.guard(agent, "checkpoint", checkpoint=lambda: saved.append(1))
    for _ in range(3):
        machine.set(free_mib=50)
        assert guard.check()
    assert saved == [1]
    machine.set(free_mib=900)
    assert not guard.check()
    machine.set(free_mib=50)
    assert guard.check()
    assert saved == [1, 1]


def test_an_action_is_given_a_second_to_take_effect(agent: Agent) -> None:
    machine = Machine()
    guard = machine.guard(agent, "spill")
    machine.set(free_mib=50)
    assert guard.check()
    machine.set(free_mib=50, seconds=0.5)
    assert not guard.check()
    assert guard.check(is_patient=False)
    guard.stop()


def test_a_memory_asks_the_guard_after_an_eighth_of_the_spare_bytes(agent: Agent) -> None:
    """The spare bytes are those of the limit that is used up first. As a share of its size, another limit is nearer."""
    asked: list[float] = []
    machine = Machine()
    machine.limits = [Limit("machine", 8 * 1024 * MIB, 24 * 1024 * MIB), Limit("group", 160 * MIB, 200 * MIB)]

    def read_limits() -> list[Limit]:
        asked.append(machine.now)
        return machine.limits

    guard = MemoryGuard(
        agent,
        "spill",
        has_thread=False,
        read_limits=read_limits,
        read_stalled=lambda: None,
        clock=lambda: machine.now,
    )
    for _ in range(20):
        assert not guard.is_short(MIB)
    guard.stop()
    # The group has 140 spare MiB, so a memory asks after 17.5 MiB. The first call was that of the constructor.
    assert len(asked) == 2


def test_the_agent_counts_added_transitions_and_ignores_closed_memories(agent: Agent) -> None:
    space = spaces.Box(-1, 1, (2,), np.float32)
    with ReplayMemory(CAMERA, space, 100) as memory, ReplayMemory(CAMERA, space, 100) as other:
        fill(memory, 7)
        other.close()
        agent.publish()
        report = read_agent_report(agent.pid)
        assert report is not None
        assert (report.step or 0) >= 7  # Memories of other tests may still be there.


@pytest.mark.parametrize(
    ("on_pressure", "settings", "named"),
    [("pray", {}, "on_pressure"), ("warn", {"pressure_at": 2.0}, "pressure_at"), ("checkpoint", {}, "checkpoint")],
)
def test_invalid_arguments_of_the_guard_are_refused(
    agent: Agent, on_pressure: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        Machine().guard(agent, on_pressure, **settings)

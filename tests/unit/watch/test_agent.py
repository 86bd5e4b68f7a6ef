"""The agent: what it publishes about its process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory
from holdall.tools.watch.agent import Agent
from holdall.tools.watch.exchange import AgentReport, read_agent_report


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Make an agent that publishes only when a test asks for it."""
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    agent = Agent(interval_s=1000.0)
    yield agent
    agent.stop()


def publish(agent: Agent) -> AgentReport:
    agent.publish()
    report = read_agent_report(agent.pid)
    assert report is not None
    return report


def test_a_name_is_dropped_with_its_array(agent: Agent) -> None:
    array = np.zeros(1000)
    agent.track("features", array, None)
    assert "features" in {region.name for region in publish(agent).regions}
    del array
    assert "features" not in {region.name for region in publish(agent).regions}


def test_an_array_that_takes_over_a_name_while_the_agent_looks_keeps_it(agent: Agent) -> None:
    """The agent found that the old array was gone, and deleted the name of the new one."""
    old = np.zeros(1000)
    new = np.zeros(2000)
    trigger = np.zeros(10)

    def track_new_array() -> float:
        agent.track("features", new, None)
        return 1.0

    agent.track("trigger", trigger, track_new_array)  # The agent calls it before it looks at `features`.
    agent.track("features", old, None)
    del old
    publish(agent)
    agent.track("trigger", trigger, None)
    assert {region.name: region.nbytes for region in publish(agent).regions}["features"] == new.nbytes


def test_a_memory_that_spills_is_reported_with_the_free_space_of_its_disk(agent: Agent, tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 12)
    space = spaces.Box(0, 255, (3, 64, 64), np.uint8)
    with ReplayMemory(space, spaces.Discrete(2), 100, budget="64MiB", spill_dir=folder):
        report = publish(agent)
        assert report.disk_free is not None
        assert report.disk_free > 0

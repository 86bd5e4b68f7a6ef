"""The regions and the sizes that an agent reports: arrays, memories, networks."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory, RolloutMemory
from holdall._native import get_heap_bytes
from holdall.memory_registry import MEMORIES
from holdall.tools.watch.agent import Agent
from holdall.tools.watch.exchange import Region
from holdall.tools.watch.held import list_array_regions, list_buffer_regions, list_network_regions, measure_memories

CAMERA = spaces.Dict({"camera": spaces.Box(0, 255, (3, 64, 64), np.uint8), "state": spaces.Box(-1, 1, (8,))})


def by_name(regions: Any) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
    for region in regions:
        found.setdefault(region.name, []).append(region)
    return found


@pytest.mark.parametrize("budget", [None, "auto"])
def test_all_fields_that_a_memory_reports_are_measured(budget: str | None) -> None:
    generator = np.random.default_rng(0)
    no = np.zeros(1, np.bool_)
    with ReplayMemory(CAMERA, spaces.Box(-1, 1, (2,)), 300, budget=budget) as memory:
        for _ in range(300):
            obs = {"camera": generator.integers(0, 8, (1, 3, 64, 64), np.uint8), "state": np.ones((1, 8), np.float32)}
            memory.add(obs, np.zeros((1, 2), np.float32), np.zeros(1), obs, no, no)
        memory.store.wait_idle()
        held = {field.name: field for field in measure_memories([memory])}
        for field in memory.report().fields:
            assert held[f"replay.{field.name}"].nbytes == field.total_bytes
        assert {field.fill for field in held.values()} == {1.0}


def test_all_fields_of_a_rollout_are_measured() -> None:
    rollout = RolloutMemory(CAMERA, spaces.Discrete(3), 16, 2)
    names = {field.name for field in measure_memories([rollout])}
    assert {"rollout.obs.camera", "rollout.obs.state", "rollout.action", "rollout.advantage"} <= names
    rollout.close()
    assert list(measure_memories([rollout])) == []


def test_the_fill_of_a_memory_is_a_share_of_the_transitions_that_its_budget_holds() -> None:
    no = np.zeros(1, np.bool_)
    generator = np.random.default_rng(0)
    with ReplayMemory(CAMERA["camera"], spaces.Discrete(2), 100_000, budget="4MiB") as memory:
        for _ in range(2_000):
            obs = generator.integers(0, 256, (1, 3, 64, 64), np.uint8)
            memory.add(obs, np.zeros(1, np.int64), np.zeros(1), obs, no, no)
        memory.store.wait_idle()
        held = list(measure_memories([memory]))
        assert {field.budget for field in held} == {4 * 2**20}
        assert {field.fill for field in held} == {1.0}, "the budget is full, though 100,000 transitions never fit"


def test_heap_bytes_of_a_memory_are_counted_until_they_are_freed() -> None:
    before = get_heap_bytes()
    memory = ReplayMemory(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 100)
    no = np.zeros(1, np.bool_)
    for tick in range(100):
        row = np.full((1, 3), tick, np.float32)
        memory.add(row, np.zeros(1, np.int64), np.zeros(1), row, no, no)
    assert get_heap_bytes() > before
    memory.close()
    del memory
    gc.collect()
    assert get_heap_bytes() <= before


def test_a_memory_is_listed_until_it_is_deleted() -> None:
    memory = ReplayMemory(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 10)
    assert any(one is memory for one in MEMORIES)
    memory.close()
    del memory
    gc.collect()
    assert not any(isinstance(one, ReplayMemory) and one.capacity == 10 for one in MEMORIES)


def test_arrays_of_other_buffers_are_named_by_attributes_and_filled_by_position() -> None:
    buffer = SimpleNamespace(
        buffer_size=10, pos=4, full=False, observations={"camera": np.zeros((10, 4))}, rewards=np.zeros(10), name="x"
    )
    found = by_name(list_buffer_regions("replay", buffer))
    assert set(found) == {"replay.observations.camera", "replay.rewards"}
    assert found["replay.rewards"][0].fill == 0.4
    buffer.full = True
    assert by_name(list_buffer_regions("replay", buffer))["replay.rewards"][0].fill == 1.0


def test_networks_are_split_into_parameters_gradients_and_optimizer_state() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(100, 50)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    found = by_name(list_network_regions([module], [optimizer]))
    sizes = {name: sum(region.nbytes for region in regions) for name, regions in found.items()}
    assert sizes["parameters"] == sizes["gradients"] == 4 * (100 * 50 + 50)
    assert sizes["optimizer state"] == 2 * sizes["parameters"] + 2 * 4  # and a count of steps for each


def test_the_thread_of_the_agent_does_not_read_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch replaces gradients without the GIL, so a thread that reads them can crash the training."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("HOLDALL_RUNTIME_DIR", str(tmp_path / "runtime"))
    readers = set()

    class Parameter(torch.nn.Parameter):  # type: ignore[name-defined,misc]
        @property
        def grad(self) -> None:
            readers.add(threading.current_thread().name)

    module = torch.nn.Module()
    module.weight = Parameter(torch.ones(10))
    agent = Agent(interval_s=0.01, networks_interval_s=0.0)
    try:
        agent.follow_network(module)
        published = agent.next_publish
        while agent.next_publish == published:  # Until the thread has published.
            time.sleep(0.01)
        assert readers == set()
        agent.publish()
        assert readers == {threading.current_thread().name}
    finally:
        agent.stop()


def test_a_view_has_the_addresses_of_its_base() -> None:
    whole = np.zeros(1000)
    (region,) = list_array_regions("buffers", "part", whole[100:200])
    assert (region.address, region.nbytes) == (whole.ctypes.data, whole.nbytes)

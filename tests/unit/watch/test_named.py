from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import ReplayMemory, RolloutMemory
from holdall import report as tracked
from holdall.tools.watch.agent import (
    array_regions,
    buffer_regions,
    memory_regions,
    network_regions,
)
from holdall.tools.watch.agent_files import Region

CAMERA = spaces.Dict({"camera": spaces.Box(0, 255, (3, 64, 64), np.uint8), "state": spaces.Box(-1, 1, (8,))})


def by_name(regions: Any) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
    for region in regions:
        found.setdefault(region.name, []).append(region)
    return found


@pytest.mark.parametrize("budget", [None, "auto"])
def test_a_memory_names_all_that_it_reports(budget: str | None) -> None:
    generator = np.random.default_rng(0)
    no = np.zeros(1, np.bool_)
    with ReplayMemory(CAMERA, spaces.Box(-1, 1, (2,)), 3000, budget=budget) as memory:
        for _ in range(3000):
            obs = {"camera": generator.integers(0, 8, (1, 3, 64, 64), np.uint8), "state": np.ones((1, 8), np.float32)}
            memory.add(obs, np.zeros((1, 2), np.float32), np.zeros(1), obs, no, no)
        memory.drain()
        found = by_name(memory_regions([memory]))
        for field in memory.report().fields:
            held = sum(region.nbytes for region in found[f"replay.{field.name}"])
            assert held >= field.total_bytes, field.name
        assert {region.fill for regions in found.values() for region in regions} == {1.0}
        arenas = [region for region in found["replay.obs.camera"] if region.nbytes > 2**20]
        assert arenas
        assert (budget is None) or not any(region.in_heap for region in arenas), "arenas are mapped, not allocated"


def test_a_rollout_names_its_fields() -> None:
    rollout = RolloutMemory(CAMERA, spaces.Discrete(3), 16, 2)
    found = by_name(memory_regions([rollout]))
    assert {"rollout.obs.camera", "rollout.obs.state", "rollout.action", "rollout.advantage"} <= set(found)
    rollout.close()
    assert by_name(memory_regions([rollout])) == {}


def test_memories_are_listed_as_long_as_they_live() -> None:
    memory = ReplayMemory(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), 10)
    assert any(one is memory for one in list(tracked.LIVING))
    memory.close()
    del memory
    gc.collect()
    assert not any(isinstance(one, ReplayMemory) and one.capacity == 10 for one in list(tracked.LIVING))


def test_plain_buffers_are_named_by_their_attributes_and_filled_by_their_position() -> None:
    buffer = SimpleNamespace(
        buffer_size=10, pos=4, full=False, observations={"camera": np.zeros((10, 4))}, rewards=np.zeros(10), name="x"
    )
    found = by_name(buffer_regions("replay", buffer))
    assert set(found) == {"replay.observations.camera", "replay.rewards"}
    assert found["replay.rewards"][0].fill == 0.4
    buffer.full = True
    assert by_name(buffer_regions("replay", buffer))["replay.rewards"][0].fill == 1.0


def test_modules_and_optimizers_are_told_by_what_they_hold() -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(100, 50)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    found = by_name(network_regions([module], [optimizer]))
    sizes = {name: sum(region.nbytes for region in regions) for name, regions in found.items()}
    assert sizes["parameters"] == sizes["gradients"] == 4 * (100 * 50 + 50)
    assert sizes["optimizer state"] == 2 * sizes["parameters"] + 2 * 4  # and a count of steps for each


def test_a_view_is_named_by_the_memory_that_it_looks_into() -> None:
    whole = np.zeros(1000)
    (region,) = array_regions("part", whole[100:200], None)
    assert (region.address, region.nbytes) == (whole.ctypes.data, whole.nbytes)

"""Batches on a device while the memory packs columns, and seals slices in groups: the bits of those in arrays.

On the CPU the host does what kernels do; on a CUDA device they do it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import NStep, ReplayMemory, Uniform
from holdall.delivery import device
from holdall.delivery.batches import Delivery
from holdall.delivery.device import DeviceStream
from holdall.storage import codec_choice, rings, sealer, segment
from holdall.testing import assert_same_bits

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SPACE = spaces.Dict(
    image=spaces.Box(0, 255, (4, 40, 40), np.uint8), state=spaces.Box(-np.inf, np.inf, (20,), np.float32)
)
LANES = 2


class Launching(DeviceStream):
    """A device that is the host, and whose kernels are loops of C."""

    launches_here = True


@pytest.fixture(params=DEVICES)
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name a device; pack short runs, and seal short segments two slices together."""
    if request.param == "cpu":
        monkeypatch.setattr(Delivery, "is_remote", property(lambda self: self.torch_device is not None))
        monkeypatch.setattr(device, "DeviceStream", Launching)
    monkeypatch.setattr(rings, "_RUN_BYTES", 4_096)
    monkeypatch.setattr(rings, "_LEAST_TICKS", 8)
    monkeypatch.setattr(segment, "SEGMENT_BYTES", 60_000)
    chosen = codec_choice.choose

    def in_groups(*arguments: Any, **options: Any) -> Any:
        return replace(chosen(*arguments, **options), dictionary=None, group=2)

    monkeypatch.setattr(sealer, "choose", in_groups)
    return str(request.param)


def steps(count: int) -> Any:
    """Yield stacks of frames that change little, and states half of whose columns never do."""
    generator = np.random.default_rng(0)
    film = np.repeat(generator.integers(0, 255, (1, LANES, 40, 40), np.uint8), count + 4, axis=0)
    film[:, :, :3, :3] = generator.integers(0, 255, (count + 4, LANES, 3, 3), np.uint8)
    states = generator.standard_normal((count + 1, LANES, 20), np.float32)
    states[:, :, 5:] = 2.5

    def observed(t: int) -> dict[str, NDArray[Any]]:
        return {"image": np.ascontiguousarray(film[t : t + 4].swapaxes(0, 1)), "state": states[t]}

    for t in range(count):
        ended = generator.random((2, LANES)) < 0.03
        yield observed(t), generator.integers(0, 3, LANES), np.ones(LANES, np.float32), observed(t + 1), *ended


def compare(where: dict[str, Any], budget: str | None, sampler: Any) -> list[ReplayMemory]:
    """Feed two memories alike, and compare their batches as they grow, pack, seal and evict."""
    memories = [
        ReplayMemory(SPACE, spaces.Discrete(3), 300 * LANES, LANES, seed=0, budget=budget, sampler=sampler(), **how)
        for how in (where, {})
    ]
    for t, step in enumerate(steps(500)):
        for memory in memories:
            memory.add(*step)
        if t % 20 == 19:
            for memory in memories:
                memory.drain()
            assert_same_bits(memories[0].sample(20), memories[1].sample(20))
    for count in (64, 64, 200):
        assert_same_bits(memories[0].sample(count), memories[1].sample(count))
    return memories


@pytest.mark.parametrize(
    ("where", "budget", "sampler"),
    [("device", "auto", Uniform), ("device", None, lambda: NStep(3, 0.9)), ("store_device", None, Uniform)],
    ids=["raw", "sealed", "kept on the device"],
)
def test_packed_columns_and_groups_of_slices_reach_a_device(
    there: str, where: str, budget: str | None, sampler: Any
) -> None:
    found = compare({where: there}, budget, sampler)[0].report().fields
    by_name = {field.name: field.finding for field in found}
    assert "15 never change" in by_name["obs.state"]
    assert budget == "auto" or "2 together" in by_name["obs.image"]

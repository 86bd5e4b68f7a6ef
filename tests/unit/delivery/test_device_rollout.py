"""Rollouts that are born on a device give the minibatches of rollouts on the host, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall.delivery import Delivery, DeviceRollout
from holdall.schema import Schema

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPACE = spaces.Dict({"image": spaces.Box(0, 255, (12, 12, 3), np.uint8), "state": spaces.Box(-9, 9, (3,), np.float32)})
ACTION = spaces.Box(-1, 1, (2,), np.float32)
EXTRAS = {"hidden": spaces.Box(-9, 9, (4,), np.float32)}
LANES, STEPS = 6, 20


def steps(seed: int, *, cuts: float = 0.2, invalid: bool = False) -> list[dict[str, Any]]:
    """Make a rollout's steps, with episodes that end and are cut in different lanes."""
    draw = np.random.default_rng(seed)

    def observation() -> dict[str, Any]:
        image = draw.integers(0, 255, (LANES, 12, 12, 3)).astype(np.uint8)
        return {"image": image, "state": draw.random((LANES, 3)).astype(np.float32)}

    return [
        {
            "obs": observation(), "action": draw.random((LANES, 2)).astype(np.float32),
            "reward": draw.standard_normal(LANES).astype(np.float32), "terminated": draw.random(LANES) < 0.1,
            "truncated": draw.random(LANES) < cuts, "value": draw.standard_normal(LANES).astype(np.float32),
            "log_prob": draw.standard_normal(LANES).astype(np.float32),
            "extras": {"hidden": draw.random((LANES, 4)).astype(np.float32)}, "final_obs": observation(),
            "valid": draw.random(LANES) > 0.2 if invalid else None,
        }
        for _ in range(STEPS)
    ]  # fmt: skip


def there(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: there(part, device) for name, part in value.items()}
    return None if value is None else torch.from_numpy(value).to(device)


def equal(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for name, part in expected.items():
            equal(got[name], part)
        return
    found = got.cpu().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    assert found.dtype == expected.dtype
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


def fed_on_the_host(rows: list[dict[str, Any]]) -> holdall.RolloutMemory:
    memory = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, seed=3)
    for row in rows:
        memory.add(**row)
    return memory


def test_advantages_on_a_device_are_those_of_the_host() -> None:
    rows = steps(0)
    on_host = fed_on_the_host(rows)
    rollout = DeviceRollout(Delivery("cpu", []), Schema.of(SPACE, ACTION, EXTRAS, LANES), STEPS)
    for i, row in enumerate(rows):
        rollout.add(i, **there(row, "cpu"))
    equal(rollout.final_obs(), on_host.final_obs())
    count = len(on_host.final_obs()["state"])
    final = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    last = np.random.default_rng(2).standard_normal(LANES).astype(np.float32)
    on_host.finish(last, 0.97, 0.9, final)
    rollout.finish(STEPS, torch.from_numpy(last), 0.97, 0.9, torch.from_numpy(final))
    batch = next(on_host.minibatches(1000))
    names = ["obs", "obs", "action", "extras", "reward", "value", "log_prob", "advantage", "returns"]
    picked = rollout.gather(batch.ids, padded=False)
    for name, got in zip(names[4:], picked[4:], strict=True):
        equal(got, getattr(batch, name))
    equal(picked[0], batch.obs["image"])


def test_a_cut_episode_without_its_final_observation_is_refused_at_the_end() -> None:
    rollout = DeviceRollout(Delivery("cpu", []), Schema.of(SPACE, ACTION, EXTRAS, LANES), STEPS)
    row = there(steps(0, cuts=1.0)[0], "cpu") | {"final_obs": None, "terminated": torch.zeros(LANES, dtype=torch.bool)}
    rollout.add(0, **row)
    with pytest.raises(holdall.ArgumentError, match="final_obs"):
        rollout.finish(1, torch.zeros(LANES), 0.99, 0.95, None)


@on_cuda
@pytest.mark.parametrize("invalid", [False, True])
def test_minibatches_and_sequences_are_those_of_the_host(invalid: bool) -> None:
    memory = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, seed=3, device="cuda")
    on_host: holdall.RolloutMemory | None = None
    for rollout in range(3):
        rows = steps(rollout, invalid=invalid)
        before, on_host = on_host, fed_on_the_host(rows)
        if before is not None:
            on_host._generator = before._generator  # the order of minibatches goes on
        for row in rows:
            memory.add(**there(row, "cuda"))
        equal(memory.final_obs(), on_host.final_obs())
        final = np.random.default_rng(1).standard_normal(len(on_host.final_obs()["state"])).astype(np.float32)
        last = np.random.default_rng(2).standard_normal(LANES).astype(np.float32)
        on_host.finish(last, 0.97, 0.9, final)
        memory.finish(torch.from_numpy(last).cuda(), 0.97, 0.9, torch.from_numpy(final).cuda())
        assert len(memory) == len(on_host)
        pairs = list(zip(memory.minibatches(32, 2), on_host.minibatches(32, 2), strict=True))
        pairs += list(zip(memory.sequences(32, length=5), on_host.sequences(32, length=5), strict=True))
        for got, expected in pairs:
            assert got.ids.tolist() == expected.ids.tolist()
            assert got.reward.device.type == "cuda"
            for name in ("obs", "action", "extras", "reward", "value", "log_prob", "advantage", "returns"):
                equal(getattr(got, name), getattr(expected, name))
            if expected.mask is not None:
                equal(got.mask, expected.mask)
        memory.reset()


@on_cuda
def test_adding_steps_waits_for_nothing(no_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    memory = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, device="cuda")
    rows = [there(row, "cuda") for row in steps(0)]
    memory.add(**rows[0])
    with no_waiting():
        for row in rows[1:3]:
            memory.add(**row)

"""Rollouts on a device have the rows, the advantages and the minibatches of rollouts on the host, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdall
from holdall.device.rollout import DeviceRollout
from holdall.rollout_step import RolloutStep
from holdall.schema import Schema

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPACE = spaces.Dict({"image": spaces.Box(0, 255, (12, 12, 3), np.uint8), "state": spaces.Box(-9, 9, (3,), np.float32)})
ACTION = spaces.Box(-1, 1, (2,), np.float32)
EXTRAS = {"hidden": spaces.Box(-9, 9, (4,), np.float32)}
LANES = 6
STEPS = 20
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def make_steps(seed: int, *, cuts: float = 0.2, invalid: bool = False) -> list[dict[str, Any]]:
    """Return the steps of a rollout, with episodes that end and are cut in different lanes."""
    draw = np.random.default_rng(seed)

    def observe() -> dict[str, Any]:
        image = draw.integers(0, 255, (LANES, 12, 12, 3)).astype(np.uint8)
        return {"image": image, "state": draw.random((LANES, 3)).astype(np.float32)}

    return [
        {
            "obs": observe(),
            "action": draw.random((LANES, 2)).astype(np.float32),
            "reward": draw.standard_normal(LANES).astype(np.float32),
            "terminated": draw.random(LANES) < 0.1,
            "truncated": draw.random(LANES) < cuts,
            "value": draw.standard_normal(LANES).astype(np.float32),
            "log_prob": draw.standard_normal(LANES).astype(np.float32),
            "extras": {"hidden": draw.random((LANES, 4)).astype(np.float32)},
            "final_obs": observe(),
            "valid": draw.random(LANES) > 0.2 if invalid else None,
        }
        for _ in range(STEPS)
    ]


def send(value: Any, device: str) -> Any:
    if isinstance(value, dict):
        return {name: send(part, device) for name, part in value.items()}
    return None if value is None else torch.from_numpy(value).to(device)


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for name, part in expected.items():
            assert_equal(got[name], part)
        return
    found = got.cpu().numpy() if isinstance(got, torch.Tensor) else np.asarray(got)
    assert found.dtype == expected.dtype
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


def fill_on_host(rows: list[dict[str, Any]]) -> holdall.RolloutMemory:
    memory = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, seed=3)
    for row in rows:
        memory.add(**row)
    return memory


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_rollout(device: str) -> DeviceRollout:
    return DeviceRollout(Schema.of(SPACE, ACTION, EXTRAS, LANES), STEPS, torch.device(device))


@pytest.mark.parametrize(("cuts", "count"), [(0.2, STEPS), (0.9, STEPS), (0.2, 7)])
def test_advantages_and_rows_are_those_of_the_host(device: str, cuts: float, count: int) -> None:
    rollout = make_rollout(device)
    for seed in range(3):
        rows = make_steps(seed, cuts=cuts)[:count]
        on_host = fill_on_host(rows)
        for i, row in enumerate(rows):
            rollout.add(i, RolloutStep(**send(row, device)))
        assert_equal(rollout.final_obs(count), on_host.final_obs())
        final_count = len(on_host.final_obs()["state"])
        final = np.random.default_rng(1).standard_normal(final_count).astype(np.float32)
        last = np.random.default_rng(2).standard_normal(LANES).astype(np.float32)
        on_host.finish(last, 0.97, 0.9, final)
        rollout.finish(count, send(last, device), 0.97, 0.9, send(final, device))
        for batch in on_host.minibatches(50):
            picked = rollout.gather(batch.ids, padded=False)
            expected = [*batch.obs.values(), batch.action, *batch.extras.values(), batch.reward]
            expected += [batch.value, batch.log_prob, batch.advantage, batch.returns]
            for got, array in zip(picked, expected, strict=True):
                assert_equal(got, array)
        rollout.reset()


def test_a_place_before_the_first_step_gives_zeros(device: str) -> None:
    rollout = make_rollout(device)
    for i, row in enumerate(make_steps(0)):
        rollout.add(i, RolloutStep(**send(row, device)))
    rollout.finish(
        STEPS,
        torch.zeros(LANES, device=device),
        0.99,
        0.95,
        torch.zeros(len(rollout.final_obs(STEPS)["state"]), device=device),
    )
    *picked, mask = rollout.gather(np.array([3, -1, 5]), padded=True)
    assert_equal(mask, np.array([True, False, True]))
    for tensor in picked:
        assert not tensor[1].any()
        assert tensor[0].any()


def test_a_step_that_is_added_twice_counts_once(device: str) -> None:
    """A loop does this after an interrupt."""
    rollout = make_rollout(device)
    rows = make_steps(0, cuts=0.5)
    for i, row in enumerate(rows):
        rollout.add(i, RolloutStep(**send(make_steps(1, cuts=0.5)[i], device)))
        rollout.add(i, RolloutStep(**send(row, device)))
    assert_equal(rollout.final_obs(STEPS), fill_on_host(rows).final_obs())


@pytest.mark.parametrize(
    ("argument", "change", "says"),
    [
        ("reward", lambda v: v.double(), "reward has dtype torch.float64"),
        ("action", lambda v: v[:, :1], r"action has shape \(6, 1\)"),
        ("value", lambda v: v.half(), "value has dtype torch.float16"),
        ("log_prob", lambda v: v[:2], r"log_prob has shape \(2,\)"),
        ("truncated", lambda v: v.int(), "truncated has dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(device: str, argument: str, change: Any, says: str) -> None:
    rollout = make_rollout(device)
    rows = make_steps(0)
    rollout.add(0, RolloutStep(**send(rows[0], device)))
    row = send(rows[1], device)
    with pytest.raises(holdall.ArgumentError, match=says):
        rollout.add(1, RolloutStep(**row | {argument: change(row[argument])}))


def test_a_rollout_without_room_on_the_device_names_its_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory.")

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(holdall.ArgumentError, match=rf"^num_steps \({STEPS}\) .* needs more memory than {device}"):
        make_rollout(device)


def test_a_truncated_episode_without_its_final_observation_is_refused_at_the_end(device: str) -> None:
    rollout = make_rollout(device)
    row = send(make_steps(0, cuts=1.0)[0], device) | {"final_obs": None}
    rollout.add(0, RolloutStep(**row | {"terminated": torch.zeros(LANES, dtype=torch.bool, device=device)}))
    with pytest.raises(holdall.ArgumentError, match="final_obs"):
        rollout.finish(1, torch.zeros(LANES, device=device), 0.99, 0.95, None)


@on_cuda
@pytest.mark.parametrize("invalid", [False, True])
def test_minibatches_and_sequences_are_those_of_the_host(invalid: bool) -> None:
    memory = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, seed=3, device="cuda")
    on_host = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, seed=3)
    for rollout in range(3):
        rows = make_steps(rollout, invalid=invalid)
        for row in rows:
            on_host.add(**row)
        for row in rows:
            memory.add(**send(row, "cuda"))
        assert_equal(memory.final_obs(), on_host.final_obs())
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
                assert_equal(getattr(got, name), getattr(expected, name))
            if expected.mask is not None:
                assert_equal(got.mask, expected.mask)
        memory.reset()
        on_host.reset()


@on_cuda
def test_adding_steps_does_not_wait_for_the_device(forbid_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    memory = holdall.RolloutMemory(SPACE, ACTION, STEPS, LANES, extras=EXTRAS, device="cuda")
    rows = [send(row, "cuda") for row in make_steps(0)]
    memory.add(**rows[0])
    with forbid_waiting():
        for row in rows[1:3]:
            memory.add(**row)

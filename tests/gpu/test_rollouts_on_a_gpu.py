"""Rollouts on a GPU: the bits of the host's arrays, no device memory beyond the tensors, no waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from holdall import RolloutBatch, RolloutMemory
from holdall.elegantrl import TrajectoryBuffer
from holdall.testing import LeafPlan, Stream, assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]

FRAMES = spaces.Dict({"image": spaces.Box(0, 255, (4, 40, 40), np.uint8), "vector": spaces.Box(-1, 1, (9,))})
STEPS = 96
LANES = 3


def make_trajectories(lengths: list[int], seed: int, state: tuple[int, ...]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            torch.randint(0, 256, (steps, *state), generator=generator, dtype=torch.uint8),
            torch.randn((steps,), generator=generator),
            torch.rand((steps,), generator=generator) < 0.9,
            torch.randn((steps, 3), generator=generator),
        ]
        for steps in lengths
    ]


@pytest.mark.parametrize("slot_bytes", [1_000, 1 << 16, 8 << 20])
@pytest.mark.parametrize("lengths", [[5], [40, 0, 300], [1_024, 1_024, 1_024]], ids=str)
def test_an_update_has_the_bits_of_torch_cat(
    lengths: list[int], slot_bytes: int, forbid_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    """Small items share a slot, and large ones need several. Torch raises an error if a call waits for the device."""
    buffer = TrajectoryBuffer("cuda", slot_bytes=slot_bytes)
    for seed in range(3):
        given = make_trajectories(lengths, seed, (12, 11))
        expected = [torch.cat(item) for item in map(list, zip(*given, strict=True))]
        with forbid_waiting():
            steps, mean = buffer.update_buffer(given)
        assert (steps, mean) == (len(expected[1]), expected[1].mean().item())
        assert all(
            ours.is_cuda and torch.equal(ours.cpu(), plain) for ours, plain in zip(buffer, expected, strict=True)
        )


def test_an_update_does_not_overwrite_copies_of_earlier_updates() -> None:
    """The device is busy, so the copies of several updates wait in its queue."""
    buffer = TrajectoryBuffer("cuda", slot_bytes=1 << 16)
    busy = torch.randn(4_096, 4_096, device="cuda")
    given = [make_trajectories([500, 700], seed, (12, 11)) for seed in range(12)]
    kept = []
    for traj_list in given:
        for _ in range(4):
            busy = busy @ busy
            busy /= busy.norm()
        buffer.update_buffer(traj_list)
        kept.append([tensor.clone() for tensor in buffer])
    for traj_list, tensors in zip(given, kept, strict=True):
        expected = [torch.cat(item) for item in map(list, zip(*traj_list, strict=True))]
        assert all(torch.equal(ours.cpu(), plain) for ours, plain in zip(tensors, expected, strict=True))


def test_trajectories_on_the_device_are_concatenated() -> None:
    buffer = TrajectoryBuffer("cuda")
    given = [[tensor.cuda() for tensor in trajectory] for trajectory in make_trajectories([30, 50], 0, (5,))]
    given[0][3], given[1][3] = given[0][3].cpu(), given[1][3].cpu()
    buffer.update_buffer(given)
    expected = [torch.cat(item).cpu() for item in map(list, zip(*given, strict=True))]
    assert all(torch.equal(ours.cpu(), plain) for ours, plain in zip(buffer, expected, strict=True))


def test_trajectories_on_the_device_are_copied_to_a_buffer_on_the_host() -> None:
    buffer = TrajectoryBuffer("cpu")
    for seed in range(2):
        given = make_trajectories([30, 0, 50], seed, (5,))
        expected = [torch.cat(item) for item in map(list, zip(*given, strict=True))]
        steps, _ = buffer.update_buffer([[tensor.cuda() for tensor in trajectory] for trajectory in given])
        assert steps == 80
        assert all(torch.equal(ours, plain) for ours, plain in zip(buffer, expected, strict=True))


def test_a_hundred_updates_allocate_nothing_on_the_device() -> None:
    buffer = TrajectoryBuffer("cuda")
    given = make_trajectories([1_024] * 3, 0, (84, 84, 3))
    buffer.update_buffer(given)
    payload = sum(tensor.nbytes for tensor in buffer)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    for _ in range(100):
        buffer.update_buffer(given)
    after = torch.cuda.memory_stats()
    assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
    assert after["allocated_bytes.all.peak"] == before["allocated_bytes.all.current"]
    assert buffer.nbytes <= payload + len(buffer) * 256


def collect(memory: RolloutMemory, stream: Stream) -> None:
    generator = np.random.default_rng(0)
    memory.reset()
    cut = 0
    for _ in range(STEPS):
        tick = stream.tick()
        value, log_prob = generator.standard_normal((2, LANES), np.float32)
        flags = (tick.terminated, tick.truncated)
        memory.add(tick.obs, tick.action, tick.reward, *flags, value, log_prob, final_obs=tick.next_obs)
        cut += int(tick.truncated.sum())
    memory.finish(np.zeros(LANES, np.float32), final_values=np.zeros(cut, np.float32))


def make_stream() -> Stream:
    return Stream(FRAMES, spaces.Discrete(4), LANES, plans=[LeafPlan(axis=0, padding="first"), LeafPlan()], seed=3)


def list_fields(batch: RolloutBatch) -> dict[str, Any]:
    named = {name: getattr(batch, name) for name in RolloutBatch.__slots__}
    return {name: value for name, value in named.items() if value is not None}


def make_memories(**settings: Any) -> tuple[RolloutMemory, RolloutMemory]:
    there = RolloutMemory(FRAMES, spaces.Discrete(4), STEPS, LANES, seed=0, device="cuda", **settings)
    here = RolloutMemory(FRAMES, spaces.Discrete(4), STEPS, LANES, seed=0, device=None, **settings)
    return there, here


@pytest.mark.parametrize("compress", [None, "memory"])
def test_minibatches_on_the_gpu_have_the_bits_of_those_in_arrays(compress: str | None) -> None:
    there, here = make_memories(compress=compress)
    ours = make_stream()
    plain = make_stream()
    with there, here:
        for _ in range(2):
            collect(there, ours)
            collect(here, plain)
            pairs = [*zip(there.minibatches(50, 2), here.minibatches(50, 2), strict=True)]
            pairs += [*zip(there.sequences(64), here.sequences(64), strict=True)]
            assert all(batch.obs["image"].is_cuda and batch.advantage.is_cuda for batch, _ in pairs)
            for batch, expected in pairs:
                assert_same_bits(list_fields(batch), list_fields(expected))
            assert_same_bits(there.final_obs(), here.final_obs())


def test_updates_of_a_memory_take_no_new_device_memory() -> None:
    """A minibatch belongs to the caller. Its tensors use memory that torch has reserved before."""
    there, _ = make_memories()
    given = make_stream()
    with there:
        for _ in range(2):
            collect(there, given)
            for batch in there.minibatches(64):
                del batch
        before = torch.cuda.memory_stats()
        for _ in range(20):
            for batch in there.minibatches(64):
                del batch
        after = torch.cuda.memory_stats()
    assert after["segment.all.allocated"] == before["segment.all.allocated"]
    assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"]

"""Batches on a GPU: the bits that the memory gives as arrays, as tensors there."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.testing import assert_same_bits

pytestmark = pytest.mark.gpu

OBSERVATIONS = spaces.Dict({"image": spaces.Box(0, 255, (4, 40, 40), np.uint8), "vector": spaces.Box(-1, 1, (9,))})


def filled(device: str | None, budget: str | None) -> holdall.ReplayMemory:
    """Fill a memory with frame stacks and vectors, always the same ones."""
    memory = holdall.ReplayMemory(
        OBSERVATIONS, spaces.Discrete(3), capacity=2_000, num_envs=2, device=device, budget=budget, seed=0
    )
    generator = np.random.default_rng(0)
    frames = generator.integers(0, 4, (1_004, 2, 40, 40), np.uint8)
    vectors = generator.standard_normal((1_001, 2, 9), np.float32)
    for t in range(1_000):
        obs, next_obs = (
            {"image": np.ascontiguousarray(frames[at : at + 4].swapaxes(0, 1)), "vector": vectors[at]}
            for at in (t, t + 1)
        )
        ended = generator.random((2, 2)) < 0.02
        reward = generator.standard_normal(2, np.float32)
        memory.add(obs, generator.integers(0, 3, 2), reward, next_obs, *ended)
    memory.drain()
    return memory


@pytest.mark.parametrize("budget", ["auto", None])
def test_a_batch_on_the_gpu_has_the_bits_of_one_in_arrays(budget: str | None) -> None:
    """Raw and sealed: same seed, same draws, same bits, and every tensor on the device."""
    with filled("cuda", budget) as there, filled(None, budget) as here:
        for _ in range(20):
            batch, expected = there.sample(256), here.sample(256)
            assert batch.obs["image"].is_cuda
            assert batch.reward.is_cuda
            assert batch.weights.is_cuda
            assert_same_bits(batch, expected)

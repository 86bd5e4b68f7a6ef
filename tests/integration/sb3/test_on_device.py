"""Samples on a device. In these tests the CPU is the device."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common import buffers

import holdall.sb3
from holdall import ArgumentError
from holdall.sb3.batch_path import BatchPath

OBSERVATIONS = spaces.Dict(
    {"camera": spaces.Box(0, 255, (3, 40, 40), np.uint8), "state": spaces.Box(-9, 9, (7,), np.float32)}
)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


class DeliveredBuffer(holdall.sb3.ReplayBuffer):
    """A buffer that delivers batches to the CPU as to a GPU."""

    def _choose_path(self, env: Any) -> BatchPath:
        return BatchPath.DEVICE


class DeliveredPriorities(holdall.sb3.PrioritizedReplayBuffer):
    """A prioritized buffer that delivers batches to the CPU as to a GPU."""

    def _choose_path(self, env: Any) -> BatchPath:
        return BatchPath.DEVICE


def fill(*made: Any, steps: int = 150) -> None:
    """Add the same steps to all buffers. Some episodes terminate, and some are truncated."""
    draw = np.random.default_rng(0)

    def observe() -> dict[str, Any]:
        return {
            "camera": draw.integers(0, 255, (2, 3, 40, 40), np.uint8),
            "state": draw.standard_normal((2, 7), np.float32),
        }

    obs = observe()
    for _ in range(steps):
        following = observe()
        action = draw.uniform(-1, 1, (2, 2)).astype(np.float32)
        reward = draw.standard_normal(2, np.float32)
        done = draw.random(2) < 0.1
        infos = [{"TimeLimit.truncated": bool(ended and draw.random() < 0.5)} for ended in done]
        for buffer in made:
            buffer.add(obs, following, action, reward, done, infos)
        obs = following


def assert_same_batch(mine: Any, theirs: Any) -> None:
    for name in ("observations", "actions", "next_observations", "dones", "rewards"):
        ours = getattr(mine, name)
        other = getattr(theirs, name)
        pairs = [(ours[key], other[key]) for key in other] if isinstance(other, dict) else [(ours, other)]
        for here, there in pairs:
            assert (here.dtype, here.shape) == (there.dtype, there.shape), name
            assert torch.equal(here, there), name


def make_two(**how: Any) -> tuple[Any, Any]:
    mine = DeliveredBuffer(200, OBSERVATIONS, ACTION, device="cpu", n_envs=2, **how)
    theirs = buffers.DictReplayBuffer(200, OBSERVATIONS, ACTION, device="cpu", n_envs=2)
    fill(mine, theirs)
    return mine, theirs


def draw(buffer: Any, sizes: list[int]) -> list[Any]:
    np.random.seed(0)  # noqa: NPY002  Stable-Baselines3's generator.
    return [buffer.sample(size) for size in sizes]


def test_samples_are_those_of_stable_baselines3() -> None:
    for mine, theirs in zip(*(draw(buffer, [1, 32, 256]) for buffer in make_two()), strict=True):
        assert_same_batch(mine, theirs)


def test_batches_made_ahead_are_those_of_earlier_draws() -> None:
    """They are the same batches as long as no step is added in between."""
    mine, theirs = make_two(prefetch=2)
    for ours, other in zip(draw(mine, [32] * 6), draw(theirs, [32] * 6), strict=True):
        assert_same_batch(ours, other)


def test_batches_made_ahead_have_no_step_that_was_added_after_their_draw() -> None:
    """The next two batches were drawn before the steps were added, and the third one after it."""
    mine, theirs = make_two(prefetch=2)
    np.random.seed(0)  # noqa: NPY002  Stable-Baselines3's generator.
    expected = [theirs.sample(32) for _ in range(3)]
    np.random.seed(0)  # noqa: NPY002  Stable-Baselines3's generator.
    assert_same_batch(mine.sample(32), expected[0])
    fill(mine, theirs, steps=3)
    state = np.random.get_state()  # noqa: NPY002  Stable-Baselines3's generator.
    expected.append(theirs.sample(32))
    np.random.set_state(state)  # noqa: NPY002  Stable-Baselines3's generator.
    for other in expected[1:]:
        assert_same_batch(mine.sample(32), other)


def test_batches_of_another_size_or_memory_are_not_made_ahead() -> None:
    mine, _ = make_two(prefetch=2)
    assert [len(mine.sample(size).rewards) for size in (32, 8, 8, 32)] == [32, 8, 8, 32]
    mine.reset()
    fill(mine, steps=5)
    assert float(mine.sample(4).dones.sum()) >= 0


def test_a_copy_has_no_batches_made_ahead() -> None:
    mine, _ = make_two(prefetch=2)
    mine.sample(8)
    copied = pickle.loads(pickle.dumps(mine))
    assert copied.prefetch == 2
    assert len(copied.sample(8).rewards) == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_priorities_have_weights_and_ids(prefetch: int) -> None:
    buffer = DeliveredPriorities(200, OBSERVATIONS, ACTION, device="cpu", n_envs=2, n_steps=3, prefetch=prefetch)
    fill(buffer)
    for _ in range(3):
        samples = buffer.sample(32)
        assert samples.weights.shape == samples.discounts.shape == (32, 1)
        buffer.update_priorities(samples.ids, np.arange(32.0))


def test_a_wrong_prefetch_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^prefetch \(-1\)"):
        holdall.sb3.ReplayBuffer(200, OBSERVATIONS, ACTION, device="cpu", prefetch=-1)

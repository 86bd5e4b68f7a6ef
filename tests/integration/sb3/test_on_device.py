"""Samples on a device, where the host plays the device: those of Stable-Baselines3, and those made ahead."""

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

OBSERVATIONS = spaces.Dict(
    {"camera": spaces.Box(0, 255, (3, 40, 40), np.uint8), "state": spaces.Box(-9, 9, (7,), np.float32)}
)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


class DeliveredBuffer(holdall.sb3.ReplayBuffer):
    """Delivers batches to the host in the way of a GPU."""

    def _can_deliver(self, env: Any) -> bool:
        return env is None

    def sample(self, batch_size: int, env: Any = None) -> Any:
        return self._deliver_next(batch_size)


class DeliveredPriorities(holdall.sb3.PrioritizedReplayBuffer):
    """The same for priorities."""

    def _can_deliver(self, env: Any) -> bool:
        return env is None


def filled(*made: Any, steps: int = 150) -> None:
    """Add the same steps to all. Some episodes end, and some are cut short."""
    draw = np.random.default_rng(0)

    def observed() -> dict[str, Any]:
        return {
            "camera": draw.integers(0, 255, (2, 3, 40, 40), np.uint8),
            "state": draw.standard_normal((2, 7), np.float32),
        }

    obs = observed()
    for _ in range(steps):
        following = observed()
        action = draw.uniform(-1, 1, (2, 2)).astype(np.float32)
        reward = draw.standard_normal(2, np.float32)
        done = draw.random(2) < 0.1
        infos = [{"TimeLimit.truncated": bool(ended and draw.random() < 0.5)} for ended in done]
        for buffer in made:
            buffer.add(obs, following, action, reward, done, infos)
        obs = following


def same(mine: Any, theirs: Any) -> None:
    for name in ("observations", "actions", "next_observations", "dones", "rewards"):
        ours = getattr(mine, name)
        other = getattr(theirs, name)
        pairs = [(ours[key], other[key]) for key in other] if isinstance(other, dict) else [(ours, other)]
        for here, there in pairs:
            assert (here.dtype, here.shape) == (there.dtype, there.shape), name
            assert torch.equal(here, there), name


def two(**how: Any) -> tuple[Any, Any]:
    mine = DeliveredBuffer(200, OBSERVATIONS, ACTION, device="cpu", n_envs=2, **how)
    theirs = buffers.DictReplayBuffer(200, OBSERVATIONS, ACTION, device="cpu", n_envs=2)
    filled(mine, theirs)
    return mine, theirs


def drawn(buffer: Any, sizes: list[int]) -> list[Any]:
    np.random.seed(0)  # noqa: NPY002  theirs
    return [buffer.sample(size) for size in sizes]


def test_samples_are_those_of_stable_baselines3() -> None:
    for mine, theirs in zip(*(drawn(buffer, [1, 32, 256]) for buffer in two()), strict=True):
        same(mine, theirs)


def test_batches_made_ahead_are_those_of_earlier_draws() -> None:
    """They are drawn in the same order, so all of them are the same ones as long as nothing is added in between."""
    mine, theirs = two(prefetch=2)
    for ours, other in zip(drawn(mine, [32] * 6), drawn(theirs, [32] * 6), strict=True):
        same(ours, other)


def test_what_is_added_later_is_not_in_a_batch_that_is_under_way() -> None:
    """The next two were drawn before. The third is drawn of all that is held then."""
    mine, theirs = two(prefetch=2)
    np.random.seed(0)  # noqa: NPY002  theirs
    expected = [theirs.sample(32) for _ in range(3)]
    np.random.seed(0)  # noqa: NPY002  theirs
    same(mine.sample(32), expected[0])
    filled(mine, theirs, steps=3)
    state = np.random.get_state()  # noqa: NPY002  theirs
    expected.append(theirs.sample(32))
    np.random.set_state(state)  # noqa: NPY002  theirs
    for other in expected[1:]:
        same(mine.sample(32), other)


def test_batches_of_another_size_or_memory_are_drawn_anew() -> None:
    mine, _ = two(prefetch=2)
    assert [len(mine.sample(size).rewards) for size in (32, 8, 8, 32)] == [32, 8, 8, 32]
    mine.reset()
    filled(mine, steps=5)
    assert float(mine.sample(4).dones.sum()) >= 0


def test_a_copy_has_nothing_under_way() -> None:
    mine, _ = two(prefetch=2)
    mine.sample(8)
    copied = pickle.loads(pickle.dumps(mine))
    assert copied.prefetch == 2
    assert len(copied.sample(8).rewards) == 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_priorities_have_weights_and_ids(prefetch: int) -> None:
    buffer = DeliveredPriorities(200, OBSERVATIONS, ACTION, device="cpu", n_envs=2, n_steps=3, prefetch=prefetch)
    filled(buffer)
    for _ in range(3):
        samples = buffer.sample(32)
        assert samples.weights.shape == samples.discounts.shape == (32, 1)
        buffer.update_priorities(samples.ids, np.arange(32.0))


def test_a_prefetch_that_is_no_count_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^prefetch \(-1\)"):
        holdall.sb3.ReplayBuffer(200, OBSERVATIONS, ACTION, device="cpu", prefetch=-1)

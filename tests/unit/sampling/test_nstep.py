"""n-step returns against the oracle: every row of every batch, whatever ends the episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall import (
    ArgumentError,
    NStep,
    Prioritized,
    ReplayMemory,
    Sequence,
    Uniform,
)
from holdall.testing import assert_same_bits
from holdall.testing.oracle import map_leaves, n_step_batch
from holdall.testing.strategies import box

from .against_oracle import feed
from .chi_square import compute_chi_square, draw_ids


@pytest.mark.parametrize("n", [1, 2, 3, 5, 12])
@pytest.mark.parametrize(
    ("lanes", "capacity", "valid_share", "ends"),
    [(1, 1000, 1.0, 0.1), (3, 1000, 1.0, 0.1), (3, 90, 1.0, 0.1), (4, 160, 0.8, 0.05), (2, 60, 1.0, 0.0)],
    ids=["one lane", "filling", "wrapped", "invalid lanes", "no ends but the write head"],
)
def test_every_return_is_the_oracles(n: int, lanes: int, capacity: int, valid_share: float, ends: float) -> None:
    """Rewards, last observations, flags and discounts, at termination, truncation and the write head."""
    memory, oracle = feed(NStep(n, 0.97), lanes, 60, capacity, valid_share, ends)
    for _ in range(3):
        batch = memory.sample(40)
        assert_same_bits(batch, n_step_batch(oracle, batch.ids, n, 0.97))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i8", "?"])
def test_rewards_of_every_dtype_are_summed_as_documented(dtype: str) -> None:
    """The sum has the dtype of the rewards, but at least float32."""
    memory, oracle = feed(NStep(4, 0.9), reward_dtype=dtype, ticks=40)
    batch = memory.sample(50)
    assert batch.reward.dtype == np.result_type(dtype, np.float32)
    assert_same_bits(batch, n_step_batch(oracle, batch.ids, 4, 0.9))


def test_returns_are_the_same_with_compressed_observations() -> None:
    """The first and the last observation of a row are decoded separately."""
    memory, oracle = feed(NStep(3, 0.99), ticks=150, budget=None)
    memory.store.wait_idle()
    batch = memory.sample(60)
    assert_same_bits(batch, n_step_batch(oracle, batch.ids, 3, 0.99))


def test_a_return_ends_at_flags_that_are_set_later() -> None:
    """Some frameworks mark the end of the last episode after they added it."""
    memory, oracle = feed(NStep(5, 0.9), lanes=1, ticks=60, capacity=100, ends=0.0)
    for either in (memory, oracle):
        either.set_flags([20, 40], np.array([True, False]), np.array([False, True]))
    batch = memory.sample(60)
    assert_same_bits(batch, n_step_batch(oracle, batch.ids, 5, 0.9))


def test_a_reward_of_another_episode_never_counts() -> None:
    """An infinite reward of the next episode does not change the return."""
    memory = ReplayMemory(box((1,), "f4"), spaces.Discrete(2), 10, sampler=NStep(3, 0.5))
    for t, reward in enumerate([1.0, 2.0, np.inf, np.nan]):
        obs = np.full((1, 1), t, np.float32)
        flag = np.array([t == 1])
        memory.add(obs, np.zeros(1, np.int64), np.array([reward], np.float32), obs + 1, flag, ~flag & False)
    batch = memory.sample(4)
    rewards = {int(number): float(reward) for number, reward in zip(batch.ids, batch.reward, strict=True)}
    assert rewards.get(0, 2.0) == 2.0
    assert rewards.get(1, 2.0) == 2.0


def test_a_million_first_steps_are_drawn_equally_often() -> None:
    """The draw does not depend on `n`."""
    memory, oracle = feed(NStep(3, 0.99), valid_share=0.8)
    drawn = draw_ids(memory)
    assert 0.7 < compute_chi_square(drawn, oracle.ids, np.ones(len(oracle.ids))) < 1.35


def test_prioritized_returns_are_the_oracles_too() -> None:
    """The rows have the weights of prioritized sampling."""
    memory, oracle = feed(NStep(3, 0.99, by=Prioritized(1.0, 1.0)), valid_share=0.9)
    memory.update_priorities(oracle.ids, np.where(oracle.ids % 2 == 0, 9.0, 1.0))
    batch = memory.sample(100)
    assert np.count_nonzero(batch.ids % 2 == 0) > 70
    assert np.unique(batch.weights) == pytest.approx([1 / 9, 1.0], rel=1e-5)
    expected = n_step_batch(oracle, batch.ids, 3, 0.99)
    for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated", "extras", "discount"):
        assert_same_bits(getattr(batch, name), getattr(expected, name))


def test_tensors_have_the_bits_of_the_arrays() -> None:
    """On a device, every field is a tensor, also the discount."""
    arrays, _ = feed(NStep(3, 0.99))
    tensors, _ = feed(NStep(3, 0.99), device="cpu")
    batch = tensors.sample(30)
    assert hasattr(batch.discount, "detach")
    assert_same_bits(batch, arrays.sample(30))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n": 0}, r"^n \(0\) must be a whole number of at least 1"),
        ({"n": 2.5}, r"^n \(2.5\) must be a whole number"),
        ({"n": 2**62}, r"^n \(4611686018427387904\) must be at most 1000000"),
        ({"gamma": 1.5}, r"^gamma \(1.5\) must be a number from 0 to 1"),
        ({"gamma": float("nan")}, r"^gamma \(nan\) must be a number"),
        ({"by": Sequence(3)}, r"^by \(Sequence\) must be a sampler of single transitions"),
    ],
)
def test_a_wrong_argument_of_nstep_is_refused(given: dict[str, Any], message: str) -> None:
    """The refusal names the argument, its value and the rule."""
    with pytest.raises(ArgumentError, match=message):
        NStep(**{"n": 3, "gamma": 0.9, **given})


def test_priorities_without_a_prioritized_sampler_are_refused() -> None:
    """The error says what to construct."""
    memory, _ = feed(NStep(3, 0.9, by=Uniform()))
    with pytest.raises(ArgumentError, match=r"NStep\(\.\.\., by=Prioritized\(\.\.\.\)\)"):
        memory.update_priorities([200], [1.0])


def test_a_batch_of_returns_owns_its_memory() -> None:
    """First and last observations share no memory, and later batches change neither."""
    memory, _ = feed(NStep(3, 0.9))
    batch = memory.sample(50)
    copies = map_leaves(np.copy, (batch.obs, batch.next_obs))
    for _ in range(20):
        memory.sample(50)
    assert_same_bits((batch.obs, batch.next_obs), copies)

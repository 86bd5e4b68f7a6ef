"""Batches for JAX hold what batches of NumPy arrays hold, where JAX computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall

jax = pytest.importorskip("jax", reason="needs the extra jax")

SPACE = spaces.Dict({"image": spaces.Box(0, 255, (20, 20, 3), np.uint8), "state": spaces.Box(-1, 1, (3,), np.float32)})


def memory(device: str | None, space: Any = SPACE, reward: Any = np.float32, **settings: Any) -> holdall.ReplayMemory:
    made = holdall.ReplayMemory(space, spaces.Discrete(4), 200, 2, device=device, seed=0, **settings)
    draw = np.random.default_rng(0)

    def observation() -> dict[str, Any]:
        return {
            "image": draw.integers(0, 255, (2, 20, 20, 3)).astype(np.uint8),
            "state": draw.random((2, 3)).astype(space["state"].dtype),
        }

    obs = observation()
    for _ in range(60):
        following = observation()
        ended = draw.random(2) < 0.2
        made.add(obs, draw.integers(0, 4, 2), draw.random(2).astype(reward), following, ended, np.zeros(2, np.bool_))
        obs = following
    return made


def leaves(batch: holdall.Batch) -> list[Any]:
    sides = [part for side in (batch.obs, batch.next_obs) for part in side.values()]
    return [*sides, batch.action, batch.reward, batch.terminated, batch.truncated, batch.weights]


@pytest.mark.parametrize("sampler", [None, holdall.NStep(3, 0.9), holdall.Sequence(4)])
def test_the_same_rows_as_arrays_of_jax(sampler: Any) -> None:
    on_jax = memory("jax", sampler=sampler)
    plain = memory(None, sampler=sampler)
    for _ in range(3):
        got = on_jax.sample(16)
        expected = plain.sample(16)
        for mine, theirs in zip(leaves(got), leaves(expected), strict=True):
            assert isinstance(mine, jax.Array)
            assert mine.devices() == {jax.devices()[0]}
            assert np.array_equal(np.asarray(mine), theirs)


def test_a_loader_hands_out_the_same() -> None:
    with memory("jax").loader(8) as mine, memory(None).loader(8) as theirs:
        for _ in range(5):
            for got, expected in zip(leaves(next(mine)), leaves(next(theirs)), strict=True):
                assert isinstance(got, jax.Array)
                assert np.array_equal(np.asarray(got), expected)


def test_a_batch_stays_as_it_is() -> None:
    held = memory("jax")
    batches = [held.sample(32) for _ in range(12)]
    before = [[np.array(leaf) for leaf in leaves(batch)] for batch in batches]
    for _ in range(50):
        held.sample(32)
    for batch, rows in zip(batches, before, strict=True):
        assert all(np.array_equal(np.asarray(a), b) for a, b in zip(leaves(batch), rows, strict=True))


def test_a_batch_of_arrays_goes_to_jax_when_asked() -> None:
    batch = memory(None).sample(8)
    for got, expected in zip(leaves(batch.jax()), leaves(batch), strict=True):
        assert np.array_equal(np.asarray(got), expected)


def test_what_jax_would_round_is_refused() -> None:
    space = spaces.Dict({"image": SPACE["image"], "state": spaces.Box(-1, 1, (3,), np.float64)})
    with pytest.raises(holdall.ArgumentError, match=r"next_obs|obs.*float64"):
        memory("jax", space).sample(4)
    with pytest.raises(holdall.ArgumentError, match=r"reward has dtype (torch\.)?float64"):
        memory("jax", reward=np.float64).sample(4)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_whole_numbers_of_64_bits_are_taken_if_they_fit(device: str | None, dtype: str) -> None:
    """Tensors as well as arrays, signed or not, as they were."""
    top = np.iinfo(f"{dtype[0]}4").max
    box = spaces.Box(0, np.iinfo(dtype).max, (2,), np.dtype(dtype))
    held = holdall.ReplayMemory(box, spaces.Discrete(2), 10, device=device)

    def add(value: int) -> None:
        obs = np.array([[1, value]], dtype)
        held.add(obs, np.zeros(1, np.int64), np.zeros(1, np.float32), obs, np.zeros(1, np.bool_), np.zeros(1, np.bool_))

    add(top)
    got = held.gather([0]).jax().obs
    assert got.dtype == f"{'u' * (dtype[0] == 'u')}int32"
    assert np.asarray(got).tolist() == [[1, top]]
    add(top + 1)
    with pytest.raises(holdall.ArgumentError, match=r"obs has dtype .*int64, and JAX would keep only 32 bits"):
        held.gather([1]).jax()

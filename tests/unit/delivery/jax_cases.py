"""Batches for JAX have the rows of NumPy batches, on JAX's device. `test_jax.py` runs these tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall

jax = pytest.importorskip("jax", reason="needs the extra jax")

SPACE = spaces.Dict({"image": spaces.Box(0, 255, (20, 20, 3), np.uint8), "state": spaces.Box(-1, 1, (3,), np.float32)})


def make_memory(
    device: str | None, space: Any = SPACE, reward: Any = np.float32, **settings: Any
) -> holdall.ReplayMemory:
    made = holdall.ReplayMemory(space, spaces.Discrete(4), 200, 2, device=device, seed=0, **settings)
    draw = np.random.default_rng(0)

    def observe() -> dict[str, Any]:
        return {
            "image": draw.integers(0, 255, (2, 20, 20, 3)).astype(np.uint8),
            "state": draw.random((2, 3)).astype(space["state"].dtype),
        }

    obs = observe()
    for _ in range(60):
        following = observe()
        ended = draw.random(2) < 0.2
        made.add(obs, draw.integers(0, 4, 2), draw.random(2).astype(reward), following, ended, np.zeros(2, np.bool_))
        obs = following
    return made


def list_leaves(batch: holdall.Batch) -> list[Any]:
    sides = [part for side in (batch.obs, batch.next_obs) for part in side.values()]
    return [*sides, batch.action, batch.reward, batch.terminated, batch.truncated, batch.weights]


@pytest.mark.parametrize("sampler", [None, holdall.NStep(3, 0.9), holdall.Sequence(4)])
def test_jax_batches_have_the_rows_of_numpy_batches(sampler: Any) -> None:
    on_jax = make_memory("jax", sampler=sampler)
    plain = make_memory(None, sampler=sampler)
    for _ in range(3):
        got = on_jax.sample(16)
        expected = plain.sample(16)
        for mine, theirs in zip(list_leaves(got), list_leaves(expected), strict=True):
            assert isinstance(mine, jax.Array)
            assert mine.devices() == {jax.devices()[0]}
            assert np.array_equal(np.asarray(mine), theirs)


def test_jax_batches_of_a_loader_have_the_rows_of_numpy_batches() -> None:
    with make_memory("jax").loader(8) as mine, make_memory(None).loader(8) as theirs:
        for _ in range(5):
            for got, expected in zip(list_leaves(next(mine)), list_leaves(next(theirs)), strict=True):
                assert isinstance(got, jax.Array)
                assert np.array_equal(np.asarray(got), expected)


def test_a_jax_batch_does_not_change_while_others_are_drawn() -> None:
    held = make_memory("jax")
    batches = [held.sample(32) for _ in range(12)]
    before = [[np.array(leaf) for leaf in list_leaves(batch)] for batch in batches]
    for _ in range(50):
        held.sample(32)
    for batch, rows in zip(batches, before, strict=True):
        assert all(np.array_equal(np.asarray(a), b) for a, b in zip(list_leaves(batch), rows, strict=True))


def test_a_numpy_batch_can_be_converted_to_jax() -> None:
    batch = make_memory(None).sample(8)
    for got, expected in zip(list_leaves(batch.jax()), list_leaves(batch), strict=True):
        assert np.array_equal(np.asarray(got), expected)


def test_dtypes_that_jax_would_round_are_refused() -> None:
    space = spaces.Dict({"image": SPACE["image"], "state": spaces.Box(-1, 1, (3,), np.float64)})
    with pytest.raises(holdall.ArgumentError, match=r"next_obs|obs.*float64"):
        make_memory("jax", space).sample(4)
    with pytest.raises(holdall.ArgumentError, match=r"reward has dtype (torch\.)?float64"):
        make_memory("jax", reward=np.float64).sample(4)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_integers_of_64_bits_are_accepted_if_they_fit_into_32(device: str | None, dtype: str) -> None:
    """The rule holds for tensors and arrays, and for signed and unsigned integers."""
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

"""Rewards of several components are stored, sampled and saved unchanged, and each component is summed by itself."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.errors import ArgumentError
from holdall.testing import OracleMemory, assert_same_bits

BOX = spaces.Box(-9, 9, (3,), np.float32)
ACTION = spaces.Discrete(4)
IMAGE = spaces.Box(0, 255, (3, 40, 40), np.uint8)


def make_step(space: Any, t: int, lanes: int, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    generator = np.random.default_rng(t)

    def observe(tick: int) -> Any:
        return np.random.default_rng(1000 + tick).integers(0, 9, (lanes, *space.shape)).astype(space.dtype)

    return {
        "obs": observe(t),
        "action": generator.integers(0, 4, lanes),
        "reward": generator.normal(size=(lanes, *shape)).astype(dtype),
        "next_obs": observe(t + 1),
        "terminated": generator.random(lanes) < 0.2,
        "truncated": generator.random(lanes) < 0.1,
    }


def fill_both(
    shape: tuple[int, ...], space: Any = BOX, lanes: int = 2, ticks: int = 60, dtype: Any = np.float32, **settings: Any
) -> tuple[Any, OracleMemory]:
    memory = holdall.ReplayMemory(space, ACTION, 50 * lanes, lanes, reward_shape=shape, seed=1, **settings)
    oracle = OracleMemory(50 * lanes, lanes)
    for t in range(ticks):
        memory.add(**make_step(space, t, lanes, shape, dtype))
        oracle.add(**make_step(space, t, lanes, shape, dtype))
    return memory, oracle


def test_segments_of_wide_rewards_are_small_enough_for_the_limit() -> None:
    """A memory with a limit frees whole segments."""
    memory, _ = fill_both((256,), ticks=60, dtype=np.float64, budget="1MiB")
    with memory:
        closed = memory.host_store.catalog.segments[:-1]
        assert closed
        for segment in closed:
            assert sum(part.nbytes for part in segment.parts) <= memory.store.budget.max_segment_bytes


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
@pytest.mark.parametrize("space", [BOX, IMAGE], ids=["small", "image"])
def test_vector_rewards_come_back_as_they_were_added(shape: tuple[int, ...], space: Any, tmp_path: Path) -> None:
    """They are read from the memory, and from a checkpoint and a pickle to which a step was added."""
    memory, oracle = fill_both(shape, space, budget=None)
    ids = np.arange(memory.first_id, memory.next_id)
    with memory:
        assert_same_bits(memory.gather(ids), oracle.gather(ids))
        assert memory.sample(7).reward.shape == (7, *shape)
        rewards, _, _ = memory.store.view().outcomes(ids.reshape(2, -1))
        assert np.array_equal(rewards, oracle.gather(ids).reward.reshape(2, -1, *shape))
        (reward,) = (field for field in memory.report().fields if field.name == "reward")
        assert reward.plain_bytes == len(ids) * int(np.prod(shape)) * 4
        memory.save(tmp_path).result(60)
        loaded = holdall.ReplayMemory.load(tmp_path)
        unpickled = pickle.loads(pickle.dumps(memory))
    for other in (loaded, unpickled):
        with other:
            again = OracleMemory(100, 2)
            assert_same_bits(other.gather(ids), oracle.gather(ids))
            after = make_step(space, 60, 2, shape, np.float32)
            other.add(**after)
            again.add(**after)
            found = other.gather([120, 121])
            assert_same_bits(found.reward, again.gather([0, 1]).reward)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int64])
def test_n_step_returns_are_summed_component_by_component(dtype: Any) -> None:
    """Each component has the returns of a memory with that component only."""
    memory, _ = fill_both((3,), dtype=dtype, sampler=holdall.NStep(4, 0.9))
    with memory:
        batch = memory.sample(40)
        for component in range(3):
            alone = holdall.ReplayMemory(BOX, ACTION, 100, 2, seed=1, sampler=holdall.NStep(4, 0.9))
            with alone:
                for t in range(60):
                    given = make_step(BOX, t, 2, (3,), dtype)
                    alone.add(**(given | {"reward": given["reward"][:, component]}))
                expected = alone.sample(40)
            assert np.array_equal(batch.ids, expected.ids)
            assert_same_bits(np.ascontiguousarray(batch.reward[:, component]), expected.reward)
            assert_same_bits(batch.discount, expected.discount)


@pytest.mark.parametrize("sampler", [holdall.Uniform(), holdall.Prioritized(), holdall.Sequence(5, 2)])
def test_other_samplers_return_vector_rewards_unchanged(sampler: Any) -> None:
    memory, oracle = fill_both((3,), sampler=sampler)
    with memory:
        batch = memory.sample(20)
        expected = oracle.gather(batch.ids.reshape(-1)).reward
        assert_same_bits(batch.reward, expected.reshape(*batch.ids.shape, 3))
        if isinstance(sampler, holdall.Prioritized):
            memory.update_priorities(batch.ids, np.abs(batch.reward).sum(axis=1))


def test_batches_of_tensors_have_vector_rewards() -> None:
    torch = pytest.importorskip("torch")
    memory, oracle = fill_both((3,), device="cpu")
    with memory:
        batch = memory.sample(20)
        assert torch.is_tensor(batch.reward)
        assert_same_bits(batch.reward.numpy(), oracle.gather(np.asarray(batch.ids)).reward)


def test_a_memory_on_a_device_sums_vector_rewards_by_component() -> None:
    """The sums are computed by operations of torch."""
    torch = pytest.importorskip("torch")
    _, oracle = fill_both((3,))
    settings: dict[str, Any] = {"store_device": "cpu", "device": "cpu", "sampler": holdall.NStep(3, 0.5)}
    with holdall.ReplayMemory(BOX, ACTION, 100, 2, reward_shape=(3,), **settings) as memory:
        for t in range(60):
            given = make_step(BOX, t, 2, (3,), np.float32)
            memory.add(**{name: torch.from_numpy(np.asarray(each)) for name, each in given.items()})
        ids = np.arange(memory.first_id, memory.next_id)
        assert_same_bits(memory.gather(ids).reward.numpy(), oracle.gather(ids).reward)
        batch = memory.sample(30)
        for row, first in enumerate(batch.ids.tolist()):
            run = oracle.gather(np.array([i for i in (first, first + 2, first + 4) if i < memory.next_id]))
            ends = np.flatnonzero(run.terminated | run.truncated)
            steps = run.reward[: ends[0] + 1] if len(ends) else run.reward
            total = sum(np.float32(0.5**k) * reward for k, reward in enumerate(steps))
            assert np.array_equal(batch.reward[row].numpy(), total)


def test_hindsight_says_that_it_needs_one_reward() -> None:
    goals = spaces.Dict({"achieved_goal": BOX, "desired_goal": BOX})
    sampler = holdall.Hindsight("future", 4, reward_fn=lambda achieved, desired, info: np.zeros(len(achieved)))
    with holdall.ReplayMemory(goals, ACTION, 10, reward_shape=(2,), sampler=sampler) as memory:
        shown = {key: np.zeros(3, np.float32) for key in goals.spaces}
        memory.add(shown, 1, np.zeros(2), shown, False, False)
        with pytest.raises(ArgumentError, match=r"Hindsight computes one reward a step.*reward_shape=\(2,\)"):
            memory.sample(1)


@pytest.mark.parametrize(("lanes", "leading"), [(1, ()), (1, (1,)), (2, (2,))])
def test_a_reward_of_another_shape_is_refused(lanes: int, leading: tuple[int, ...]) -> None:
    """The error names the argument, its value and the remedy, and the memory is as it was."""
    memory, oracle = fill_both((3,), lanes=lanes, ticks=3)
    with memory:
        given = make_step(BOX, 3, lanes, (3,), np.float32)
        for wrong in ((), (2,), (3, 1)):
            reward = np.ones((*leading, *wrong), np.float32)
            with pytest.raises(
                ArgumentError, match=r"^reward has shape .*reward_shape=\(3,\); pass .* instead of .*1\.0"
            ):
                memory.add(**(given | {"reward": reward}))
        ids = np.arange(3 * lanes)
        assert memory.next_id == 3 * lanes
        assert_same_bits(memory.gather(ids), oracle.gather(ids))
        memory.add(**(given | {"reward": given["reward"].reshape(*leading, 3)}))
    plain, _ = fill_both((), lanes=lanes, ticks=1)
    with plain, pytest.raises(ArgumentError, match=r"^reward has shape .*; pass .* instead of .*reward_shape=\(n,\)"):
        plain.add(**(given | {"reward": np.ones((*leading, 3), np.float32)}))


@pytest.mark.parametrize("shape", [3, (0,), (-1,), (2.0,), "ab", None, (True,)])
def test_a_wrong_reward_shape_is_refused(shape: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^reward_shape \(.*\) must be a tuple"):
        holdall.ReplayMemory(BOX, ACTION, 10, reward_shape=shape)


def test_a_memory_made_of_a_schema_has_its_reward_shape() -> None:
    memory, _ = fill_both((3,), ticks=1)
    with memory, holdall.ReplayMemory(memory.schema, None, 10) as other:
        other.add(**make_step(BOX, 0, 2, (3,), np.float32))
        assert other.gather([0]).reward.shape == (1, 3)

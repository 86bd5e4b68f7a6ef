"""One environment: `add` accepts what `env.step` returns, without an axis for lanes, and changes no value."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall.errors import ArgumentError
from holdall.testing import OracleMemory, assert_same_bits

BOX = spaces.Box(-9, 9, (3,), np.float32)
ONE = spaces.Box(-9, 9, (1,), np.float32)
NESTED = spaces.Dict({"one": ONE, "pair": spaces.Tuple([spaces.Discrete(4), spaces.MultiBinary((1, 1))])})
EXTRAS: dict[str, spaces.Space[Any]] = {"log_prob": spaces.Box(-9, 9, (), np.float32), "hidden": ONE}


def add_lane_axis(space: Any, value: Any) -> Any:
    """Add an axis for one lane to a value of a space."""
    if isinstance(space, spaces.Dict):
        return {key: add_lane_axis(each, value[key]) for key, each in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(add_lane_axis(each, one) for each, one in zip(space.spaces, value, strict=True))
    return np.asarray(value, space.dtype)[None]


@pytest.mark.parametrize("space", [BOX, ONE, NESTED, spaces.Discrete(7)], ids=["box", "one", "nested", "discrete"])
@pytest.mark.parametrize("action_space", [spaces.Discrete(5), ONE], ids=["discrete", "one"])
@pytest.mark.parametrize("with_axis", [(), ("obs",), ("reward", "terminated"), ("action", "next_obs", "extras")])
def test_the_axis_of_the_only_lane_may_be_left_out_of_every_field(
    space: Any, action_space: Any, with_axis: Any
) -> None:
    """The shape of the space shows whether a value has the axis, also where that shape is (1,)."""
    for each in (space, action_space, spaces.Dict(EXTRAS)):
        each.seed(0)
    memory = holdall.ReplayMemory(space, action_space, 20, extras=EXTRAS)
    oracle = OracleMemory(20, 1)
    extras_space = spaces.Dict(EXTRAS)
    with memory:
        obs = space.sample()
        for t in range(30):
            given = {
                "obs": obs,
                "action": action_space.sample(),
                "reward": 0.1 * t,
                "next_obs": space.sample(),
                "terminated": t % 7 == 6,
                "truncated": bool(t % 11 == 10),
                "extras": extras_space.sample(),
            }
            obs = given["next_obs"]
            whole = {
                "obs": add_lane_axis(space, given["obs"]),
                "action": add_lane_axis(action_space, given["action"]),
                "reward": np.array([given["reward"]]),
                "next_obs": add_lane_axis(space, given["next_obs"]),
                "terminated": np.array([given["terminated"]]),
                "truncated": np.array([given["truncated"]]),
                "extras": add_lane_axis(extras_space, given["extras"]),
            }
            memory.add(**(given | {name: whole[name] for name in with_axis}))
            oracle.add(**whole)
        ids = np.arange(memory.first_id, memory.next_id)
        assert_same_bits(memory.gather(ids), oracle.gather(ids))


def test_a_plain_loop_over_one_environment_stores_every_step() -> None:
    env = gym.make("CartPole-v1")
    memory = holdall.ReplayMemory(env.observation_space, env.action_space, capacity=1e3)
    oracle = OracleMemory(1000, 1)
    with memory:
        obs, _ = env.reset(seed=1)
        for _ in range(100):
            action = int(env.action_space.sample())
            next_obs, reward, terminated, truncated, _ = env.step(action)
            memory.add(obs, action, reward, next_obs, terminated, truncated)
            flags = np.array([terminated]), np.array([truncated])
            oracle.add(obs[None], np.array([action]), np.array([float(reward)]), next_obs[None], *flags)
            obs = env.reset()[0] if terminated or truncated else next_obs
        ids = np.arange(memory.next_id)
        assert_same_bits(memory.gather(ids), oracle.gather(ids))


def test_trajectories_of_one_environment_need_no_axis_either() -> None:
    with holdall.ReplayMemory(ONE, spaces.Discrete(3), 20) as memory:
        obs = np.arange(6, dtype=np.float32).reshape(6, 1)
        flags = np.zeros(5, np.bool_)
        memory.extend(obs[:5], np.arange(5) % 3, np.ones(5, np.float32), obs[1:], flags, flags[:, None])
        batch = memory.gather(np.arange(5))
        assert np.array_equal(batch.obs, obs[:5])
        assert np.array_equal(batch.next_obs, obs[1:])


def test_several_lanes_need_the_axis() -> None:
    with holdall.ReplayMemory(BOX, spaces.Discrete(3), 20, num_envs=2) as memory:
        with pytest.raises(ArgumentError, match=r"obs has shape \(3,\), expected \(2, 3\)"):
            memory.add(np.zeros(3, np.float32), 1, np.zeros(2), np.zeros(3, np.float32), False, False)
        assert memory.next_id == 0


@pytest.mark.parametrize("capacity", [1e6, np.float64(1e6), 10**6])
def test_a_capacity_may_be_written_as_a_float(capacity: Any) -> None:
    with holdall.ReplayMemory(BOX, spaces.Discrete(3), capacity) as memory:
        assert memory.capacity == 1_000_000
        assert type(memory.capacity) is int


@pytest.mark.parametrize("capacity", [1.5, float("inf"), float("nan"), -1e6, "1e6", True])
def test_a_capacity_that_is_not_a_whole_number_is_refused(capacity: Any) -> None:
    with pytest.raises(ArgumentError, match=r"capacity .* must be a whole number"):
        holdall.ReplayMemory(BOX, spaces.Discrete(3), capacity)


INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("stored", INTEGERS)
def test_integers_of_another_dtype_are_accepted_if_the_space_has_each_of_them(dtype: Any, stored: Any) -> None:
    """An int32 action fits an int64 space, for example. A value that a cast would change is refused."""
    given = np.iinfo(dtype)
    kept = np.iinfo(stored)
    edges = [given.min, given.max, kept.min, kept.max, 0, 1]
    space = spaces.Box(kept.min, kept.max, (2,), stored)
    with holdall.ReplayMemory(BOX, space, 50) as memory:
        zeros = np.zeros(3, np.float32)
        for value in sorted({int(edge) for edge in edges if given.min <= edge <= given.max}):
            before = memory.next_id
            action = np.array([0, value], dtype)
            if kept.min <= value <= kept.max:
                memory.add(zeros, action, 0.0, zeros, False, False)
                found = memory.gather([before]).action
                assert found.dtype == stored
                assert found.tolist() == [[0, value]]
            else:
                with pytest.raises(ArgumentError, match=r"action has dtype .* never casts\. Not all values fit into"):
                    memory.add(zeros, action, 0.0, zeros, False, False)
                assert memory.next_id == before


WRONG: dict[str, dict[str, Any]] = {
    "a float action": {"action": 1.0},
    "a float of another dtype": {"obs": np.zeros(3)},
    "integers for floats": {"obs": np.zeros(3, np.int64)},
    "a boolean for integers": {"action": True},
    "an integer for a flag": {"terminated": 1},
    "two rewards": {"reward": np.zeros(2)},
    "an integer beyond 64 bits": {"action": 2**70},
    "a reward of another dtype": {"reward": np.float32(0.1)},
    "an integer that no float represents": {"reward": 2**53 + 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_that_a_cast_would_change_is_refused(name: str) -> None:
    """The error names the argument, and the memory is as it was."""
    zeros = np.zeros(3, np.float32)
    right: dict[str, Any] = {
        "obs": zeros,
        "action": 1,
        "reward": 0.5,
        "next_obs": zeros,
        "terminated": False,
        "truncated": False,
    }
    with holdall.ReplayMemory(BOX, spaces.Discrete(3), 50) as memory:
        memory.add(**right)
        (argument,) = WRONG[name]
        with pytest.raises(ArgumentError, match=f"^{argument} .*[Pp]ass"):
            memory.add(**(right | WRONG[name]))
        assert memory.next_id == 1
        memory.add(**(right | {"reward": 3}))  # A float represents this integer exactly.
        assert memory.gather([0, 1]).reward.tolist() == [0.5, 3.0]

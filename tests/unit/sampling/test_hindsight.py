"""Hindsight: goals are outcomes of the same episode, and rewards are computed from the goals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall import ArgumentError, Hindsight, Prioritized, ReplayMemory
from holdall.testing import LeafPlan, Mishaps, OracleMemory, Stream, assert_same_bits
from holdall.testing.oracle import steps_from
from holdall.testing.strategies import box

from .against_oracle import list_steps_before
from .chi_square import DRAWS, compute_chi_square

GOALS = spaces.Dict(
    observation=box((4, 36, 36), "u1"), achieved_goal=box((2,), "f4"), desired_goal=box((2,), "f4"), flag=box((), "?")
)
IMAGE_GOALS = spaces.Dict(
    observation=box((3,), "f4"), achieved_goal=box((40, 40, 3), "u1"), desired_goal=box((40, 40, 3), "u1")
)


def compute_reward(achieved: Any, desired: Any, info: dict[str, Any]) -> NDArray[np.float64]:
    """Return a different reward for every pair of goals and info."""
    pairs = [rows.reshape(len(rows), -1).view(np.uint8).astype(np.float64) for rows in (achieved, desired)]
    scales = np.arange(1, pairs[0].shape[1] + 1)
    return np.asarray(pairs[0] @ scales - 0.5 * pairs[1] @ scales + info["log_prob"][:, 0])


def feed(
    strategy: Any, k: float = 4, space: spaces.Dict = GOALS, valid_share: float = 1.0, **options: Any
) -> tuple[ReplayMemory, OracleMemory]:
    """Return a memory and an oracle with three lanes, more than full."""
    lanes = 3
    capacity = 240
    stream = Stream(
        space,
        spaces.Discrete(3),
        lanes,
        plans=[LeafPlan(axis=0) if space is GOALS else LeafPlan()],
        mishaps=Mishaps(ends=0.1),
        extras={"log_prob": box((1,), "u1")},
    )
    sampler = Hindsight(strategy, k, compute_reward, by=options.pop("by", None))
    memory = ReplayMemory(
        space, spaces.Discrete(3), capacity, lanes, seed=1, extras=stream.extras, sampler=sampler, **options
    )
    oracle = OracleMemory(capacity, lanes)
    generator = np.random.default_rng(0)
    for _ in range(130):
        given = stream.tick().arguments()
        given["reward"] = generator.random(lanes).astype(np.float32)
        if valid_share < 1:
            given["valid"] = generator.random(lanes) < valid_share
        memory.add(**given)
        oracle.add(**given)
    return memory, oracle


def list_outcomes(oracle: OracleMemory, number: int, strategy: str) -> list[int]:
    """List the steps whose outcome may become the goal, one by one."""
    later = steps_from(oracle, number, 10_000)
    if strategy == "future":
        return later
    return later[-1:] if strategy == "final" else list_steps_before(oracle, number, 10_000) + later


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("space", [GOALS, IMAGE_GOALS], ids=["vectors", "images"])
@pytest.mark.parametrize("valid_share", [1.0, 0.9])
def test_every_row_is_the_oracles_with_a_goal_of_its_episode(
    strategy: str, space: spaces.Dict, valid_share: float
) -> None:
    """Goals are the same in obs and next_obs, rewards follow from them, and other rows are as they were stored."""
    memory, oracle = feed(strategy, space=space, valid_share=valid_share)
    batch = memory.sample(40)
    plain = oracle.gather(batch.ids)
    for row, number in enumerate(batch.ids.tolist()):
        if row < 32:
            goal = batch.obs["desired_goal"][row]
            candidates = oracle.gather(list_outcomes(oracle, number, strategy)).next_obs["achieved_goal"]
            assert goal.tobytes() in [candidate.tobytes() for candidate in candidates]
            plain.obs["desired_goal"][row] = goal
            plain.next_obs["desired_goal"][row] = goal
            achieved = plain.next_obs["achieved_goal"][row : row + 1]
            info = plain.extras["log_prob"][row : row + 1]
            plain.reward[row] = compute_reward(achieved, goal[None], {"log_prob": info})[0]
    assert_same_bits(batch, plain)


@pytest.mark.parametrize("strategy", ["future", "episode"])
def test_a_million_goals_are_drawn_equally_often_from_all_allowed_steps(strategy: str) -> None:
    """All transitions are equally likely, and so are all outcomes that may become the goal of one transition."""
    memory, oracle = feed(strategy)
    draws = [memory.batch_source.draw(250_000) for _ in range(DRAWS // 200_000)]
    pairs = np.concatenate(
        [draw.ids[draw.goals.rows] * 1000 + draw.goals.ids for draw in draws if draw.goals is not None]
    )
    expected = {
        number * 1000 + goal: 1 / len(allowed)
        for number in oracle.ids.tolist()
        for allowed in [list_outcomes(oracle, number, strategy)]
        for goal in allowed
    }
    keys = np.array(sorted(expected))
    assert 0.85 < compute_chi_square(pairs, keys, np.array([expected[key] for key in keys.tolist()])) < 1.15


def test_goals_follow_flags_that_are_set_later() -> None:
    """The index of episodes is built again."""
    memory, oracle = feed("final")
    memory.sample(10)
    ids = oracle.ids[::7]
    for either in (memory, oracle):
        either.set_flags(ids, np.ones(len(ids), bool), np.zeros(len(ids), bool))
    draw = memory.batch_source.draw(200)
    assert draw.goals is not None
    expected = [list_outcomes(oracle, number, "final")[0] for number in draw.ids[draw.goals.rows].tolist()]
    assert draw.goals.ids.tolist() == expected


@pytest.mark.parametrize(("k", "relabelled"), [(0, 0), (1, 20), (4, 32), (0.25, 8)])
def test_k_rows_are_relabelled_for_each_row_that_is_not(k: float, relabelled: int) -> None:
    """The other rows keep their goals and rewards."""
    memory, oracle = feed("future", k)
    batch = memory.sample(40)
    kept = oracle.gather(batch.ids[relabelled:])
    assert_same_bits(batch.obs["desired_goal"][relabelled:], kept.obs["desired_goal"])
    assert_same_bits(batch.reward[relabelled:], kept.reward)


def test_hindsight_draws_by_priority() -> None:
    """Rows that were drawn by priority are relabelled, too."""
    memory, oracle = feed("future", by=Prioritized(1.0, 1.0))
    memory.update_priorities(oracle.ids, np.where(oracle.ids % 2 == 0, 9.0, 0.01))
    batch = memory.sample(100)
    assert (batch.ids % 2 == 0).mean() > 0.95


def test_a_space_without_goals_is_refused() -> None:
    """The error names the key that is missing."""
    memory, _ = feed("future", space=spaces.Dict(observation=box((2,), "f4"), achieved_goal=box((2,), "f4")))
    with pytest.raises(ArgumentError, match=r"needs the key 'desired_goal'.*achieved_key and desired_key"):
        memory.sample(10)


def test_rewards_of_a_wrong_shape_are_refused() -> None:
    """`reward_fn` returns one reward for each row."""
    memory, _ = feed("future")
    memory.sampler.reward_fn = lambda *_: np.zeros((3, 1))  # type: ignore[attr-defined]  # The sampler is a Hindsight.
    with pytest.raises(ArgumentError, match=r"reward_fn returned an array of shape \(3, 1\) for 32 rows"):
        memory.sample(40)


@pytest.mark.parametrize("given", [{"strategy": "random"}, {"k": -1}, {"reward_fn": 3}], ids=str)
def test_a_wrong_argument_of_hindsight_is_refused(given: dict[str, Any]) -> None:
    """The refusal names the argument."""
    with pytest.raises(ArgumentError, match=rf"^{next(iter(given))} \("):
        Hindsight(**{"strategy": "future", "k": 4, "reward_fn": compute_reward, **given})

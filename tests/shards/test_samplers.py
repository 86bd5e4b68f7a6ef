"""Samplers that follow episodes, over shards: they draw as in a local memory, and from all shards alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import holdall
from holdall import ArgumentError, Hindsight, NStep, Prioritized, Sequence
from holdall.cluster.answer import Answer
from holdall.cluster.ids import shards_of_ids
from holdall.cluster.learner import assign_rows, compute_weights
from holdall.delivery.drawn_rows import DrawnRows
from holdall.ray import ReplayMemory
from holdall.sampling import Sampler
from holdall.schema import Schema
from holdall.testing import LeafPlan, Mishaps, Stream, assert_same_bits

from .chaos.chi_square import chi_square_p
from .desk import Desk

GOALS = spaces.Dict(
    achieved_goal=spaces.Box(-9, 9, (2,), np.float32),
    desired_goal=spaces.Box(-9, 9, (2,), np.float32),
    observation=spaces.Box(0, 255, (4, 16, 24), np.uint8),
)
ACTION = spaces.Discrete(4)
EXTRAS = {"log_prob": spaces.Box(-9, 0, (), np.float32)}
PLANS = [LeafPlan(), LeafPlan(), LeafPlan(axis=0, content="table")]


def reward(achieved: Any, desired: Any, info: dict[str, Any]) -> Any:
    return np.where((achieved == desired).all(axis=-1), info["log_prob"], -1)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "n-step": lambda: NStep(3, 0.9),
    "n-step by priority": lambda: NStep(5, 0.99, by=Prioritized(0.7, 0.5)),
    "sequences": lambda: Sequence(6, burn_in=3),
    "sequences by priority, every third": lambda: Sequence(5, burn_in=2, stride=3, by=Prioritized(0.7, 0.5)),
    "sequences, every second": lambda: Sequence(4, stride=2, crossing=True),
    "future goals": lambda: Hindsight("future", 4, reward),
    "any goals by priority": lambda: Hindsight("episode", 1, reward, by=Prioritized()),
    "final goals": lambda: Hindsight("final", 2, reward),
}


def make_tick(source: Stream) -> tuple[Any, ...]:
    step = source.tick()
    return step.obs, step.action, step.reward, step.next_obs, step.terminated, step.truncated, step.extras


def compare_with_local_memory(name: str, sharded: Any, settings: dict[str, Any], ticks: int) -> None:
    """Add the same ticks to a memory over shards and to a local one, and compare their batches."""
    mishaps = Mishaps(0.1, silent_resets=0.02, skipped_steps=0.02, foreign_next=0.02)
    source = Stream(GOALS, ACTION, 2, plans=PLANS, mishaps=mishaps, extras=EXTRAS, seed=3)
    generator = np.random.default_rng(5)
    local = holdall.ReplayMemory(GOALS, ACTION, **settings, extras=EXTRAS, sampler=SAMPLERS[name]())
    for count in range(ticks):
        step = (*make_tick(source), None if count % 7 else np.array([True, count % 2 == 0]))
        local.add(*step)
        sharded.add(*step)
        if count % 20 == 15:
            batch = local.sample(24)
            assert_same_bits(sharded.sample(24), batch)
            if "priority" in name:
                priorities = generator.random(24).astype(np.float32)
                local.update_priorities(batch.ids, priorities)
                sharded.update_priorities(batch.ids, priorities)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_shard_draws_what_a_local_memory_draws(name: str) -> None:
    settings = {"capacity": 300, "num_envs": 2, "seed": 11}
    compare_with_local_memory(
        name, Desk(Schema.of(GOALS, ACTION, EXTRAS, 2), SAMPLERS[name](), 300, seed=11), settings, 400
    )


@pytest.mark.nightly
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("name", SAMPLERS)
def test_one_shard_gives_the_batches_of_a_local_memory(name: str) -> None:
    settings: dict[str, Any] = {"capacity": 300, "num_envs": 2, "seed": 11}
    with ReplayMemory(GOALS, ACTION, **settings, extras=EXTRAS, sampler=SAMPLERS[name](), shards=1) as memory:
        compare_with_local_memory(name, memory, settings, 260)


BOX = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def add_episodes(memory: Any, lanes: int, ticks: int, first: int = 0) -> None:
    """Add episodes of 5 to 30 steps. Observations tell lane and tick, and rewards the tick."""
    generator = np.random.default_rng(first)
    left = generator.integers(5, 31, lanes)
    for tick in range(first, first + ticks):
        obs = np.stack([np.arange(lanes), np.full(lanes, tick)], axis=1).astype(np.float32)
        left -= 1
        ended = left == 0
        left[ended] = generator.integers(5, 31, int(ended.sum()))
        next_obs = obs + np.array([0, 1], np.float32)
        memory.add(obs, np.zeros(lanes, np.int64), np.full(lanes, tick, np.float32), next_obs, ended, ended & False)
    memory.flush()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.nightly), 7])
def test_an_episode_stays_on_one_shard(lanes: int) -> None:
    """So n-step returns are only shorter at the end of an episode."""
    with ReplayMemory(BOX, ACTION, 40_000, lanes, shards=3, seed=1, sampler=NStep(4, 1.0)) as memory:
        for _ in range(12):
            with memory.writer() as writer:  # Every writer chooses the shard of its first segment.
                add_episodes(writer, lanes, 700 // lanes)
        drawn = [memory.sample(512) for _ in range(8)]
        assert len(np.unique(np.concatenate([shards_of_ids(batch.ids) for batch in drawn]))) > 1
        newest = max(float(batch.next_obs[:, 1].max()) for batch in drawn)
        for batch in drawn:
            steps = batch.next_obs[:, 1] - batch.obs[:, 1]
            assert (batch.next_obs[:, 0] == batch.obs[:, 0]).all()
            cut = (steps < 4) & ~batch.terminated & (batch.next_obs[:, 1] < newest - 1)
            assert cut.sum() == 0
            first = batch.obs[:, 1]
            assert (batch.reward == steps * first + steps * (steps - 1) / 2).all()
        row = np.zeros((lanes, 2), np.float32)
        no = np.zeros(lanes, np.bool_)
        add_episodes(memory, lanes, 1)
        with pytest.raises(ArgumentError, match="the first add had dtype float32"):
            memory.add(row, np.zeros(lanes, np.int64), np.zeros(lanes), row, no, no)


@pytest.mark.usefixtures("cluster")
def test_a_draw_without_allowed_starts_raises_the_error_of_a_local_memory() -> None:
    """The start of the only episode was evicted, and the stride is longer than the rest."""
    row = np.zeros((700, 1, 2), np.float32)
    no = np.zeros((700, 1), np.bool_)
    settings: dict[str, Any] = {"capacity": 200, "seed": 1}
    memories: list[Any] = [
        holdall.ReplayMemory(BOX, ACTION, **settings, sampler=Sequence(2, stride=10_000)),
        ReplayMemory(BOX, ACTION, **settings, sampler=Sequence(2, stride=10_000), shards=1),
    ]
    for memory in memories:
        with memory:
            memory.extend(row, no.astype(np.int64), no.astype(np.float32), row, no, no)
            with pytest.raises(ArgumentError, match="none of the transitions held may be drawn"):
                memory.sample(4)


class Lane:
    """A shard with one writer of one lane, and episodes of given lengths. Rewards are numbers of transitions."""

    def __init__(self, number: int, lengths: list[int], sampler: Sampler, first: int) -> None:
        self.desk = Desk(Schema.of(BOX, ACTION, None, 1), sampler, 4_000, 7 + number, segment_rows=64)
        self.starts: list[int] = []  # Transitions that a sequence may begin with.
        self.numbers = np.arange(first, first + sum(lengths))
        nothing = np.zeros((1, 2), np.float32)
        no = np.zeros(1, np.bool_)
        was_end = False
        for tick, is_end in enumerate(is_end for length in lengths for is_end in [*[False] * (length - 1), True]):
            if was_end or tick % 3 == 0:
                self.starts.append(first + tick)
            was_end = is_end
            reward = np.array([first + tick], np.float64)
            self.desk.add(nothing, np.zeros(1, np.int64), reward, nothing, np.array([is_end]), no)
        self.desk.send()


@pytest.mark.parametrize("by", ["uniform", "priority"])
@pytest.mark.parametrize("kind", ["n-step", "sequences, every third"])
def test_starts_are_drawn_in_proportion_to_their_masses_over_unequal_shards(kind: str, by: str) -> None:
    """Starts are all transitions for n-step returns. Weights are in inverse proportion to the masses."""
    generator = np.random.default_rng(3)

    def sampler() -> Any:
        single = Prioritized(alpha=1.0, beta=1.0, floor=1e-6) if by == "priority" else None
        return NStep(3, 0.9, by=single) if kind == "n-step" else Sequence(5, burn_in=2, stride=3, by=single)

    lanes = []
    first = 0
    for number, episodes in enumerate((60, 12, 3)):
        lanes.append(Lane(number, generator.integers(2, 25, episodes).tolist(), sampler(), first))
        first += len(lanes[-1].numbers)
    chances = np.zeros(first)
    for lane in lanes:
        allowed = lane.numbers if kind == "n-step" else np.array(lane.starts)
        chances[allowed] = 1.0
        if by == "priority":
            chances[allowed] = generator.uniform(0.5, 4.0, len(allowed))
            lane.desk.shard.update_priorities(allowed - lane.numbers[0], chances[allowed] - 1e-6)
    masses = {number: lane.desk.shard.mass for number, lane in enumerate(lanes)}
    assert np.allclose(sum(masses.values()), chances.sum())
    counts = np.zeros(first, np.int64)
    sums = np.zeros(first)
    where = assign_rows(masses, 200_000, generator)
    answers = []
    for number, rows in where.items():
        desk = lanes[number].desk
        numbers = lanes[number].numbers
        drawn = desk.shard.draw(len(rows), 0, None, is_near=True)
        ids = drawn.draw.ids
        starts = numbers[ids[:, 2] if ids.ndim == 2 else ids]
        counts += np.bincount(starts, minlength=first)
        nothing = DrawnRows([], [], [], [], ids, ids, ids)
        answers.append((starts, Answer(desk.counters(), ids, drawn.scaled, nothing)))
    weights = compute_weights([answer for _, answer in answers], list(where.values()), list(masses.values()), beta=1.0)
    for (starts, _), rows in zip(answers, where.values(), strict=True):
        sums += np.bincount(starts, weights[rows], minlength=first)
    assert counts[chances == 0].sum() == 0
    kept = chances > 0
    assert chi_square_p(counts[kept], chances[kept]) > 0.001
    weighted = sums[kept] / counts[kept] * chances[kept]
    assert np.allclose(weighted, weighted[0], rtol=1e-5)

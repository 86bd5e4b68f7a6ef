"""A million draws over four shards have the right probabilities and weights, also after one joins and one is lost.

The shards are `ShardData` objects in this process. The learner's functions assign rows to them and compute weights.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from gymnasium import spaces
from numpy.typing import NDArray

from holdall.cluster.answer import Answer
from holdall.cluster.ids import first_row_of_life
from holdall.cluster.journal import Entry
from holdall.cluster.learner import assign_rows, compute_weights
from holdall.cluster.messages import ShardCounters
from holdall.cluster.segment import SegmentBuilder
from holdall.cluster.shard_data import ShardData
from holdall.cluster.tuning import ClusterTuning
from holdall.sampling import Held, Prioritized, Uniform
from holdall.schema import Schema
from holdall.schema_json import schema_to_json
from holdall.store.tuning import Tuning

from .chi_square import chi_square_p

Ids = NDArray[np.int64]
DRAWS = 1_000_000
SCHEMA = Schema.of(spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), None, 1)


class BareShard:
    """A shard in this process, without its actor."""

    def __init__(self, number: int, rows: int, prioritized: bool) -> None:
        self.sampler = Prioritized(alpha=0.7, beta=1.0) if prioritized else Uniform()
        self.generator = np.random.default_rng([7, number])
        self.data = ShardData(schema_to_json(SCHEMA), 4_096, self.sampler, self.generator, ClusterTuning())
        self.data.start_at(first_row_of_life(number))
        self.fill(rows)
        if isinstance(self.sampler, Prioritized):
            priorities = self.generator.gamma(2.0, 1.0, rows) + 0.1
            self.sampler.update_priorities(
                self.held, np.arange(self.held.next_id - rows, self.held.next_id), priorities
            )

    def fill(self, rows: int) -> None:
        builder = SegmentBuilder(SCHEMA, rows, "balanced", Tuning())
        nothing = np.zeros((1, 2), np.float32)
        no = np.zeros(1, np.bool_)
        for row in range(rows):
            action = np.zeros(1, np.int64)
            reward = np.array([row], np.float64)
            assert builder.append((nothing, action, reward, nothing, no, no, None, None))
        self.data.accept([Entry(b"w" * 16, 0, builder.close())])

    @property
    def held(self) -> Held:
        return self.data.describe_held(self.data.store.view())

    @property
    def chances(self) -> NDArray[np.float64]:
        """The masses of all held rows, with which they should be drawn in proportion."""
        rows = np.arange(self.held.first_id, self.held.next_id)
        return (
            self.sampler.read_scaled(self.held, rows) if isinstance(self.sampler, Prioritized) else np.ones(len(rows))
        )

    @property
    def counters(self) -> ShardCounters:
        store = self.data.store
        mass = float(self.chances.sum())
        rows = (store.first_row, store.next_row, len(store))
        return ShardCounters(0, *rows, inserted=store.next_row, changes=0, backlog=0, mass=mass)

    def answer(self, count: int) -> Answer:
        rows = self.sampler.draw(self.held, count, self.generator).ids
        return Answer(self.counters, rows, self.chances[rows - self.held.first_id], cast("Any", None))


def draw(shards: dict[int, BareShard], masses: dict[int, float]) -> tuple[Ids, NDArray[np.float64]]:
    """Draw a million rows. Return the count and the sum of the weights of every row, shard after shard."""
    where = assign_rows(masses, DRAWS, np.random.default_rng(3))
    answers = {shard: shards[shard].answer(len(rows)) for shard, rows in where.items()}
    known_masses = [masses[shard] for shard in answers]
    weights = compute_weights(list(answers.values()), list(where.values()), known_masses, beta=1.0)
    counts = []
    sums = []
    for number, shard in shards.items():
        held = shard.held.next_id - shard.held.first_id
        place = answers[number].ids - shard.held.first_id
        counts.append(np.bincount(place, minlength=held))
        sums.append(np.bincount(place, weights[where[number]], minlength=held))
    return np.concatenate(counts), np.concatenate(sums)


def add_up_by_shard(
    shards: dict[int, BareShard], counts: Ids, chances: NDArray[np.float64]
) -> tuple[Ids, NDArray[np.float64]]:
    """Return the sums of counts and of chances, by shard."""
    ends = np.cumsum([shard.held.next_id - shard.held.first_id for shard in shards.values()])
    starts = np.concatenate([[0], ends[:-1]])
    return np.add.reduceat(counts, starts), np.add.reduceat(chances, starts)


def read_masses(shards: dict[int, BareShard]) -> dict[int, float]:
    return {number: shard.counters.mass for number, shard in shards.items()}


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_million_draws_have_the_right_probabilities_also_after_a_join_and_a_loss(prioritized: bool) -> None:
    rows = {0: 1_500, 1: 400, 2: 37, 3: 2_000}
    shards = {number: BareShard(number, count, prioritized) for number, count in rows.items()}
    for change in ("none", "one joined", "one lost"):
        if change == "one joined":
            shards[4] = BareShard(4, 250, prioritized)
        elif change == "one lost":
            del shards[3]
        counts, sums = draw(shards, read_masses(shards))
        chances = np.concatenate([shard.chances for shard in shards.values()])
        assert chi_square_p(counts, chances) > 0.01, change
        assert chi_square_p(*add_up_by_shard(shards, counts, chances)) > 0.01, change  # Differences between shards.
        assert np.allclose(sums / counts * chances, (sums / counts * chances)[0], rtol=1e-5), change


def test_this_file_notices_a_learner_that_ignores_the_masses() -> None:
    shards = {
        number: BareShard(number, count, False) for number, count in {0: 1_000, 1: 1_020, 2: 980, 3: 1_000}.items()
    }
    counts, _ = draw(shards, dict.fromkeys(shards, 1.0))
    assert chi_square_p(*add_up_by_shard(shards, counts, np.ones(len(counts)))) < 1e-6


@pytest.mark.parametrize("prioritized", [False, True])
def test_weights_correct_draws_with_outdated_masses(prioritized: bool) -> None:
    shards = {number: BareShard(number, 800, prioritized) for number in range(4)}
    stale = {number: mass * (1 + 0.1 * number) for number, mass in read_masses(shards).items()}
    _, sums = draw(shards, stale)
    of_shard = sums.reshape(4, 800).sum(axis=1)
    # The sums of weights are equal for all rows. Without weights, they would differ by 0.03.
    assert np.abs(of_shard / of_shard.sum() - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / DRAWS)

"""Routing: which shard each row of a batch is drawn from, and what a draw was worth.

In:  what shards say of themselves with every answer.  Out: a shard for every row; importance weights.
Invariant: a shard is drawn from in proportion to its mass as it is known here. Weights are made of the probability that
was used, so a mass that was out of date costs variance and no bias; one that is lost or joins changes nothing for the
others but their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from holdall.ray.answer import Answer
from holdall.ray.standing import Standing

Ids = NDArray[np.int64]


def assigned(masses: Mapping[int, float], count: int, generator: np.random.Generator) -> dict[int, Ids]:
    """Draw a shard for each of `count` rows; return the positions of each shard's rows.

    A memory of one shard draws nothing here, so that it goes on exactly as a local one.
    """
    shards = sorted(shard for shard, mass in masses.items() if mass > 0)
    if len(shards) == 1:
        return {shards[0]: np.arange(count)}
    mass = np.array([masses[shard] for shard in shards])
    drawn = generator.choice(len(shards), size=count, p=mass / mass.sum())
    return {shard: rows for i, shard in enumerate(shards) if (rows := np.flatnonzero(drawn == i)).size}


def weights_of(
    answers: Sequence[Answer], where: Sequence[Ids], masses: Sequence[float], beta: float
) -> NDArray[np.float32]:
    """Return the weights of a batch: the lowest probability in it over each row's own, to the power of beta.

    Args:
        masses: What each answer's shard was taken to hold when its rows were assigned.
    """
    count = sum(map(len, where))
    chance = np.empty(count, np.float64)
    for answer, rows, mass in zip(answers, where, masses, strict=True):
        # Of one shard alone its mass says nothing; of several, what was believed over what was true.
        belief = 1.0 if len(answers) == 1 else mass / answer.standing.mass
        chance[rows] = belief * answer.scaled
    shares = (chance.min(initial=np.inf) / chance).astype(np.float32)
    return np.asarray(shares ** np.float32(beta), np.float32)


def is_newer(told: Standing, known: Standing | None) -> bool:
    """Whether a shard said this after what is known; calls may overtake each other."""
    return known is None or (told.epoch, told.changes) >= (known.epoch, known.changes)

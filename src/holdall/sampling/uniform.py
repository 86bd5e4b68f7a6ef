"""Uniform: every transition is equally likely."""

from __future__ import annotations

import numpy as np

from holdall.batch import Draw, Ids
from holdall.errors import ArgumentError
from holdall.sampling.held import Held
from holdall.sampling.sampler import Stateless

_MAX_ROUNDS = 50
"""Rounds in which ids that may not be drawn are replaced. Afterwards all allowed ids are listed, which takes time in
proportion to the size of the memory."""


class Uniform(Stateless):
    """Sampler that draws every transition with the same probability.

    Examples:
        >>> sampler = holdall.NStep(3, gamma=0.99, by=holdall.Uniform())
    """

    draws_once = True
    """Whether a draw is one call to the generator if every transition may be drawn. An interrupt then leaves the
    generator as before the draw or as after it, so the memory does not save the state of the generator."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids that may be drawn."""
        ids = draw_evenly(held, held.first_id, count, generator)
        return Draw(ids, np.ones(count, np.float32))


def draw_evenly(held: Held, first_id: int, count: int, generator: np.random.Generator) -> Ids:
    """Draw `count` ids from `first_id` on. All ids that may be drawn are equally likely.

    Raise ArgumentError if no id may be drawn.
    """
    ids = generator.integers(first_id, held.next_id, size=count)
    if held.can_draw_all:
        return ids
    for _ in range(_MAX_ROUNDS):
        missed = np.flatnonzero(~held.are_allowed(ids))
        if missed.size == 0:
            return ids
        ids[missed] = generator.integers(first_id, held.next_id, size=missed.size)
    missed = np.flatnonzero(~held.are_allowed(ids))
    held_ids = np.arange(first_id, held.next_id)
    allowed = held_ids[held.are_allowed(held_ids)]
    if allowed.size == 0:
        raise ArgumentError("sampler: none of the transitions held may be drawn. Add more transitions first.")
    ids[missed] = generator.choice(allowed, missed.size)
    return ids

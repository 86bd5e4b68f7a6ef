"""Uniform sampling: every transition held is equally likely, with replacement."""

from __future__ import annotations

import numpy as np

from holdall.batch import Draw
from holdall.errors import ArgumentError
from holdall.sampling.draw import Held, Ids, Stateless

_TRIES = 50
"""Rounds of drawing again before all that may be drawn is listed: that takes time in proportion to the memory."""


class Uniform(Stateless):
    """Draw every transition with the same probability."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids; those that may not be drawn are drawn again."""
        ids = generator.integers(held.first_id, held.next_id, size=count)
        if not held.allows_all:
            ids = _drawn_again(ids, held, generator)
        return Draw(ids, np.ones(count, np.float32))


def _drawn_again(ids: Ids, held: Held, generator: np.random.Generator) -> Ids:
    """Replace what may not be drawn; every id that may stays as likely as any other."""
    for _ in range(_TRIES):
        missed = np.flatnonzero(~held.allows(ids))
        if missed.size == 0:
            return ids
        ids[missed] = generator.integers(held.first_id, held.next_id, size=missed.size)
    missed = np.flatnonzero(~held.allows(ids))
    everything = np.arange(held.first_id, held.next_id)
    allowed = everything[held.allows(everything)]
    if allowed.size == 0:
        raise ArgumentError("none of the transitions held may be drawn by this sampler; add more first")
    ids[missed] = generator.choice(allowed, missed.size)
    return ids

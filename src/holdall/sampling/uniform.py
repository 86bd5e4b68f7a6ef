"""Uniform sampling: every transition held is equally likely, with replacement."""

from __future__ import annotations

import numpy as np

from holdall.sampling.draw import Draw, Held


class Uniform:
    """Draw every transition with the same probability."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw ids; lanes that made no transition are drawn again."""
        ids = generator.integers(held.first_id, held.next_id, size=count)
        if held.are_valid is not None:
            while (missed := np.flatnonzero(~held.are_valid(ids))).size:
                ids[missed] = generator.integers(held.first_id, held.next_id, size=missed.size)
        return Draw(ids, np.ones(count, np.float32))

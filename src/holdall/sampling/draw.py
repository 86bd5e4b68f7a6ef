"""What a sampler sees of a memory, and what it answers.

In:  the ids that are held.  Out: ids to gather and their importance weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Held:
    """The ids that a memory holds at the moment of a draw: `first_id` up to `next_id` - 1.

    `are_valid` tells real transitions from lanes that made none; it is None if all are real.
    """

    first_id: int
    next_id: int
    are_valid: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """Ids in the order of the batch, and a weight for each."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


class Sampler(Protocol):
    """Draws ids; called under the memory's lock, so it must not call back into it."""

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` ids with replacement."""

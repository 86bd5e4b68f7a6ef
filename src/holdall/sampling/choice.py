"""Samplers that make something of single transitions, and who chooses these.

In:  what `by` was given.  Out: Uniform or Prioritized; priorities and state pass through to it.
Invariant: whatever else is composed is refused when it is constructed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.errors import ArgumentError
from holdall.sampling.draw import Held, Ids, State
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.uniform import Uniform


class Chosen(ABC):
    """A sampler whose transitions are drawn `by` another one; Uniform if it is None."""

    def __init__(self, by: Uniform | Prioritized | None) -> None:
        if not isinstance(by, Uniform | Prioritized | None):
            raise ArgumentError(
                f"by ({type(by).__name__}) must be a sampler of single transitions; pass Uniform() or Prioritized(...)"
            )
        self.by = Uniform() if by is None else by

    @abstractmethod
    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows, with replacement."""

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Hand priorities on to the sampler of the transitions."""
        if not isinstance(self.by, Prioritized):
            raise ArgumentError(
                f"update_priorities was called, but the memory's {type(self).__name__} draws by Uniform(), which has "
                f"no priorities; construct it as {type(self).__name__}(..., by=Prioritized(...))"
            )
        self.by.update_priorities(held, ids, priorities)

    def state(self) -> State:
        """Return the state of the sampler of the transitions: there is no other."""
        return self.by.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Hand it back to it."""
        self.by.restore(state)

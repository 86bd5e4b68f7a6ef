"""`ComposedSampler`, the base class of samplers that let another sampler draw the first transition of each row.

`Likelihood` computes how likely each transition is drawn, which memories over shards need to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Ids
from holdall.errors import ArgumentError
from holdall.sampling.held import Held
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.sampler import State
from holdall.sampling.uniform import Uniform


class ComposedSampler(ABC):
    """Base class of samplers that let the sampler `by` draw the first transition of each row.

    `by` has the state and the priorities.

    A subclass implements `draw`. If not every transition can begin a row, it also implements `restrict_to_starts`.

    Args:
        by: Sampler of single transitions. None: `Uniform()`.
    """

    def __init__(self, by: Uniform | Prioritized | None) -> None:
        if not isinstance(by, Uniform | Prioritized | None):
            raise ArgumentError(
                f"by ({type(by).__name__}) must be a sampler of single transitions. Pass Uniform() or Prioritized(...)."
            )
        self.by = Uniform() if by is None else by

    @abstractmethod
    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows with replacement."""

    @property
    def steps_per_row(self) -> int:
        """Number of steps that `draw` looks at for each row."""
        return 1

    def restrict_to_starts(self, held: Held) -> Held:
        """Return `held`, restricted to the transitions that `by` may draw."""
        return held

    def find_first_ids(self, ids: Ids) -> Ids:
        """Return the transitions that `by` drew for a batch with these `ids`."""
        return ids

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set the priorities of the sampler `by`."""
        self._require_prioritized().update_priorities(held, ids, priorities)

    def check_update(self, ids: Ids, priorities: NDArray[Any]) -> Ids:
        """Return the transitions whose priorities `update_priorities` would set. See `Prioritized.check_update`."""
        return self._require_prioritized().check_update(self.find_first_ids(ids), priorities)

    def state(self) -> State:
        """Return the state of the sampler `by`."""
        return self.by.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the sampler `by`."""
        self.by.restore(state)

    def resize(self, capacity: int, first_id: int) -> None:
        """Change the capacity of the sampler `by`, if it has one."""
        if isinstance(self.by, Prioritized):
            self.by.resize(capacity, first_id)

    def _require_prioritized(self) -> Prioritized:
        if not isinstance(self.by, Prioritized):
            kind = type(self).__name__
            raise ArgumentError(
                f"update_priorities was called, but the memory's {kind} draws by Uniform(), which has no priorities. "
                f"Construct the sampler as {kind}(..., by=Prioritized(...))."
            )
        return self.by


class Likelihood:
    """Computes how likely a sampler of holdall draws each transition.

    Every transition that can be drawn has a mass: its scaled priority, or 1 for samplers without priorities. The
    probability of a draw is mass / total mass.

    Args:
        sampler: `Uniform`, `Prioritized` or a `ComposedSampler`.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._by = sampler.by if isinstance(sampler, ComposedSampler) else sampler
        # With alpha 0 every mass is 1, so the total mass is the number of transitions that can be drawn.
        self._counter = Prioritized(alpha=0.0)

    @property
    def prioritized(self) -> Prioritized | None:
        """The sampler that has the priorities. None for samplers without priorities."""
        return self._by if isinstance(self._by, Prioritized) else None

    @property
    def highest(self) -> float:
        """Scaled priority that new transitions get. 0 for samplers without priorities."""
        return self._by.highest if isinstance(self._by, Prioritized) else 0.0

    def raise_highest(self, held: Held, scaled: float) -> None:
        """Give new transitions at least the scaled priority `scaled`. No effect on samplers without priorities."""
        if isinstance(self._by, Prioritized):
            self._by.raise_highest(self._restrict_to_starts(held), scaled)

    def compute_total_mass(self, held: Held) -> float:
        """Return the sum of the masses of all transitions that can be drawn."""
        if held.next_id == held.first_id:
            return 0.0
        starts = self._restrict_to_starts(held)
        prioritized = self.prioritized
        if prioritized is not None:
            return prioritized.compute_total(starts)
        if starts.can_draw_all:
            return float(held.next_id - held.first_id)
        return self._counter.compute_total(starts)

    def compute_masses(self, held: Held, ids: Ids) -> NDArray[np.float64]:
        """Return the mass of each row of a batch with these `ids`."""
        first_ids = self._sampler.find_first_ids(ids) if isinstance(self._sampler, ComposedSampler) else ids
        prioritized = self.prioritized
        if prioritized is None:
            return np.ones(len(first_ids))
        return prioritized.read_scaled(self._restrict_to_starts(held), first_ids)

    def _restrict_to_starts(self, held: Held) -> Held:
        return self._sampler.restrict_to_starts(held) if isinstance(self._sampler, ComposedSampler) else held

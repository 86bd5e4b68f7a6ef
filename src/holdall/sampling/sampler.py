"""The protocols of samplers.

`docs/extending.md` shows how to write a sampler, and `holdall.testing.SamplerContract` tests it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Ids
from holdall.errors import DamageError
from holdall.sampling.held import Held

State = dict[str, Any]
"""The state of a sampler: arrays and plain numbers by name."""


class Sampler(Protocol):
    """An object that decides which transitions form a batch. Every memory needs its own sampler.

    The memory calls a sampler while it holds its lock, so a sampler must not call the memory.

    A sampler may have more attributes than the three methods below:

    * `update_priorities(held, ids, priorities)`, if callers tell it how useful transitions are. See `PrioritySampler`.
    * `resize(capacity, first_id)`, if its state depends on the capacity of the memory. `load` calls it after `restore`.
    * `reward_fn`, if it relabels goals. Checkpoints have no functions, so `load` uses this one for batches that were
      drawn before the save.
    """

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw `count` rows with replacement. All random numbers come from `generator`."""

    def state(self) -> State:
        """Return everything that later draws depend on, except the memory, the generator and the settings.

        It has only arrays and plain numbers, so that it can be saved without pickle. Settings of the constructor belong
        to the state only if they can change later.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`. The next draws are those that the saved sampler would have made."""


class PrioritySampler(Sampler, Protocol):
    """A sampler that callers tell how useful it is to draw a transition again."""

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set the priorities of `ids`. Ignore ids that are no longer held."""


class Stateless:
    """Base class of samplers whose draws depend only on the memory and the generator."""

    def state(self) -> State:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Do nothing. Raise DamageError for a state that is not empty, because another sampler saved it."""
        if state:
            raise DamageError(
                f"The saved state of the sampler has {sorted(state)}, but {type(self).__name__} has no state. Another "
                "kind of sampler saved it. Pass a sampler of that kind."
            )

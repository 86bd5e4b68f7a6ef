"""Sequence: consecutive steps, for recurrent networks and world models."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Flags, Ids
from holdall.checks import require_count, require_flag
from holdall.errors import TransitionIdError
from holdall.sampling.composed import ComposedSampler
from holdall.sampling.episodes import find_steps_around, pad_steps
from holdall.sampling.held import Held
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.row_order import PLACES_PER_LANE
from holdall.sampling.uniform import Uniform


class Sequence(ComposedSampler):
    """Sampler that draws sequences of `length` steps, with the `burn_in` steps before them.

    `mask` is False for padding. Without `crossing`, positions after the end of an episode repeat its last step. Steps
    of the burn-in before the beginning of an episode repeat its first step. Compute the loss over `mask[:, burn_in:]`.
    A sequence has one weight. `update_priorities(batch.ids, ...)` takes one priority per sequence.

    Args:
        length: Number of steps to learn from.
        burn_in: Number of steps before them, which warm up a recurrent state.
        stride: Sequences begin at the first step of an episode, and at ticks that `stride` divides. The first tick of
            the memory is 0.
        crossing: Continue after the end of an episode. `terminated` and `truncated` show where episodes end.
        by: Sampler of the first steps: `Uniform()` or `Prioritized(...)`.

    Examples:
        >>> sampler = holdall.Sequence(4, burn_in=2)
        >>> steps = holdall.ReplayMemory(Box(-1, 1, (3,)), Discrete(2), 100, sampler=sampler, seed=0)
        >>> obs = np.zeros(3, np.float32)
        >>> for _ in range(10):
        ...     steps.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        >>> batch = steps.sample(5)
        >>> batch.obs.shape, batch.mask.shape
        ((5, 6, 3), (5, 6))
    """

    def __init__(
        self,
        length: int,
        burn_in: int = 0,
        stride: int = 1,
        *,
        crossing: bool = False,
        by: Uniform | Prioritized | None = None,
    ) -> None:
        super().__init__(by)
        self.length = require_count("length", length, 1)
        self.burn_in = require_count("burn_in", burn_in, 0)
        self.stride = require_count("stride", stride, 1)
        self.crossing = require_flag("crossing", crossing)
        # `flags_changed` of the memory at the last draw.
        self._flags_changed = 0

    @property
    def steps_per_row(self) -> int:
        """Number of steps that `draw` looks at for each row."""
        return self.burn_in + self.length

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw first steps, and find the steps before and after them."""
        drawn = self.by.draw(self.restrict_to_starts(held), count, generator)
        self._flags_changed = held.fields.flags_changed
        return self.complete(held, drawn)

    def complete(self, held: Held, drawn: Draw) -> Draw:
        """Extend each transition of `drawn`, the first one after the burn-in, to a sequence."""
        before, is_real_before = find_steps_around(held, drawn.ids, -self.burn_in, 0, is_crossing=self.crossing)
        after, is_real_after = find_steps_around(held, drawn.ids, 0, self.length, is_crossing=self.crossing)
        steps = np.concatenate([before, after], axis=1)
        is_real = np.concatenate([is_real_before, is_real_after], axis=1)
        return Draw(pad_steps(steps, is_real), drawn.weights, mask=is_real)

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Set one priority per sequence. `ids` are those of the batch, or those of the first steps alone."""
        first_ids = self.find_first_ids(ids)
        has_lost_starts = self.stride > 1 and isinstance(self.by, Prioritized)
        if has_lost_starts and first_ids.ndim == 1 and first_ids.shape == priorities.shape:
            is_kept = ~self._find_lost_starts(held, first_ids)
            first_ids = first_ids[is_kept]
            priorities = priorities[is_kept]
        super().update_priorities(self.restrict_to_starts(held), first_ids, priorities)

    def find_first_ids(self, ids: Ids) -> Ids:
        """Return the first step after the burn-in of each sequence. Flat `ids` are returned as they are."""
        is_batch = ids.ndim == 2 and ids.shape[1] == self.burn_in + self.length
        return ids[:, self.burn_in] if is_batch else ids

    def restrict_to_starts(self, held: Held) -> Held:
        """Return `held`, restricted to the steps at which sequences begin."""
        return held if self.stride == 1 else held.restrict(self._are_starts)

    def _are_starts(self, held: Held, ids: Ids) -> Flags:
        """Return which of the held `ids` begin a sequence."""
        is_on_stride = held.find_places(ids) % PLACES_PER_LANE % self.stride == 0
        steps, is_held = held.find_steps(ids, -1, 0)
        has_previous = is_held[:, 0]
        previous = np.where(has_previous, steps[:, 0], ids)
        is_first = has_previous & (held.fields.are_ends(previous) | ~held.fields.are_valid(previous))
        return np.asarray(is_on_stride | is_first)

    def _find_lost_starts(self, held: Held, first_ids: Ids) -> Flags:
        """Return which held steps no longer begin a sequence. Raise TransitionIdError if a step certainly never did.

        A step that began a sequence when it was drawn no longer does if the end of the previous episode was evicted, or
        if flags were overwritten.
        """
        is_held = (first_ids >= held.first_id) & (first_ids < held.next_id)
        is_lost = is_held.copy()
        is_lost[is_held] = ~self._are_starts(held, first_ids[is_held])
        is_wrong = is_lost.copy()
        is_wrong[is_lost] = held.find_steps(first_ids[is_lost], -1, 0)[1][:, 0]
        if is_wrong.any() and held.fields.flags_changed == self._flags_changed:
            raise TransitionIdError(
                f"ids holds {first_ids[is_wrong][0]}, with which no sequence begins. It is neither the first step of "
                f"an episode nor at a tick that stride ({self.stride}) divides. Pass the ids of a batch."
            )
        return is_lost

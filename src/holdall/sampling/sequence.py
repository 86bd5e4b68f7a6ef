"""Sequences of consecutive steps, for recurrent agents and world models.

In:  first steps that another sampler drew.  Out: (batch, burn_in + length) steps and a mask.
Invariant: the steps of a row are consecutive, of one lane, and, unless asked for otherwise, of
one episode; where there are fewer of them the mask says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.sampling.choice import Chosen
from holdall.sampling.draw import Flags, Held, Ids, require_count
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.stretch import filled_up, steps_after, steps_before
from holdall.sampling.uniform import Uniform


class Sequence(Chosen):
    """Draw runs of `length` steps, and the `burn_in` steps before them.

    `mask` tells real steps from those that only fill up: behind an episode's last step, which
    they repeat, and before its first one among the burn-in. The loss is taken over
    `mask[:, burn_in:]`. `weights`, and the priorities given to `update_priorities(batch.ids, ...)`,
    are one a sequence.

    Args:
        length: Steps to learn from.
        burn_in: Steps before them, to warm a recurrent state up with.
        stride: Sequences begin with the first step of an episode, or at every `stride`-th tick.
        crossing: Go on past the ends of episodes; `terminated` and `truncated` tell where they are.
        by: How the first steps are drawn: `Uniform()` or `Prioritized(...)`.
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
        self.crossing = bool(crossing)

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw first steps, and collect what lies before and behind them."""
        drawn = self.by.draw(self._starts(held), count, generator)
        before = steps_before(held, drawn.ids, self.burn_in, self.crossing)
        after = steps_after(held, drawn.ids, self.length, self.crossing)
        steps, real = (np.concatenate(both, axis=1) for both in zip(before, after, strict=True))
        return Draw(filled_up(steps, real), drawn.weights, mask=real)

    def update_priorities(self, held: Held, ids: Ids, priorities: NDArray[Any]) -> None:
        """Hand one priority a sequence on; `ids` as in the batch, or those of the first steps alone."""
        first = ids[:, self.burn_in] if ids.ndim == 2 and ids.shape[1] == self.burn_in + self.length else ids
        super().update_priorities(self._starts(held), first, priorities)

    def _starts(self, held: Held) -> Held:
        return held if self.stride == 1 else held.limited(self._are_starts)

    def _are_starts(self, held: Held, ids: Ids) -> Flags:
        """Tell the steps with which a sequence may begin."""
        on_stride = ids // held.lanes % self.stride == 0
        before = ids - held.lanes
        known = before >= held.first_id
        before = np.where(known, before, ids)
        first = known & (held.fields.are_ends(before) | ~held.fields.are_valid(before))
        return np.asarray(on_stride | first)

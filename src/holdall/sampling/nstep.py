"""n-step returns, summed from the small fields when a batch is drawn.

In:  transitions that another sampler drew.  Out: the same, with the rewards of up to n steps and
the next observation of the last of them; nothing more is stored than without.
Invariant: a return ends at the end of its episode and at the write head. Its value goes on from
the true next observation there, by `discount`; at termination it does not go on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw
from holdall.sampling.choice import Chosen
from holdall.sampling.draw import Held, require_count, require_number
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.stretch import steps_after
from holdall.sampling.uniform import Uniform


class NStep(Chosen):
    """Draw transitions with the discounted rewards of `n` steps.

    In the batch, `obs`, `action` and `extras` are the first step's; `next_obs`, `terminated` and
    `truncated` the last one's; `reward` is the sum of gamma ** k times the k-th reward, added up
    from the first on, in the rewards' dtype but at least float32; `discount` is gamma to the
    number of steps. The target is `reward + discount * ~terminated * value(next_obs)`.

    Args:
        n: Most steps of a return.
        gamma: What a reward is worth a step later.
        by: How the first steps are drawn: `Uniform()` or `Prioritized(...)`.
    """

    def __init__(self, n: int, gamma: float, by: Uniform | Prioritized | None = None) -> None:
        super().__init__(by)
        self.n = require_count("n", n, 1)
        self.gamma = require_number("gamma", gamma, 0.0, 1.0)

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw first steps, and go on from each as far as its episode does."""
        drawn = self.by.draw(held, count, generator)
        steps, real = steps_after(held, drawn.ids, self.n)
        used = np.count_nonzero(real, axis=1)
        powers = [self.gamma**k for k in range(self.n + 1)]
        return Draw(
            drawn.ids,
            drawn.weights,
            last_ids=drawn.ids + (used - 1) * held.lanes,
            reward=_discounted_sum(held.fields.rewards(steps), real, powers),
            discount=np.array(powers, np.float32)[used],
        )


def _discounted_sum(rewards: NDArray[Any], real: NDArray[np.bool_], powers: list[float]) -> NDArray[Any]:
    """Add up the real ones of (batch, n) rewards, from the first on."""
    dtype = np.result_type(rewards.dtype, np.float32)
    # A reward of another episode must not count, be it infinite; -0.0 changes no sum, not even that of zeros.
    counted = np.where(real, rewards.astype(dtype), dtype.type(-0.0))
    with np.errstate(invalid="ignore", over="ignore"):  # what an environment pays is not ours to warn of
        terms = counted * np.array(powers[:-1], dtype)
        total: NDArray[Any] = terms[:, 0].copy()
        for k in range(1, terms.shape[1]):
            total += terms[:, k]
    return total

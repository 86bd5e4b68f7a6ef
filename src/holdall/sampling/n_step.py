"""NStep: transitions with the discounted rewards of several steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdall.batch import Draw, Flags
from holdall.checks import require_count, require_number
from holdall.sampling.composed import ComposedSampler
from holdall.sampling.episodes import find_steps_around
from holdall.sampling.held import Held
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.uniform import Uniform

_MAX_STEPS = 1_000_000
"""More steps than any return has. A row of a draw looks at `n` steps, so a larger `n` would never end."""


class NStep(ComposedSampler):
    """Sampler that draws transitions with the discounted rewards of `n` steps.

    In the batch, `obs`, `action` and `extras` are those of the first step. `next_obs`, `terminated` and `truncated` are
    those of the last step. `reward` is the sum of gamma ** k times the reward of step k. Rewards are added in the order
    of the steps, in their own dtype but at least float32. `discount` is gamma to the power of the number of steps. The
    target is `reward + discount * ~terminated * value(next_obs)`.

    Args:
        n: Largest number of steps of a return. A return stops at the end of its episode, or at the newest step.
        gamma: Discount of a reward per step.
        by: Sampler of the first steps: `Uniform()` or `Prioritized(...)`.

    Examples:
        >>> sampler = holdall.NStep(2, gamma=0.5)
        >>> returns = holdall.ReplayMemory(Box(-1, 1, (3,)), Discrete(2), 100, sampler=sampler, seed=0)
        >>> obs = np.zeros(3, np.float32)
        >>> for _ in range(2):
        ...     returns.add(obs, 0, 1.0, obs, terminated=False, truncated=False)
        >>> batch = returns.sample(2)
        >>> batch.ids, batch.reward  # no step follows transition 1
        (array([1, 1]), array([1., 1.]))
    """

    def __init__(self, n: int, gamma: float, by: Uniform | Prioritized | None = None) -> None:
        super().__init__(by)
        self.n = require_count("n", n, 1, most=_MAX_STEPS)
        self.gamma = require_number("gamma", gamma, 0.0, 1.0)

    @property
    def steps_per_row(self) -> int:
        """Number of steps that `draw` looks at for each row."""
        return self.n

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw first steps, and add up the rewards of the steps that follow them."""
        return self.complete(held, self.by.draw(held, count, generator))

    def complete(self, held: Held, drawn: Draw) -> Draw:
        """Return the draw whose first steps are those of `drawn`."""
        steps, is_real = find_steps_around(held, drawn.ids, 0, self.n)
        step_counts = np.count_nonzero(is_real, axis=1)
        powers = [self.gamma**k for k in range(self.n + 1)]
        return Draw(
            drawn.ids,
            drawn.weights,
            last_ids=np.take_along_axis(steps, step_counts[:, None] - 1, axis=1)[:, 0],
            reward=_sum_discounted(held.fields.rewards(steps), is_real, powers),
            discount=np.array(powers, np.float32)[step_counts],
        )


def _sum_discounted(rewards: NDArray[Any], is_real: Flags, powers: list[float]) -> NDArray[Any]:
    """Add up the discounted rewards, of shape (batch, n, ...), of real steps in the order of the steps."""
    dtype = np.result_type(rewards.dtype, np.float32)
    own_axes = (1,) * (rewards.ndim - 2)
    # Rewards of other episodes may be infinite, so they are replaced. Adding -0.0 changes no sum, not even of zeros.
    counted = np.where(is_real.reshape(*is_real.shape, *own_axes), rewards.astype(dtype), dtype.type(-0.0))
    with np.errstate(invalid="ignore", over="ignore"):  # The environment is responsible for extreme rewards.
        terms = counted * np.array(powers[:-1], dtype).reshape(-1, *own_axes)
        total: NDArray[Any] = terms[:, 0].copy()
        for k in range(1, terms.shape[1]):
            total += terms[:, k]
    return total

"""n-step returns with the arithmetic of Stable-Baselines3's `NStepReplayBuffer`.

In:  rewards and ends of n steps a row.  Out: returns, discounts, and how far each row went.
Invariant: every product and sum is made in its order and dtype, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """The steps from some transitions on, (batch, n)."""

    rewards: NDArray[np.float32]
    ends: NDArray[np.bool_]  # last steps of episodes, and the newest step


class NStepReturns(NamedTuple):
    """What the target of a row is made of."""

    rewards: NDArray[np.float32]  # (batch, 1)
    discounts: NDArray[np.float32]  # (batch, 1)
    steps_taken: NDArray[np.int64]  # (batch,): from the first step to the last

    @classmethod
    def of(cls, run: Run, gamma: float, normalise: Callable[[Any], Any]) -> NStepReturns:
        """Add up the rewards of each row until its first end."""
        n = run.ends.shape[1]
        last = np.where(run.ends.any(axis=1), run.ends.argmax(axis=1), n - 1)
        counts = np.arange(n).reshape(1, -1) <= last[:, None]
        powers = gamma ** np.arange(n, dtype=np.float32).reshape(1, -1)
        returns = (normalise(run.rewards) * powers * counts).sum(axis=1, keepdims=True)
        discounts = gamma ** counts.sum(axis=1, keepdims=True).astype(np.float32)
        return cls(returns, discounts, last)

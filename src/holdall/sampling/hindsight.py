"""Hindsight: transitions told anew, as if what came of them had been the goal (Andrychowicz et al. 2017).

In:  transitions of a goal-conditioned Dict space that another sampler drew.  Out: the same, most of
them with the outcome of a step of their own episode as the goal, and the reward that it deserves.
Invariant: a goal is always what `achieved_key` of a next observation of the same lane and episode
shows, bit for bit.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from holdall.batch import Draw, Goals, RewardFunction
from holdall.errors import ArgumentError
from holdall.sampling.choice import Chosen
from holdall.sampling.draw import Held, Ids, require_number
from holdall.sampling.episodes import Episodes
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.uniform import Uniform

Strategy = Literal["future", "final", "episode"]


class Hindsight(Chosen):
    """Draw transitions, `k` told anew for every one left as it was.

    The first rows of a batch are the ones told anew: a share of k / (k + 1), rounded down.
    Their rewards are `reward_fn(achieved_goal, desired_goal, extras)`, arrays over the rows, cast
    to the dtype of the stored ones; flags stay as they were.

    Args:
        strategy: The goal is the outcome of a step of the same episode: "future", this one or a
            later one; "final", the last one; "episode", any. Of an episode that is still going on,
            what is known so far counts.
        k: Rows told anew for every other.
        reward_fn: As Gymnasium's `compute_reward`.
        by: How transitions are drawn: `Uniform()` or `Prioritized(...)`.
        achieved_key: Key of the observation that tells what was achieved.
        desired_key: Key that tells the goal.
    """

    def __init__(
        self,
        strategy: Strategy,
        k: float,
        reward_fn: RewardFunction,
        *,
        by: Uniform | Prioritized | None = None,
        achieved_key: str = "achieved_goal",
        desired_key: str = "desired_goal",
    ) -> None:
        super().__init__(by)
        if strategy not in get_args(Strategy):
            raise ArgumentError(f"strategy ({strategy!r}) must be one of {list(get_args(Strategy))}; pass one of these")
        if not callable(reward_fn):
            raise ArgumentError(f"reward_fn ({reward_fn!r}) must be callable; pass the environment's compute_reward")
        self.strategy = strategy
        self.k = require_number("k", k, 0.0)
        self._reward_fn = reward_fn
        self._keys = (achieved_key, desired_key)
        self._episodes = Episodes()

    def draw(self, held: Held, count: int, generator: np.random.Generator) -> Draw:
        """Draw transitions, and for most of them a step of the same episode."""
        drawn = self.by.draw(held, count, generator)
        rows = np.arange(int(self.k / (self.k + 1) * count))
        goals = Goals(rows, self._outcomes(held, drawn.ids[rows], generator), *self._keys, self._reward_fn)
        return Draw(drawn.ids, drawn.weights, goals=goals)

    def _outcomes(self, held: Held, ids: Ids, generator: np.random.Generator) -> Ids:
        first, last = self._episodes.bounds(held, ids)
        if self.strategy == "final":
            return last
        begin = ids if self.strategy == "future" else first
        steps = (last - begin) // held.lanes + 1
        return np.asarray(begin + generator.integers(0, steps) * held.lanes)

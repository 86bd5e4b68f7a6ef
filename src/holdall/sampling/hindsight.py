"""Hindsight: transitions relabelled with goals that their own episode achieved (HER)."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from holdall.batch import Draw, Goals, Ids, RewardFunction
from holdall.checks import require_choice, require_number
from holdall.errors import ArgumentError
from holdall.sampling.composed import ComposedSampler
from holdall.sampling.episodes import Episodes
from holdall.sampling.held import Held
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.uniform import Uniform

Strategy = Literal["future", "final", "episode"]


class Hindsight(ComposedSampler):
    """Sampler that draws transitions, and relabels `k` of them with another goal for every one that keeps its goal.

    The first rows of a batch are relabelled: a share of k / (k + 1), rounded down. Their rewards are
    `reward_fn(achieved_goal, desired_goal, extras)`, computed for all rows at once and converted to the dtype of the
    stored rewards. `terminated` and `truncated` do not change.

    Args:
        strategy: Step of the same episode whose outcome becomes the goal. "future": the transition itself or a later
            step. "final": the last step. "episode": any step. Of an episode that has not ended, the steps so far count.
        k: Number of relabelled rows for every other row.
        reward_fn: Function such as Gymnasium's `compute_reward`.
        by: Sampler of the transitions: `Uniform()` or `Prioritized(...)`.
        achieved_key: Key of the observation that has the achieved goal.
        desired_key: Key of the observation that has the desired goal.

    Examples:
        >>> def compute_reward(achieved_goal, desired_goal, extras):
        ...     return (achieved_goal == desired_goal).all(axis=-1).astype(np.float32)
        >>> sampler = holdall.Hindsight("future", k=4, reward_fn=compute_reward)
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
        require_choice("strategy", strategy, get_args(Strategy))
        if not callable(reward_fn):
            raise ArgumentError(f"reward_fn ({reward_fn!r}) must be callable. Pass the environment's compute_reward.")
        for name, key in (("achieved_key", achieved_key), ("desired_key", desired_key)):
            if not isinstance(key, str):
                raise ArgumentError(f"{name} ({key!r}) must be a string. Pass a key of the observation space.")
        self.strategy = strategy
        self.k = require_number("k", k, 0.0)
        self.reward_fn = reward_fn
        self._achieved_key = achieved_key
        self._desired_key = desired_key
        self._episodes = Episodes()

    def count_relabelled(self, count: int) -> int:
        """Return how many rows of a batch of `count` rows get another goal."""
        return int(self.k / (self.k + 1) * count)

    def draw(self, held: Held, count: int, generator: np.random.Generator, relabelled_count: int | None = None) -> Draw:
        """Draw transitions, and goals for the first `relabelled_count` of them.

        A goal is the outcome of a step of the same episode. By default, `relabelled_count` is
        `count_relabelled(count)`.
        """
        reward_shape = held.fields.rewards(np.empty(0, np.int64)).shape[1:]
        if reward_shape:
            raise ArgumentError(
                f"sampler: Hindsight computes one reward a step, but the memory has reward_shape={reward_shape}. Use "
                "another sampler, or store rewards for goals in a memory of their own."
            )
        if relabelled_count is None:
            relabelled_count = self.count_relabelled(count)
        drawn = self.by.draw(held, count, generator)
        outcomes = self._draw_outcomes(held, drawn.ids[:relabelled_count], generator)
        return Draw(drawn.ids, drawn.weights, goals=self.make_goals(outcomes))

    def make_goals(self, outcomes: Ids) -> Goals:
        """Return goals for the first rows of a batch: what the transitions `outcomes` achieved."""
        return Goals(np.arange(len(outcomes)), outcomes, self._achieved_key, self._desired_key, self.reward_fn)

    def _draw_outcomes(self, held: Held, ids: Ids, generator: np.random.Generator) -> Ids:
        """Draw a step of the same episode for each of `ids`."""
        first, last = self._episodes.find_bounds(held, ids)
        if self.strategy == "final":
            return held.find_ids(last)[0]
        begin = held.find_places(ids) if self.strategy == "future" else first
        return held.find_ids(begin + generator.integers(0, last - begin + 1))[0]

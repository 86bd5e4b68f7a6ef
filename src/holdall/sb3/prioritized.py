"""PrioritizedReplayBuffer: a replay buffer for Stable-Baselines3 that draws by priority.

In:  what its algorithms add, and priorities.  Out: its samples, with ids and weights beside them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch as th
from numpy.typing import NDArray
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize

from holdall.batch import Batch, Draw
from holdall.sampling import Prioritized
from holdall.sb3.replay import ReplayBuffer


class PrioritizedSamples(NamedTuple):
    """Stable-Baselines3's samples, with weights for the loss and ids for `update_priorities`."""

    observations: Any
    actions: th.Tensor
    next_observations: Any
    dones: th.Tensor
    rewards: th.Tensor
    discounts: th.Tensor | None
    weights: th.Tensor  # (batch, 1)
    ids: NDArray[np.int64]  # for `update_priorities`

    @classmethod
    def of(cls, samples: Any, weights: th.Tensor, ids: NDArray[np.int64]) -> PrioritizedSamples:
        """Put weights and ids beside samples; those of Stable-Baselines3 2.6 have no discounts."""
        return cls(**({"discounts": None} | samples._asdict()), weights=weights, ids=ids)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` that draws transitions in proportion to their priorities.

    Stable-Baselines3's algorithms do not use priorities: multiply the loss by `weights`, and pass the TD errors to
    `update_priorities(samples.ids, errors)`, in a `train` of your own; docs/samplers.md has one for DQN.

    Args:
        args: As in `ReplayBuffer`: buffer_size, observation_space, action_space, device, n_envs, ...
        alpha: See `holdall.Prioritized`.
        beta: The same; it can be changed later, as `buffer.sampler.beta`.
        settings: As in `ReplayBuffer`: n_steps, gamma, budget, prefer, spill_dir, prefetch.
    """

    def __init__(self, *args: Any, alpha: float = 0.6, beta: float = 0.4, **settings: Any) -> None:
        self._alpha, self._beta = alpha, beta
        super().__init__(*args, **settings)

    @property
    def sampler(self) -> Prioritized:
        """The memory's sampler."""
        sampler: Any = self.memory.sampler  # a Prioritized: `_own_draws` and `resume` pass one
        return sampler  # type: ignore[no-any-return]  # see above

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions in proportion to their priorities."""
        if self._is_delivered(env):
            return self._delivered(batch_size)
        draw = self.memory.draw(batch_size)
        samples: ReplayBufferSamples | DictReplayBufferSamples = self._samples(draw.ids, env)
        weights = self._tensor(draw.weights.reshape(-1, 1))
        return PrioritizedSamples.of(samples, weights, draw.ids)

    def _drawn(self, batch_size: int) -> Draw:
        draw = self.memory.draw(batch_size)
        return replace(self._recipe(draw.ids), weights=draw.weights)

    def _samples_on_device(self, batch: Batch) -> Any:
        return PrioritizedSamples.of(super()._samples_on_device(batch), batch.weights.reshape(-1, 1), batch.ids)

    def update_priorities(self, ids: NDArray[np.int64], priorities: Any) -> None:
        """Set the priorities of a batch, such as the sizes of its TD errors; see `ReplayMemory`."""
        numbers = priorities.detach().cpu().numpy() if isinstance(priorities, th.Tensor) else np.asarray(priorities)
        self.memory.update_priorities(ids, numbers.reshape(-1))

    def _own_draws(self) -> dict[str, Any]:
        # Stable-Baselines3 seeds NumPy's global generator before it makes the buffer.
        seed = int(np.random.randint(2**31))  # noqa: NPY002  as everything else here
        return {"sampler": Prioritized(self._alpha, self._beta), "seed": seed}

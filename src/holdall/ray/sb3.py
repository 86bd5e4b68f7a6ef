"""Stable-Baselines3's learners over shards: a replay buffer, and actors that play with a model's policy.

In:  a model's settings.  Out: its samples, drawn over all shards; actions of its policy, elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from holdall.cluster.collect import MakeAct
from holdall.cluster.memory import ReplayMemory
from holdall.sampling import Prioritized
from holdall.sb3 import ReplayBuffer as LocalReplayBuffer
from holdall.sb3.prioritized import PrioritizedSamples


class ReplayBuffer(LocalReplayBuffer):
    """`holdall.sb3.ReplayBuffer` over shards.

    `DQN(..., replay_buffer_class=holdall.ray.sb3.ReplayBuffer, replay_buffer_kwargs={"shards": 2})`

    It draws as its memory's sampler does, and not in Stable-Baselines3's order. With `Prioritized(...)` samples have
    weights and ids, see `holdall.sb3.PrioritizedReplayBuffer`.

    Args:
        shards: See `holdall.ray.ReplayMemory`, as all further settings; `memory` is that memory.
    """

    def __init__(
        self, buffer_size: int, observation_space: spaces.Space[Any], action_space: spaces.Space[Any],
        device: th.device | str = "auto", n_envs: int = 1, optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True, **settings: Any,
    ) -> None:  # fmt: skip
        self._settings = settings
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
        )

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> Any:
        """Draw transitions over all shards."""
        batch = self.memory.sample(batch_size)
        samples = self._as_samples(batch, self._normalize_reward(batch.reward.reshape(-1, 1), env), env)
        if not isinstance(self.memory.sampler, Prioritized):
            return samples
        weights = self._tensor(batch.weights.reshape(-1, 1))
        return PrioritizedSamples.of(samples, weights, batch.ids)

    def update_priorities(self, ids: NDArray[np.int64], priorities: Any) -> None:
        """Set the priorities of a batch, such as the sizes of its TD errors."""
        numbers = priorities.detach().cpu().numpy() if isinstance(priorities, th.Tensor) else np.asarray(priorities)
        self.memory.update_priorities(ids, numbers.reshape(-1))

    def size(self) -> int:
        """Count the transitions that all actors have added and that are held."""
        return len(self.memory)

    def _new_memory(self) -> Any:
        observed, action = self._stored_spaces()
        capacity = self.buffer_size * self.n_envs
        return ReplayMemory(observed, action, capacity, self.n_envs, **self._settings)


def epsilon_greedy(model: BaseAlgorithm, num_actors: int, base: float = 0.4, exponent: float = 7.0) -> MakeAct:
    """Return what `collect` makes actors' policies with: a model's own, each actor exploring by its own share.

    Actor i takes a random action with probability base ** (1 + exponent * i / (num_actors - 1)).
    """
    policy_class, arguments = type(model.policy), model.policy._get_constructor_parameters()
    action_space = model.action_space

    def make(number: int) -> _EpsilonGreedy:
        share = base ** (1 + exponent * number / max(1, num_actors - 1))
        return _EpsilonGreedy(policy_class(**arguments), action_space, share, number)

    return make


def weights_of(model: BaseAlgorithm) -> dict[str, NDArray[Any]]:
    """Return a policy's weights as `Collection.send` takes them."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in model.policy.state_dict().items()}


class _EpsilonGreedy:
    """A policy that now and then does something else."""

    def __init__(self, policy: Any, action_space: spaces.Space[Any], share: float, seed: int) -> None:
        th.set_num_threads(1)
        self._policy = policy
        self._policy.set_training_mode(False)
        self._action_space = action_space
        self._action_space.seed(seed)
        self._share = share
        self._generator = np.random.default_rng(seed)

    def load(self, weights: dict[str, NDArray[Any]]) -> None:
        """Take over a learner's weights."""
        self._policy.load_state_dict({name: th.as_tensor(array.copy()) for name, array in weights.items()})

    def __call__(self, obs: Any) -> Any:
        if self._generator.random() < self._share:
            return self._action_space.sample()
        return self._policy.predict(obs, deterministic=True)[0]

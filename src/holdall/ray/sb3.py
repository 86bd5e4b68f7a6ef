"""Stable-Baselines3 over shards: a replay buffer, and actors that play with a model's policy."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from holdall.cluster.calls import get_machine_address
from holdall.cluster.config import ClusterSettings
from holdall.cluster.memory import ReplayMemory
from holdall.errors import ArgumentError
from holdall.ray.players import MakeAct
from holdall.sampling import Prioritized
from holdall.sb3 import ReplayBuffer as LocalReplayBuffer
from holdall.sb3.prioritized import PrioritizedSamples
from holdall.schema import move_to_host

_LOADED_WITH = {field.name for field in dataclasses.fields(ClusterSettings)} - {"url"} | {"sampler"}
"""Settings that an unpickled buffer passes to `ReplayMemory.load`. Not its name, which the first buffer may use."""


class ReplayBuffer(LocalReplayBuffer):
    """`holdall.sb3.ReplayBuffer` over shards.

    `DQN(..., replay_buffer_class=holdall.ray.sb3.ReplayBuffer, replay_buffer_kwargs={"shards": 2})`

    The memory's sampler draws, so the same seed does not give Stable-Baselines3's batches. With `Prioritized(...)`, or
    `NStep(..., by=Prioritized(...))`, samples have weights and ids, see `holdall.sb3.PrioritizedReplayBuffer`. Arrays
    over slots, such as `observations`, are not available.

    `model.save_replay_buffer` keeps all transitions and priorities, compressed, if the shards run on this machine.
    Otherwise use `memory.save(url)`. To continue, make the model again with the same settings, and call
    `model.replay_buffer.adopt(holdall.ray.ReplayMemory.load(url))`.

    Args:
        shards: See `holdall.ray.ReplayMemory`. All other settings of that class are accepted, too.

    Attributes:
        memory: The `holdall.ray.ReplayMemory`.
    """

    _casts = True  # Steps go through `memory.add`, because shards have no store in this process.

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        **settings: Any,
    ) -> None:
        self._settings = settings
        self._ticks = 0  # Steps that this process added.
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
        samples = self._make_host_samples(batch, env)
        sampler = self.memory.sampler
        if not isinstance(getattr(sampler, "by", sampler), Prioritized):
            return samples
        weights = self._to_tensor(batch.weights.reshape(-1, 1))
        return PrioritizedSamples.of(samples, weights, batch.ids)

    def update_priorities(self, ids: NDArray[np.int64], priorities: Any) -> None:
        """Set the priorities of a batch to, for example, the absolute values of its TD errors."""
        self.memory.update_priorities(ids, np.asarray(move_to_host(priorities)).reshape(-1))

    def size(self) -> int:
        """Return the number of transitions that all actors have added and that are held."""
        return len(self.memory)

    def view_field(self, name: str) -> Any:
        """Raise ArgumentError. Transitions of shards have no slots."""
        raise ArgumentError(
            f"{name}: a buffer over shards has no arrays over slots. Use buffer.memory.sample or buffer.memory.gather."
        )

    def _add_cast(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        super()._add_cast(obs, next_obs, action, reward, done, infos)
        self._ticks += 1

    def _count_ticks(self) -> int:
        """Return how many steps this process has added. Shards do not record which process added a transition."""
        return self._ticks

    def reset(self) -> None:
        """Forget every transition."""
        super().reset()
        self._ticks = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return everything, with the files of a checkpoint instead of the memory."""
        memory: Any = self.memory
        here = get_machine_address()
        elsewhere = [status.node for status in memory.shards() if status.node not in {"", here}]
        if elsewhere:
            raise ArgumentError(
                f"The buffer is saved on {here}, but has shards on {elsewhere[0]}. Use buffer.memory.save(url) with a "
                "url that all machines see."
            )
        with tempfile.TemporaryDirectory() as folder:
            memory.save(folder, keep=1).result()
            paths = [path for path in Path(folder).rglob("*") if path.is_file()]
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.__dict__ | {"memory": files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start shards with the saved transitions."""
        self.__dict__.update(state)
        settings = {name: value for name, value in self._settings.items() if name in _LOADED_WITH}
        with tempfile.TemporaryDirectory() as folder:
            for name, content in state["memory"].items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            memory: Any = ReplayMemory.load(folder, **settings, journal_url=self._settings.get("url"))
            # Wait until all shards have opened their files, because the folder is deleted next.
            len(memory)
        self.memory = memory

    def _new_memory(self) -> Any:
        observation_space, action_space = self._describe_spaces()
        capacity = self.buffer_size * self.n_envs
        return ReplayMemory(observation_space, action_space, capacity, self.n_envs, **self._settings)


def epsilon_greedy(model: BaseAlgorithm, num_actors: int, base: float = 0.4, exponent: float = 7.0) -> MakeAct:
    """Return `make_act` for `collect`: actors play with the model's policy, and each explores with its own probability.

    Actor i takes a random action with probability base ** (1 + exponent * i / (num_actors - 1)).
    """
    policy_class = type(model.policy)
    arguments = model.policy._get_constructor_parameters()
    action_space = model.action_space

    def make(number: int) -> _EpsilonGreedy:
        probability = base ** (1 + exponent * number / max(1, num_actors - 1))
        return _EpsilonGreedy(policy_class(**arguments), action_space, probability, number)

    return make


def weights_of(model: BaseAlgorithm) -> dict[str, NDArray[Any]]:
    """Return the weights of a model's policy for `Collection.send`."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in model.policy.state_dict().items()}


class _EpsilonGreedy:
    """A policy that takes a random action with the given probability."""

    def __init__(self, policy: Any, action_space: spaces.Space[Any], probability: float, seed: int) -> None:
        th.set_num_threads(1)
        self._policy = policy
        self._policy.set_training_mode(False)
        self._action_space = action_space
        self._action_space.seed(seed)
        self._probability = probability
        self._generator = np.random.default_rng(seed)

    def load(self, weights: dict[str, NDArray[Any]]) -> None:
        """Use the learner's weights from now on."""
        self._policy.load_state_dict({name: th.as_tensor(array.copy()) for name, array in weights.items()})

    def __call__(self, obs: Any) -> Any:
        if self._generator.random() < self._probability:
            return self._action_space.sample()
        return self._policy.predict(obs, deterministic=True)[0]

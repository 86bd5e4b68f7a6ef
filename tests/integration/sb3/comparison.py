"""The same training with Stable-Baselines3's buffer and with holdall's, and a comparison of every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer as PlainReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from holdall.sb3 import ReplayBuffer

from .environments import repeat

ALGORITHMS: dict[str, type[OffPolicyAlgorithm]] = {"DQN": DQN, "DDPG": DDPG, "TD3": TD3, "SAC": SAC}
SEED = 5
LEARNING_STARTS = 20
BATCH = 16

Action = Callable[[OffPolicyAlgorithm], object]


class SmallExtractor(BaseFeaturesExtractor):
    """A small network: one convolution for every image, and all other observations flattened."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        parts = observation_space if isinstance(observation_space, spaces.Dict) else {"": observation_space}
        super().__init__(observation_space, features_dim=1)
        self.eyes = torch.nn.ModuleDict()
        width = 0
        for key, space in parts.items():
            if isinstance(space, spaces.Box) and len(space.shape) == 3:
                eye = torch.nn.Conv2d(space.shape[0], 3, kernel_size=7, stride=7)
                self.eyes[key or "_"] = torch.nn.Sequential(eye, torch.nn.ReLU(), torch.nn.Flatten())
                width += 3 * (space.shape[1] // 7) * (space.shape[2] // 7)
            else:
                width += spaces.flatdim(space)
        self._features_dim = width

    def forward(self, observations: Any) -> torch.Tensor:
        """Return the features of all observations in one row."""
        parts = observations if isinstance(observations, dict) else {"": observations}
        seen = [self.eyes[key or "_"](part) if part.ndim == 4 else part.flatten(1) for key, part in parts.items()]
        return torch.cat(seen, dim=1)


@dataclass(frozen=True)
class Task:
    """The settings of a training, except for the buffer."""

    environment: Callable[[], Any]
    algorithm: str = "DDPG"
    policy: str = "MlpPolicy"
    lanes: int = 1
    buffer_size: int = 1_000
    wrap: Callable[[VecEnv], VecEnv] = lambda vec_env: vec_env
    settings: dict[str, Any] = field(default_factory=dict)

    def make_model(self, buffer_class: type[PlainReplayBuffer] | None, **settings: Any) -> OffPolicyAlgorithm:
        """Make an algorithm that stores its experience in `buffer_class`."""
        policy: dict[str, Any] = {"net_arch": [8]}
        if self.policy != "MlpPolicy":
            policy["features_extractor_class"] = SmallExtractor
        chosen: dict[str, Any] = {"replay_buffer_class": buffer_class, "policy_kwargs": policy, "seed": SEED}
        chosen |= {"learning_starts": LEARNING_STARTS, "batch_size": BATCH, "train_freq": 1, "device": "cpu"}
        chosen |= {"buffer_size": self.buffer_size, "learning_rate": 0.01}
        if self.algorithm == "DQN":
            chosen["target_update_interval"] = 25
        else:
            noise = NormalActionNoise(np.zeros(2), np.full(2, 0.1))
            chosen["action_noise"] = None if self.algorithm == "SAC" else noise
        vec_env = self.wrap(DummyVecEnv(repeat(self.environment, self.lanes)))
        return ALGORITHMS[self.algorithm](self.policy, vec_env, **(chosen | self.settings | settings))


def make_learning(steps: int, **how: Any) -> Action:
    """Return a function that learns for `steps` steps."""
    return lambda model: model.learn(steps, **how)


def train(model: OffPolicyAlgorithm, *acts: Action) -> OffPolicyAlgorithm:
    """Call `acts` with a model that was just made, because making a model seeds the shared generators."""
    for act in acts:
        act(model)
    return model


def assert_same_training(task: Task, *acts: Action, **settings_of_ours: Any) -> None:
    """Call `acts` with either buffer, and compare everything that was learned."""
    acts = acts or (make_learning(LEARNING_STARTS + 55 * task.lanes),)
    plain = train(task.make_model(None), *acts)
    ours = train(task.make_model(ReplayBuffer, **settings_of_ours), *acts)
    assert type(plain.replay_buffer) in {PlainReplayBuffer, DictReplayBuffer}
    assert type(ours.replay_buffer) is ReplayBuffer
    assert plain._n_updates > 50, "the training was too short for a comparison"
    assert_same_learning(plain, ours)


def assert_same_learning(plain: OffPolicyAlgorithm, ours: OffPolicyAlgorithm) -> None:
    """Compare every tensor of policy, optimizers and entropy coefficient, byte for byte."""
    assert plain.num_timesteps == ours.num_timesteps
    expected = dict(list_learned_tensors(plain))
    got = dict(list_learned_tensors(ours))
    assert expected.keys() == got.keys()
    differing = [name for name, bits in expected.items() if got[name] != bits]
    assert not differing, f"{len(differing)} of {len(expected)} tensors differ, for example {differing[:3]}"


def list_learned_tensors(model: OffPolicyAlgorithm) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the bytes of every tensor that training changes."""
    _, variables = model._get_torch_save_params()
    yield from _list_bits("", model.get_parameters())
    for name in variables:
        yield from _list_bits(name, getattr(model, name))


def _list_bits(name: str, value: Any) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, torch.Tensor):
        yield name, value.detach().contiguous().numpy().tobytes()
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _list_bits(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for position, part in enumerate(value):
            yield from _list_bits(f"{name}.{position}", part)
    else:
        yield name, repr(value).encode()

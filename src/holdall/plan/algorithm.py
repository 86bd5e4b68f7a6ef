"""A model of Stable-Baselines3 as a spec describes it, on an environment that only has spaces.

In:  a spec.  Out: the algorithm's own object, with its own policy and buffer.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack

from holdall.errors import ArgumentError, MissingPackageError
from holdall.plan.environment import make
from holdall.plan.spec import Spec

EPISODE_STEPS = 200


class SpaceEnv(gym.Env[Any, Any]):
    """Observations of the right shape and dtype, always the same ones, and episodes that are truncated."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space = observation
        self.action_space = bounded(action)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return _zeros(self.observation_space), {}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Pass a step; nothing happens in it."""
        self._steps += 1
        return _zeros(self.observation_space), 0.0, False, self._steps >= EPISODE_STEPS, {}


def build_model(spec: Spec, *, capacity: int | None = None, env: VecEnv | None = None, **settings: Any) -> Any:
    """Construct the algorithm; `capacity` replaces the spec's where only the networks are of interest."""
    algorithm = spec.algorithm
    try:
        cls = getattr(importlib.import_module(algorithm.package), algorithm.class_name)
    except ImportError as error:
        raise MissingPackageError(
            f"algo ({spec.algo}) is in {algorithm.package}, which is not installed; pip install {algorithm.package}, "
            "or leave networks out with --no-networks"
        ) from error
    if spec.on_policy:
        settings |= {"n_steps": spec.rollout_steps}
        if spec.algo == "ppo":
            settings |= {"n_epochs": 1}
    else:
        settings |= {"buffer_size": spec.capacity if capacity is None else capacity}
        settings |= {"optimize_memory_usage": spec.optimize_memory_usage}
        settings |= {"replay_buffer_kwargs": {"handle_timeout_termination": spec.handle_timeout_termination}}
    if algorithm.batch_size is not None:
        settings["batch_size"] = spec.batch
    policy_kwargs = {name: _resolved(name, value) for name, value in spec.policy_kwargs.items()}
    model = cls(spec.policy_name, env or make_env(spec), policy_kwargs=policy_kwargs, device=spec.device, **settings)
    model.set_logger(configure(None, []))
    return model


def make_env(spec: Spec, *, real: bool = False) -> VecEnv:
    """Make the vector environment of the spec: the real one, or one that only has its spaces."""
    if real and spec.env_id:
        makers: list[Any] = [partial(make, spec.env_id, spec.wrapper)] * spec.num_envs
    else:
        makers = [partial(SpaceEnv, spec.observation, spec.action)] * spec.num_envs
    envs = SubprocVecEnv(makers, spec.method) if spec.vec_env != "dummy" else DummyVecEnv(makers)
    return VecFrameStack(envs, spec.frame_stack) if real and spec.env_id and spec.frame_stack > 1 else envs


def fill_without_writing(model: Any) -> None:
    """Let a buffer count as filled; its arrays stay as they were allocated."""
    buffer = getattr(model, "replay_buffer", None) or model.rollout_buffer
    buffer.full = True
    buffer.pos = 0


def bounded(action: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return an action space with finite bounds, which some algorithms demand."""
    if isinstance(action, spaces.Box) and not action.is_bounded():
        return spaces.Box(-1, 1, action.shape, np.dtype(action.dtype).type)
    return action


def _zeros(space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _zeros(child) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    return np.zeros(space.shape or (), space.dtype)


def _resolved(name: str, value: Any) -> Any:
    """Turn the names of torch's activations and optimizers into the classes; everything else is data."""
    if name == "activation_fn" and isinstance(value, str):
        return _class_of(torch.nn, value, torch.nn.Module, name)
    if name == "optimizer_class" and isinstance(value, str):
        return _class_of(torch.optim, value, torch.optim.Optimizer, name)
    return value


def _class_of(module: Any, value: str, base: type, name: str) -> type:
    found = getattr(module, value.rpartition(".")[2], None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ArgumentError(f"policy_kwargs[{name!r}] ({value!r}) names no {base.__name__} of {module.__name__}")
    return found

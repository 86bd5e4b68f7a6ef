"""Trainings that can be stopped and resumed. As a program, a training kills itself after its first checkpoint."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DDPG, DQN, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.noise import OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from holdall.sb3 import CheckpointCallback, HerReplayBuffer, PrioritizedDQN, ReplayBuffer
from holdall.sb3.contrib import PrioritizedQRDQN

from .test_same_her import Reach

SEED = 3
ARM = spaces.Box(-2.0, 2.0, (2,), np.float32)
VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)


class DriftEnv(gym.Env[Any, Any]):
    """A walk that ends at random. The next step depends on its place, its generator and the action."""

    def __init__(self, action_space: spaces.Space[Any] = ARM) -> None:
        self.observation_space = VECTOR
        self.action_space = action_space
        self.place = np.zeros(5, np.float32)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed, options=options)
        self.place = self.np_random.normal(size=5).astype(np.float32)
        self.steps = 0
        return self.place.copy(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        push = float(np.sum(np.asarray(action, np.float64)))
        self.place = (0.9 * self.place + 0.1 * push + self.np_random.normal(size=5)).astype(np.float32)
        reward = -float(np.abs(self.place).mean())
        return self.place.copy(), reward, bool(self.np_random.random() < 0.05), self.steps >= 17, {}


class CameraEnv(DriftEnv):
    """The walk as an image with a bright square at its position."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(3))
        self.observation_space = spaces.Box(0, 255, (36, 36, 1), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        _, info = super().reset(seed=seed, options=options)
        return self._draw(), info

    def step(self, action: Any) -> Any:
        _, *rest = super().step(action)
        return self._draw(), *rest

    def _draw(self) -> Any:
        image = np.zeros((36, 36, 1), np.uint8)
        row, column = (int(18 + 5 * place) % 32 for place in self.place[:2])
        image[row : row + 4, column : column + 4] = 255
        return image


def make_environments(kind: str, lanes: int = 2) -> VecEnv:
    """Return the environments of a training, the same for every process."""
    space: spaces.Space[Any] = spaces.Discrete(3) if kind.endswith("DQN") else ARM
    if kind == "HER":
        env: VecEnv = DummyVecEnv([lambda: Reach(informed=True)] * lanes)
    else:
        env = DummyVecEnv([lambda: DriftEnv(space)] * lanes)
    if kind == "SAC normalized":
        env = VecNormalize(env)
    env.seed(SEED)
    return env


def make_model(kind: str, lanes: int = 2, **settings: Any) -> BaseAlgorithm:
    """Return an untrained model."""
    torch.set_num_threads(1)
    common: Any = {
        "env": make_environments(kind, lanes),
        "learning_starts": 20,
        "batch_size": 16,
        "buffer_size": 150,
        "seed": SEED,
        "device": "cpu",
        "policy_kwargs": {"net_arch": [16]},
        "replay_buffer_class": ReplayBuffer,
        "train_freq": 2,
    } | settings
    if kind == "DQN":
        return DQN("MlpPolicy", target_update_interval=50, **common)
    if kind.endswith("DQN"):
        prioritized: Any = {"PrioritizedDQN": PrioritizedDQN, "PrioritizedQRDQN": PrioritizedQRDQN}[kind]
        del common["replay_buffer_class"]
        return prioritized("MlpPolicy", target_update_interval=50, alpha=0.7, **common)  # type: ignore[no-any-return]
    if kind == "DDPG":
        noise = OrnsteinUhlenbeckActionNoise(np.zeros(2), 0.1 * np.ones(2))
        return DDPG("MlpPolicy", action_noise=noise, **common)
    if kind == "HER":
        # There are fewer slots than steps, so episodes are evicted before the checkpoint.
        common |= {"replay_buffer_class": HerReplayBuffer, "buffer_size": 90}
        return SAC("MultiInputPolicy", replay_buffer_kwargs={"copy_info_dict": True}, **common)
    return SAC("MlpPolicy", **common)


def _find_inner_env(env: VecEnv) -> Any:
    while not isinstance(env, DummyVecEnv):
        env = env.venv  # type: ignore[attr-defined]  # Everything else is a wrapper.
    return env


def get_state(env: VecEnv) -> bytes:
    """Return the positions of the environments. holdall saves their generators."""
    inner = _find_inner_env(env)
    if isinstance(inner.envs[0].unwrapped, Reach):
        reaching = [one.unwrapped for one in inner.envs]
        return json.dumps([[one.at.tolist(), one.goal.tolist(), one.steps] for one in reaching]).encode()
    return json.dumps([[one.unwrapped.place.tolist(), one.unwrapped.steps] for one in inner.envs]).encode()


def set_state(env: VecEnv, state: bytes) -> None:
    """Restore the positions of the environments."""
    env.reset()
    inner = _find_inner_env(env)
    if isinstance(inner.envs[0].unwrapped, Reach):
        for one, (at, goal, steps) in zip(inner.envs, json.loads(state), strict=True):
            reaching = one.unwrapped
            reaching.at = np.array(at, np.float32)
            reaching.goal = np.array(goal, np.float32)
            reaching.steps = steps
        return
    for one, (place, steps) in zip(inner.envs, json.loads(state), strict=True):
        one.unwrapped.place = np.array(place, np.float32)
        one.unwrapped.steps = steps


ENV_STATE = (get_state, set_state)


class KilledCallback(CheckpointCallback):
    """Kills its process once its checkpoint is acknowledged."""

    def _on_rollout_start(self) -> None:
        super()._on_rollout_start()
        if self._handle is not None:
            self._handle.result()
            os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, steps: int, path: str, with_state: bool) -> None:
    """Train until the callback kills the process."""
    callback = KilledCallback(steps // 2, Path(path), env_state=ENV_STATE if with_state else None)
    make_model(kind).learn(10 * steps, callback=callback)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "state")

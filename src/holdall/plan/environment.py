"""A user's environment, made and stepped in a throwaway process.

In:  a name that gymnasium knows, or `module:Class`.  Out: its spaces, and what one more of it takes.
Runs the user's own code, which is why it never runs in the process that plans.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from holdall.errors import ArgumentError
from holdall.machine import held_bytes
from holdall.plan import spacetext

_FEW_STEPS = 50
"""Steps after which an environment has loaded what it needs."""


def make(env_id: str, wrapper: str = "") -> Any:
    """Make one environment."""
    env = _made(env_id)
    if wrapper == "atari":
        from stable_baselines3.common.atari_wrappers import AtariWrapper  # noqa: PLC0415 it brings torch along

        env = AtariWrapper(env)
    return env


def _made(env_id: str) -> Any:
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type):
                return found()
        return gym.make(env_id)
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(
            f"env ({env_id!r}) cannot be made here ({error}); install what it needs, write module:Class for your own "
            "class, or give --obs and --action instead"
        ) from error


def measured(env_id: str, wrapper: str, with_torch: bool = False) -> dict[str, Any]:
    """Make an environment twice and step both: spaces, and bytes of the first and of one more.

    Args:
        with_torch: Whether torch is there before the environment: a trainer has it in any case.
    """
    if with_torch or wrapper:
        importlib.import_module("stable_baselines3")
    had_torch = "torch" in sys.modules
    before = held_bytes()
    first = make(env_id, wrapper)
    _step(first)
    between = held_bytes()
    second = make(env_id, wrapper)
    _step(second)
    after = held_bytes()
    found = {
        "observation": spacetext.describe(first.observation_space),
        "action": spacetext.describe(first.action_space),
        "first_bytes": max(between.resident - before.resident, 0),
        "first_anonymous_bytes": max(between.anonymous - before.anonymous, 0),
        "each_bytes": max(after.anonymous - between.anonymous, 0),
        "brought_torch": "torch" in sys.modules and not had_torch,
    }
    first.close()
    second.close()
    return found


def _step(env: Any) -> None:
    for _, _ in zip(range(_FEW_STEPS), played(env, seed=0), strict=False):
        pass


def played(env: Any, seed: int) -> Iterator[tuple[Any, Any, float, Any, bool, bool]]:
    """Play random actions for ever: obs, action, reward, next_obs, terminated, truncated."""
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    while True:
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        yield obs, action, float(np.asarray(reward).item()), next_obs, bool(terminated), bool(truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs

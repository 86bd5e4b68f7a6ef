"""Environments that a bench runs: by the name that gymnasium knows, or as `module:Class`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from holdall.errors import ArgumentError


def make_env(name: str, wrapper: str = "") -> Any:
    """Make one environment. `wrapper` is "atari" for Stable-Baselines3's AtariWrapper, or empty.

    Modules of the working directory are found after those of the libraries, because processes that measure start with
    Python's option -P.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    module, _, class_name = name.rpartition(":")
    try:
        found = getattr(importlib.import_module(module), class_name, None) if module else None
        env: Any = found() if isinstance(found, type) else gym.make(name)
    except (gym.error.Error, ImportError) as error:
        raise ArgumentError(
            f"env ({name!r}) cannot be made here ({error}). Install its packages, or write module:Class for a class of "
            "your own."
        ) from error
    if wrapper != "atari":
        return env
    return importlib.import_module("stable_baselines3.common.atari_wrappers").AtariWrapper(env)


def play_randomly(env: Any, seed: int) -> Iterator[tuple[Any, Any, float, Any, bool, bool]]:
    """Yield obs, action, reward, next_obs, terminated and truncated of random steps without end."""
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    while True:
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        yield obs, action, float(np.asarray(reward).item()), next_obs, bool(terminated), bool(truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs

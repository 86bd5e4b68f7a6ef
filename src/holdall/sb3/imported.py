"""A memory of the arrays that `holdall.sb3.unpickle` left behind."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from holdall.replay import ReplayMemory
from holdall.sb3.replay import stored_space

_STEPS_AT_ONCE = 256


def memory_of(folder: Path, told: Callable[[int, int], None] = lambda _done, _all: None) -> ReplayMemory:
    """Add all transitions to a new memory, as `holdall.sb3.ReplayBuffer` would have.

    Args:
        told: Is told how many transitions are done, and how many there are.
    """
    words = json.loads((folder / "words.json").read_text(encoding="utf-8"))

    def opened(name: str) -> Any:
        return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

    keys = words["keys"]
    names = ("observations", "next_observations")
    obs: Any
    following: Any
    obs, following = (
        opened(name) if keys is None else {key: opened(f"{name}.{i}") for i, key in enumerate(keys)} for name in names
    )
    actions, rewards, dones, timeouts = (opened(name) for name in ("actions", "rewards", "dones", "timeouts"))
    stored = {key: stored_space(rows.shape[2:], rows.dtype) for key, rows in (obs if keys else {"": obs}).items()}
    memory = ReplayMemory(
        spaces.Dict(OrderedDict(stored)) if keys else stored[""],
        stored_space(actions.shape[2:], actions.dtype),
        words["capacity"],
        words["num_envs"],
    )
    for start in range(0, len(rewards), _STEPS_AT_ONCE):
        steps = slice(start, start + _STEPS_AT_ONCE)
        done, cut = np.asarray(dones[steps], np.bool_), np.asarray(timeouts[steps], np.bool_)
        memory.extend(
            {key: np.asarray(rows[steps]) for key, rows in obs.items()} if keys else np.asarray(obs[steps]),
            np.asarray(actions[steps]),
            np.asarray(rewards[steps]),
            {key: np.asarray(rows[steps]) for key, rows in following.items()} if keys else np.asarray(following[steps]),
            done ^ cut,
            cut,
        )
        told(memory.next_id, rewards.size)
    return memory

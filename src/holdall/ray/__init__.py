"""Replay memory on several machines, with the methods of a local memory. Its shards are Ray actors.

The learner makes a `holdall.ray.ReplayMemory`. Actors that play get a `memory.writer()`, or `collect` starts them.
Further learners call `attach`. `holdall.ray.sb3` has a buffer for Stable-Baselines3. A name is imported at its first
use, so that a restarted shard starts quickly.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdall.cluster.handle import MemoryHandle, attach
    from holdall.cluster.limiter import RateLimit
    from holdall.cluster.memory import ReplayMemory
    from holdall.cluster.writer import Writer
    from holdall.ray.players import Collection, collect

__all__ = ["Collection", "MemoryHandle", "RateLimit", "ReplayMemory", "Writer", "attach", "collect"]

_MODULES = {
    "Collection": "ray.players",
    "MemoryHandle": "cluster.handle",
    "RateLimit": "cluster.limiter",
    "ReplayMemory": "cluster.memory",
    "Writer": "cluster.writer",
    "attach": "cluster.handle",
    "collect": "ray.players",
}

if not TYPE_CHECKING:  # With a `__getattr__`, a type checker would accept every misspelt name.

    def __getattr__(name: str) -> object:
        if name == "sb3":
            return importlib.import_module("holdall.ray.sb3")
        if name not in _MODULES:
            raise AttributeError(f"module 'holdall.ray' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"holdall.{_MODULES[name]}"), name)
        globals()[name] = value
        return value

"""Replay memory on several machines: the methods of a local memory over shards, which are Ray actors.

The learner makes a `holdall.ray.ReplayMemory`. Actors get a `memory.writer()`, or `collect` starts them. Further
learners call `attach`. `holdall.ray.sb3` has a buffer for Stable-Baselines3. A name is imported when it is
first used, so that a restarted shard starts quickly.
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

_HOMES = {
    "Collection": "ray.players",
    "MemoryHandle": "cluster.handle",
    "RateLimit": "cluster.limiter",
    "ReplayMemory": "cluster.memory",
    "Writer": "cluster.writer",
    "attach": "cluster.handle",
    "collect": "ray.players",
}

if not TYPE_CHECKING:  # a type checker would take every misspelt name for a module

    def __getattr__(name: str) -> object:
        if name == "sb3":
            return importlib.import_module("holdall.ray.sb3")
        if name not in _HOMES:
            raise AttributeError(f"module 'holdall.ray' has no attribute {name!r}")
        found = getattr(importlib.import_module(f"holdall.{_HOMES[name]}"), name)
        globals()[name] = found
        return found

"""The memory past one machine: the same calls over shards, which are actors of Ray's.

`holdall.ray.ReplayMemory` is made where the learner is; `memory.writer()` goes to the actors, or `collect` starts them.
`attach` gives further learners a handle of their own.
`holdall.ray.sb3` has what Stable-Baselines3's learners need. Names are imported when they are asked for: a shard
that is started again after a loss waits for no more than it uses.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdall.cluster.handle import MemoryHandle, attach
    from holdall.cluster.memory import ReplayMemory
    from holdall.cluster.roster import RateLimit
    from holdall.cluster.writer import Writer
    from holdall.ray.players import Collection, collect

__all__ = ["Collection", "MemoryHandle", "RateLimit", "ReplayMemory", "Writer", "attach", "collect"]

_HOMES = {
    "Collection": "ray.players",
    "MemoryHandle": "cluster.handle",
    "RateLimit": "cluster.roster",
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
        globals()[name] = found  # asked for once
        return found

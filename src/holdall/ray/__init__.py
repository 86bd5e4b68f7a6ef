"""Replay memory on several machines, with the methods of a local memory. Its shards are Ray actors.

The learner makes a `holdall.ray.ReplayMemory`. Actors that play get a `memory.writer()`, or `collect` starts them.
Further learners call `attach`. `holdall.ray.sb3` has a buffer for Stable-Baselines3. A name is imported at its first
use, so that a restarted shard starts quickly.
"""

from typing import TYPE_CHECKING

from holdall.lazy_names import attach_names

if TYPE_CHECKING:
    from holdall.cluster.handle import MemoryHandle, attach
    from holdall.cluster.limiter import RateLimit
    from holdall.cluster.memory import ReplayMemory
    from holdall.cluster.writer import Writer
    from holdall.ray.players import Collection, collect

__all__ = ["Collection", "MemoryHandle", "RateLimit", "ReplayMemory", "Writer", "attach", "collect"]

if not TYPE_CHECKING:  # With `__getattr__`, a type checker would accept every misspelt name.
    __getattr__, __dir__ = attach_names(
        __name__,
        {
            "holdall.cluster.handle": ("MemoryHandle", "attach"),
            "holdall.cluster.limiter": ("RateLimit",),
            "holdall.cluster.memory": ("ReplayMemory",),
            "holdall.cluster.writer": ("Writer",),
            "holdall.ray.players": ("Collection", "collect"),
        },
        submodules=("sb3",),
    )

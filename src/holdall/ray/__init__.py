"""The memory past one machine: the same calls over shards, which are actors of Ray's.

`holdall.ray.ReplayMemory` is made where the learner is; `memory.writer()` goes to the actors, or `collect` starts them.
`holdall.ray.sb3` has what Stable-Baselines3's learners need.
"""

from holdall.ray.collect import Collection, collect
from holdall.ray.limiter import RateLimit
from holdall.ray.memory import ReplayMemory
from holdall.ray.writer import Writer

__all__ = ["Collection", "RateLimit", "ReplayMemory", "Writer", "collect"]

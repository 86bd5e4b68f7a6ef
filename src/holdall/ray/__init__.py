"""The memory past one machine: the same calls over shards, which are actors of Ray's.

`holdall.ray.ReplayMemory` is made where the learner is; `memory.writer()` goes to the actors.
"""

from holdall.ray.limiter import RateLimit
from holdall.ray.memory import ReplayMemory
from holdall.ray.writer import Writer

__all__ = ["RateLimit", "ReplayMemory", "Writer"]

"""Drop-ins for Stable-Baselines3: same constructors, same draws, same weights for one seed."""

from holdall.errors import MissingPackageError

try:
    import stable_baselines3  # noqa: F401  only to say clearly what is missing
except ImportError as error:
    raise MissingPackageError("holdall.sb3 needs Stable-Baselines3; run \"pip install 'holdall[sb3]'\"") from error

from holdall.sb3.callbacks import LintCallback, WatchCallback
from holdall.sb3.checkpoint import CheckpointCallback, resume
from holdall.sb3.her import HerReplayBuffer
from holdall.sb3.prioritized import PrioritizedDQN, PrioritizedReplay, PrioritizedReplayBuffer
from holdall.sb3.replay import ReplayBuffer
from holdall.sb3.rollout import RolloutBuffer

__all__ = [
    "CheckpointCallback", "HerReplayBuffer", "LintCallback", "PrioritizedDQN", "PrioritizedReplay",
    "PrioritizedReplayBuffer", "ReplayBuffer", "RolloutBuffer", "WatchCallback", "resume",
]  # fmt: skip

"""Drop-ins for Stable-Baselines3: buffers with the same constructors, draws and weights for one seed, and callbacks.

Every name is imported from its module when it is first used, so `from holdall.sb3 import ReplayBuffer` loads no tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdall.errors import MissingPackageError
from holdall.lazy_names import attach_names

try:
    import stable_baselines3  # noqa: F401  Only to check that it is installed.
except ImportError as error:
    raise MissingPackageError("holdall.sb3 needs Stable-Baselines3; run \"pip install 'holdall[sb3]'\"") from error

if TYPE_CHECKING:
    from holdall.sb3.checkpoint import CheckpointCallback, resume
    from holdall.sb3.her import HerReplayBuffer
    from holdall.sb3.prioritized import PrioritizedDQN, PrioritizedReplay, PrioritizedReplayBuffer
    from holdall.sb3.replay import ReplayBuffer
    from holdall.sb3.rollout import RolloutBuffer
    from holdall.tools.sb3 import LintCallback, WatchCallback
    from holdall.tools.sb3 import LintError as LintError
    from holdall.tools.sb3 import LintWarning as LintWarning

__all__ = [
    "CheckpointCallback",
    "HerReplayBuffer",
    "LintCallback",
    "PrioritizedDQN",
    "PrioritizedReplay",
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "RolloutBuffer",
    "WatchCallback",
    "resume",
]

if not TYPE_CHECKING:  # With `__getattr__`, a type checker would accept every misspelt name.
    __getattr__, __dir__ = attach_names(
        __name__,
        {
            "holdall.sb3.checkpoint": ("CheckpointCallback", "resume"),
            "holdall.sb3.her": ("HerReplayBuffer",),
            "holdall.sb3.prioritized": ("PrioritizedDQN", "PrioritizedReplay", "PrioritizedReplayBuffer"),
            "holdall.sb3.replay": ("ReplayBuffer",),
            "holdall.sb3.rollout": ("RolloutBuffer",),
            "holdall.tools.sb3": ("LintCallback", "LintError", "LintWarning", "WatchCallback"),
        },
    )

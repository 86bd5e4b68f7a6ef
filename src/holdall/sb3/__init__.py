"""Drop-ins for Stable-Baselines3: buffers with the same constructors, draws and weights for one seed, and callbacks.

Every name is imported from its module when it is first used, so `from holdall.sb3 import ReplayBuffer` loads no tool.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from holdall.errors import MissingPackageError

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

_MODULE_BY_NAME = {
    "CheckpointCallback": "holdall.sb3.checkpoint",
    "HerReplayBuffer": "holdall.sb3.her",
    "LintCallback": "holdall.tools.sb3",
    "LintError": "holdall.tools.sb3",
    "LintWarning": "holdall.tools.sb3",
    "PrioritizedDQN": "holdall.sb3.prioritized",
    "PrioritizedReplay": "holdall.sb3.prioritized",
    "PrioritizedReplayBuffer": "holdall.sb3.prioritized",
    "ReplayBuffer": "holdall.sb3.replay",
    "RolloutBuffer": "holdall.sb3.rollout",
    "WatchCallback": "holdall.tools.sb3",
    "resume": "holdall.sb3.checkpoint",
}

if not TYPE_CHECKING:  # A type checker would accept every misspelt name.

    def __getattr__(name: str) -> object:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module 'holdall.sb3' has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_BY_NAME})

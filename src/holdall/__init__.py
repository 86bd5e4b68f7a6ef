"""holdall: experience memory for deep reinforcement learning, exact in a fraction of the memory.

Every name is imported from its module when it is first used. So `import holdall` takes little time, and commands
such as `holdall lint` load only what they use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdall import threads
    from holdall.batch import Batch, RolloutBatch
    from holdall.checkpoint import Checkpoint, SaveHandle
    from holdall.dataset import Dataset
    from holdall.errors import (
        ArgumentError,
        CheckpointError,
        ClosedError,
        DamageError,
        FencedError,
        HoldallError,
        MissingPackageError,
        ShardError,
        SpaceError,
        TransitionIdError,
    )
    from holdall.memory import ReplayMemory
    from holdall.recorder import Recorder
    from holdall.report import FieldReport, MemoryReport
    from holdall.rollout import RolloutMemory
    from holdall.sampling import Hindsight, NStep, Prioritized, Sequence, Uniform
    from holdall.shared import SharedObservations

__all__ = [
    "ArgumentError",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "DamageError",
    "Dataset",
    "FencedError",
    "FieldReport",
    "Hindsight",
    "HoldallError",
    "MemoryReport",
    "MissingPackageError",
    "NStep",
    "Prioritized",
    "Recorder",
    "ReplayMemory",
    "RolloutBatch",
    "RolloutMemory",
    "SaveHandle",
    "Sequence",
    "ShardError",
    "SharedObservations",
    "SpaceError",
    "TransitionIdError",
    "Uniform",
    "threads",
]
__version__ = "0.1.0"

_MODULES = frozenset(
    {
        "cleanrl",
        "dreamer",
        "drqv2",
        "elegantrl",
        "lerobot",
        "lint",
        "plan",
        "ray",
        "sb3",
        "testing",
        "threads",
        "torchrl",
        "watch",
    }
)
"""Modules that are imported when they are first used, as in `holdall.plan.model(model)`."""

_NAMES_BY_MODULE = {
    "batch": ("Batch", "RolloutBatch"),
    "checkpoint": ("Checkpoint", "SaveHandle"),
    "dataset": ("Dataset",),
    "errors": (
        "ArgumentError",
        "CheckpointError",
        "ClosedError",
        "DamageError",
        "FencedError",
        "HoldallError",
        "MissingPackageError",
        "ShardError",
        "SpaceError",
        "TransitionIdError",
    ),
    "memory": ("ReplayMemory",),
    "recorder": ("Recorder",),
    "report": ("FieldReport", "MemoryReport"),
    "rollout": ("RolloutMemory",),
    "sampling": ("Hindsight", "NStep", "Prioritized", "Sequence", "Uniform"),
    "shared": ("SharedObservations",),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

if not TYPE_CHECKING:  # With this function, a type checker would accept every misspelt name.

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return importlib.import_module(f"holdall.{name}")
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module 'holdall' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"holdall.{_MODULE_BY_NAME[name]}"), name)
        globals()[name] = value  # Python finds it there next time, without this function.
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})

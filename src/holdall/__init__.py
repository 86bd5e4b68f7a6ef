"""holdall: experience memory for deep reinforcement learning, exact in a fraction of the memory."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from holdall import threads
from holdall.batch import Batch, RolloutBatch
from holdall.checkpoint.handle import Checkpoint, SaveHandle
from holdall.errors import (
    ArgumentError,
    CheckpointError,
    ClosedError,
    DamageError,
    FencedError,
    HoldallError,
    MissingPackageError,
    SpaceError,
    TransitionIdError,
)
from holdall.replay import ReplayMemory
from holdall.report import FieldReport, MemoryReport
from holdall.rollout import RolloutMemory
from holdall.sampling.hindsight import Hindsight
from holdall.sampling.nstep import NStep
from holdall.sampling.prioritized import Prioritized
from holdall.sampling.sequence import Sequence
from holdall.sampling.uniform import Uniform
from holdall.shared import SharedObservations

__all__ = [
    "ArgumentError",
    "Batch",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "DamageError",
    "FencedError",
    "FieldReport",
    "Hindsight",
    "HoldallError",
    "MemoryReport",
    "MissingPackageError",
    "NStep",
    "Prioritized",
    "ReplayMemory",
    "RolloutBatch",
    "RolloutMemory",
    "SaveHandle",
    "Sequence",
    "SharedObservations",
    "SpaceError",
    "TransitionIdError",
    "Uniform",
    "threads",
]
__version__ = "0.1.0"

_LATER = frozenset({"elegantrl", "lint", "plan", "sb3", "testing"})
"""Modules that are imported when they are first asked for, as in `holdall.plan.model(model)`: they need more than most
users have installed, or longer than `import holdall` may take."""

if not TYPE_CHECKING:  # a type checker would take every misspelt name for a module

    def __getattr__(name: str) -> ModuleType:
        if name in _LATER:
            return importlib.import_module(f"holdall.{name}")
        raise AttributeError(f"module 'holdall' has no attribute {name!r}")

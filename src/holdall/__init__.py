"""holdall: experience memory for deep reinforcement learning, exact in a fraction of the memory.

Every name is imported from its module when it is first used. So `import holdall` takes little time, and commands
such as `holdall lint` load only what they use.
"""

from typing import TYPE_CHECKING

from holdall.lazy_names import attach_names

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

if not TYPE_CHECKING:  # With `__getattr__`, a type checker would accept every misspelt name.
    __getattr__, __dir__ = attach_names(
        __name__,
        {
            "holdall.batch": ("Batch", "RolloutBatch"),
            "holdall.checkpoint": ("Checkpoint", "SaveHandle"),
            "holdall.dataset": ("Dataset",),
            "holdall.errors": (
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
            "holdall.memory": ("ReplayMemory",),
            "holdall.recorder": ("Recorder",),
            "holdall.report": ("FieldReport", "MemoryReport"),
            "holdall.rollout": ("RolloutMemory",),
            "holdall.sampling": ("Hindsight", "NStep", "Prioritized", "Sequence", "Uniform"),
            "holdall.shared": ("SharedObservations",),
        },
        submodules=(
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
        ),
    )

"""One training of a bench: its settings, and the figures that its process sends. `training` runs in that process."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from holdall.tools.bench import SaveFigures
from holdall.tools.bench.child import ChildProgress, make_module_command, run_child


@dataclass(frozen=True, slots=True)
class Task:
    """Settings of one training."""

    env_id: str
    algo: str
    buffer: str
    size: int  # Capacity of a replay buffer, or steps of a rollout.
    batch_size: int
    timesteps: int
    seed: int
    fills: bool  # Whether random actions fill the buffer before training.
    features: str  # Class of the features extractor, as module:Class. Empty: the default of the algorithm.
    policy_kwargs: dict[str, Any]
    threads: int  # Threads of torch. 0: torch's default.
    num_envs: int = 1


@dataclass(frozen=True, slots=True)
class TrainingFigures:
    """Figures of one training."""

    steps: int
    buffer_bytes: int
    filled: float  # Share of the buffer that was full before training was measured.
    steps_per_second: float
    fill_per_second: float | None  # Steps per second while random actions filled the buffer. None: on-policy.
    bytes_per_transition: float | None
    rewards: list[float]  # Returns of the last episodes.
    checkpoint: SaveFigures
    peaks: dict[str, int]  # Largest resident set in each phase.
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """Largest resident set of the whole training."""
        return max(self.peaks.values())


def run_task(task: Task) -> Generator[ChildProgress | TrainingFigures, None, None]:
    """Run one training in a process of its own. Yield its messages."""
    command = make_module_command("tools.bench.training", json.dumps(asdict(task)))
    return run_child(command, TrainingFigures)

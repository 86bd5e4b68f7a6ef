"""What one process trains, as it travels there: plain data, and the command that runs it."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import asdict, dataclass
from typing import Any

from holdall.bench.child import messages, module


@dataclass(frozen=True, slots=True)
class Task:
    """What one process trains."""

    env_id: str
    algo: str
    buffer: str
    size: int  # capacity of a replay buffer, or steps of a rollout
    batch_size: int
    timesteps: int
    seed: int
    fills: bool
    features: str
    policy_kwargs: dict[str, Any]
    threads: int  # of torch; 0: as many as it takes by itself
    num_envs: int = 1


def run_task(task: Task) -> Generator[dict[str, Any], None, None]:
    """Run one training in a process of its own; yield what it says."""
    return messages(module("bench.training", json.dumps(asdict(task))))

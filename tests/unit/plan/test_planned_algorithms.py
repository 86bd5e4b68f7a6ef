"""The bytes of a transition, and versions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from holdall.tools.plan.algorithms import count_step_bytes, count_transition_bytes, parse_version

VECTOR = spaces.Box(-1, 1, (3,), np.float32)
CONTINUOUS = spaces.Box(-1, 1, (4,), np.float32)
KEYS = spaces.Dict({"a": spaces.Discrete(3), "b": VECTOR})


@pytest.mark.parametrize(
    "observation",
    [
        VECTOR,
        spaces.Box(0, 255, (84, 84, 4), np.uint8),
        spaces.Box(-1, 1, (2, 5), np.float64),
        spaces.Discrete(7),
        spaces.MultiDiscrete([3, 4, 5]),
        spaces.MultiBinary([2, 3]),
        KEYS,
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "action",
    [
        CONTINUOUS,
        spaces.Box(-1, 1, (2, 3), np.float64),
        spaces.Box(-1, 1, (2,), np.float16),
        spaces.Discrete(4),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(5),
    ],
    ids=str,
)
def test_a_transition_has_the_bytes_that_stable_baselines3_allocates(
    observation: spaces.Space[Any], action: spaces.Space[Any]
) -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    prefix = "Dict" if isinstance(observation, spaces.Dict) else ""
    for kind, count in (("ReplayBuffer", count_transition_bytes), ("RolloutBuffer", count_step_bytes)):
        buffer = getattr(buffers, f"{prefix}{kind}")(50, observation, action, device="cpu", n_envs=2)
        arrays: list[Any] = []
        for value in vars(buffer).values():
            arrays += value.values() if isinstance(value, dict) else [value]
        allocated = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
        steps = 50 if kind == "ReplayBuffer" else 100  # A replay buffer divides its size by the environments.
        assert allocated == steps * count(observation, action)


@pytest.mark.parametrize(("text", "numbers"), [("2.7.0", (2, 7, 0)), ("2.8.0a3", (2, 8, 0)), ("2.9", (2, 9, 0))])
def test_versions_are_compared_as_numbers(text: str, numbers: tuple[int, int, int]) -> None:
    assert parse_version(text) == numbers


def test_checks_need_neither_torch_nor_stable_baselines3() -> None:
    heavy = "{'torch', 'stable_baselines3', 'rich'}"
    check = f"import sys, holdall.tools.plan.algorithms; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0
